"""Which layers and kernels the ranks of a launch have chosen."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from hetero.report.tables.fitting_table import FittingTable
from hetero.text import number_ranges


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLayers:
    """What one rank says of itself: a line of a log.

    layers: TransformerEngine's and its version, or local ones, and why.
    attention: who computes attention, and by which kernel.
    fused: what is computed by one kernel each.
    """

    device: str
    layers: str
    attention: str
    fused: tuple[str, ...]


def layers_table(ranks: Sequence[Sequence[RankLayers]]) -> Table:
    """Make a row of all ranks that chose alike on one type of device, in the order of their first ranks.

    ``ranks`` is by rank, empty where a rank is idle; a rank whose stages differ is in several rows.
    """
    alike: dict[RankLayers, list[int]] = {}
    for rank, chosen in enumerate(ranks):
        for layers in dict.fromkeys(chosen):
            alike.setdefault(layers, []).append(rank)
    table = FittingTable(title="Layers and kernels")
    for header in ("device", "ranks", "layers", "attention", "in one kernel"):
        table.add_column(header)
    for layers, numbers in alike.items():
        fused = ", ".join(layers.fused) or "-"
        table.add_row(layers.device, number_ranges(numbers), layers.layers, layers.attention, fused)
    return table
