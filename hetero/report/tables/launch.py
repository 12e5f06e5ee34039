"""Which rank of a plan runs on which host, on which device and for which stage, as a table."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from hetero.launch.hosts import NodeHost
from hetero.plan.ir import Plan
from hetero.report.plan_wording import degrees, device_of, held_by, in_turns
from hetero.report.tables.fitting_table import FittingTable
from hetero.text import number_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRow:
    """Neighbouring ranks of one host that hold the same stages.

    replica: empty for ranks without work.
    """

    ranks: str
    host: NodeHost
    devices: str
    replica: str
    stage: str
    layers: str


def rank_rows(plan: Plan, hosts: Sequence[NodeHost]) -> Iterator[RankRow]:
    """All ranks of the plan in order, folded where neighbours do the same."""
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for r, s, stage in plan.stages():
        for rank in stage.ranks:
            places[rank].append((r, s))
    for host in hosts:
        for held, group in itertools.groupby(host.ranks, key=lambda rank: places[rank]):
            ranks = list(group)
            stages = [plan.replicas[r].stages[s] for r, s in held]
            device = device_of(stages[0]) if stages else host.node_type.device
            yield RankRow(
                ranks=number_ranges(ranks),
                host=host,
                devices=f"{device} {number_ranges(rank - host.ranks.start for rank in ranks)}",
                replica=str(held[0][0]) if held else "",
                stage=number_ranges([s for _, s in held]) + degrees(stages[0]) if held else "idle",
                layers=in_turns(held_by(plan, stage) for stage in stages),
            )


def launch_table(plan: Plan, hosts: Sequence[NodeHost]) -> Table:
    """One row per run of ranks; devices have the numbers that they have on their host."""
    table = FittingTable(title="Who runs where", keys=2)
    for header in ("ranks", "host", "node", "device", "replica", "stage", "layers"):
        table.add_column(header, justify="right" if header in ("node", "replica") else "left")
    rows = list(rank_rows(plan, hosts))
    for row, following in itertools.zip_longest(rows, rows[1:]):
        table.add_row(
            *(row.ranks, row.host.name, str(row.host.node), row.devices, row.replica, row.stage, row.layers),
            end_section=following is None or following.host != row.host,
        )
    return table
