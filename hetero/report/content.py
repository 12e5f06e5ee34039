"""The data of a report: a plan, its prediction row by row, and what it is compared with. Nothing is drawn here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hetero.cost.capacity import capacity_bytes
from hetero.cost.cost_model import CostModel
from hetero.cost.memory import PlanMemory, device_memory
from hetero.cost.model_flops import Products, Utilization, utilizations
from hetero.cost.simulation.simulator import Simulation
from hetero.cost.simulation.stage_times import StageTimes
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.certainty import Certainty, Rival
from hetero.planner.reference.yardsticks import Yardstick
from hetero.planner.scoring import ScoredPlan
from hetero.spec.cluster import ClusterSpec
from hetero.text import numbered

if TYPE_CHECKING:
    from hetero.planner.plan_cluster import PlanResult

MOST_NAMED_REPLICAS = 7
"""So many replicas are shown by their own names and colours; with more of them, groups that are alike are."""

ColoursOf = Literal["replica", "device"]
"""What the colours of stages tell: replica and stage, or the type of their devices."""

RANGE_CHARACTERS = 28
"""A list of numbers longer than this is told by its length."""


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """One device group of all replicas that differ in their ranks only: mostly a stage, or several in turns.

    group: number of that sort of replica; ``members`` are its replicas, ``replica`` is the first.
    indices: of the stages.
    times: of the ranks, all stages together.
    memory: peak parts of one device, of the member that needs most.
    capacity_bytes: of one device; ``None`` where nobody knows it.
    """

    group: int
    members: tuple[int, ...]
    replica: Replica
    indices: tuple[int, ...]
    times: StageTimes
    memory: MemoryBreakdown
    capacity_bytes: int | None

    @property
    def index(self) -> int:
        """Of the first stage."""
        return self.indices[0]

    @property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(self.replica.stages[s] for s in self.indices)

    @property
    def stage(self) -> Stage:
        """The first stage, for what all of them have alike: ranks and degrees, device and microbatches."""
        return self.replica.stages[self.index]

    @property
    def title(self) -> str:
        """``stage 1``, or ``stages 1,3``."""
        return named("stage", self.indices)

    @property
    def place(self) -> tuple[int, int]:
        """Which of how many device groups of its replica it is."""
        groups = self.replica.device_groups
        return groups.index(self.indices), len(groups)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def num_microbatches(self) -> int:
        return self.replica.num_microbatches(self.index)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Steps of a plan that ran on an emulated cluster, beside their prediction.

    losses: of every step, of the small model that really computed.
    """

    name: str
    predicted: Simulation
    executed: Simulation
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the figures and the page are made from.

    model_name, cluster_name: what their reader calls them.
    memory: parts of one device of every stage at the device's peak.
    certainty: how far the prediction may be off.
    result: what the planner knows about its plan; ``None`` for a plan that came from elsewhere.
    others: the yardsticks; empty if nothing was compared.
    rivals: how the plan stands against those of them that have a plan.
    executions: plans that ran under emulation, this one first; empty if none did.
    plan_file: where the plan lies, ``None`` if it was not written.
    commands: for each measurement of ``certainty`` what to type; empty if nobody asked for a page of a command.
    colours: what the colours of stages tell. By device, those of computes do as well.
    """

    model_name: str
    cluster_name: str
    cluster: ClusterSpec
    costs: CostModel
    simulation: Simulation
    memory: PlanMemory
    certainty: Certainty
    result: "PlanResult | None" = None
    others: tuple[Yardstick, ...] = ()
    rivals: tuple[Rival, ...] = ()
    executions: tuple[Execution, ...] = ()
    plan_file: Path | None = None
    commands: tuple[tuple[str, ...], ...] = ()
    colours: ColoursOf = "replica"

    @property
    def plan(self) -> Plan:
        return self.simulation.plan

    @cached_property
    def utilizations(self) -> Mapping[Products, Utilization]:
        """What the devices of each type make of their peak."""
        return utilizations(self.simulation, self.costs)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Replicas that differ in their ranks only, together."""
        return tuple(tuple(members) for members in self.plan.alike())

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of each replica."""
        return {r: group for group, members in enumerate(self.groups) for r in members}

    @property
    def names_each_replica(self) -> bool:
        """Whether every replica is shown by itself, and not with the others of its group."""
        return len(self.plan.replicas) <= MOST_NAMED_REPLICAS

    def owner(self, replica: int) -> str:
        """What a box of the replica is called: by its number, or by its group where groups are shown."""
        return f"replica {replica}" if self.names_each_replica else f"group {self.group_of[replica]}"

    @cached_property
    def rows(self) -> tuple[DeviceRow, ...]:
        """One per device group of every group of replicas."""
        devices = device_memory(self.plan, self.memory)
        rows = []
        for group, members in enumerate(self.groups):
            replica = self.plan.replicas[members[0]]
            for indices in replica.device_groups:
                s = indices[0]
                rows.append(
                    DeviceRow(
                        group=group,
                        members=members,
                        replica=replica,
                        indices=indices,
                        times=self.simulation.stages[members[0], s],
                        memory=max((devices[r, s] for r in members), key=lambda parts: parts.total),
                        capacity_bytes=capacity_bytes(replica.stages[s], self.cluster),
                    )
                )
        return tuple(rows)

    def drawn_rows(self, most: int) -> tuple[DeviceRow, ...]:
        """The rows of whole groups in order, without the groups that would make them more than ``most``; one group at
        least."""
        drawn: list[DeviceRow] = []
        for group in range(len(self.groups)):
            rows = [row for row in self.rows if row.group == group]
            if not drawn or len(drawn) + len(rows) <= most:
                drawn += rows
        return tuple(drawn)

    def group_title(self, row: DeviceRow) -> str:
        """``replicas 0-3, 64 samples each``, of the group that ``row`` belongs to."""
        members = named("replica", row.members)
        if not self.names_each_replica:
            members = f"group {row.group}: {members}"
        each = " each" if len(row.members) > 1 else ""
        return f"{members}, {row.replica.num_samples} samples{each}"

    @cached_property
    def compared(self) -> tuple[Yardstick, ...]:
        """The plan and the yardsticks."""
        ours = ScoredPlan(plan=self.plan, simulation=self.simulation, memory=self.memory)
        return (Yardstick(name="this plan", best=ours), *self.others)

    @cached_property
    def devices(self) -> Mapping[str, int]:
        """How many devices of each type the cluster has, in the order of its file."""
        found: dict[str, int] = {}
        for node_type in self.cluster.node_types:
            found[node_type.device] = found.get(node_type.device, 0) + node_type.num_devices
        return found

    def best_uniform(self) -> tuple[str, ScoredPlan] | None:
        """The fastest yardstick that gives all its GPUs one and the same degrees, with its name."""
        found = [(each.name, each.best) for each in self.others if each.is_uniform and each.best is not None]
        return min(found, key=lambda pair: pair[1].step_s, default=None)


def named(what: str, numbers: Sequence[int]) -> str:
    """``replica 3``, ``replicas 0-3``, or ``40 replicas`` where the list would be long."""
    text = numbered(what, numbers)
    return text if len(text) <= RANGE_CHARACTERS else f"{len(numbers)} {what}s"
