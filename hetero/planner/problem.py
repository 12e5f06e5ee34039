"""The question to the planner: a cluster as its node types, a model with its costs, and what is minimised."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hetero.cost.cost_model import CostModel
from hetero.cost.network import Topology
from hetero.cost.offload.host_rates import can_update
from hetero.cost.simulation.simulated_plan import KnownParts
from hetero.errors import ConfigError
from hetero.plan.device_rules import FP8_MULTIPLE, fp8_obstacle
from hetero.plan.ir import Plan, Precision, Replica
from hetero.plan.offload import OnHost
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.model import ModelSpec, sequence_length_error
from hetero.units import GIB

MAX_GLOBAL_BATCH_SIZE = 10_000_000
"""Limit of the samples of a step, a hundred times what the largest runs take; each of its microbatches is replayed."""

MAX_TIME_LIMIT_S = 7 * 24 * 3600.0
"""Limit of the time limit: a week."""

MAX_SEED = 2**31 - 1
"""Limit of the solver's seed, a whole number of 32 bits."""

MAX_BUDGET_PER_HOUR = 1e15
"""Limit of a budget, which is counted in thousandths and has to fit 64 bits."""
MOST_KNOWN_PARTS = 64
"""Replays and such that are kept for later plans. A heuristic: changes that are tried one after the other have most in
common with the plan that they start from."""

Goal = Literal["time", "money"]
"""``time``: the shortest step. ``money``: the least money per token, nodes that idle not counted."""


Offloading = Literal["auto", "none"]
"""``auto``: plans leave optimizer state to hosts where memory is short. ``none``: they never do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerNodeType:
    """All nodes of one node type of the cluster file; which of them a stage gets is settled only when ranks are handed
    out.

    index: among the node types of the problem.
    memory_bytes: of one device.
    host_bytes: of the host's memory, one device's part; 0 where plans leave nothing to the hosts.
    first_rank: of the first node; the others follow.
    """

    index: int
    name: str
    device: str
    gpus_per_node: int
    count: int
    memory_bytes: int
    host_bytes: int
    zone: str
    price_per_hour: float | None
    first_rank: int

    @property
    def num_devices(self) -> int:
        return self.gpus_per_node * self.count

    @property
    def ranks(self) -> range:
        """The ranks of all nodes."""
        return range(self.first_rank, self.first_rank + self.num_devices)

    def ranks_of_node(self, node: int) -> range:
        """The ranks of the ``node``-th node of this node type."""
        first = self.first_rank + node * self.gpus_per_node
        return range(first, first + self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question to the planner.

    goal: what is minimised; ``budget_per_hour`` bounds the price of the nodes in use under either goal.
    distributed_optimizer: of the plans that are looked for.
    hidden_dropout, attention_dropout: of the same, and of ``costs``.
    splits_backward: plans may split backwards, which the runtime does with megatron-core's local layers only.
    fp8: every stage computes in fp8 that can.
    interleaves: a device group may hold several stages of a replica.
    offload: of stages on hosts that the cluster file describes, with ``distributed_optimizer``.
    previews: hosts may update before the norm of the gradient is known, which elastic training refuses.
    seed: of the solver's random choices. With one and the same seed the search takes the same course as long as the
        time limit does not cut it short.
    time_limit_s: seconds after which the best plan so far is returned, with the bound that was proven by then.
    """

    cluster: ClusterSpec
    costs: CostModel
    global_batch_size: int
    distributed_optimizer: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    goal: Goal = "time"
    budget_per_hour: float | None = None
    time_limit_s: float = 30.0
    seed: int = 0
    splits_backward: bool = True
    fp8: bool = False
    interleaves: bool = True
    offload: Offloading = "auto"
    previews: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.global_batch_size <= MAX_GLOBAL_BATCH_SIZE:
            raise ConfigError(
                f"planner: global_batch_size is {self.global_batch_size}, must be at least 1 and at most "
                f"{MAX_GLOBAL_BATCH_SIZE:,} samples (--global-batch-size)"
            )
        if error := sequence_length_error(self.model, self.seq_length):
            raise ConfigError(f"planner: {error}")
        if not 0 < self.time_limit_s <= MAX_TIME_LIMIT_S:
            raise ConfigError(
                f"planner: the time limit is {self.time_limit_s:g} s, must be above 0 and at most "
                f"{MAX_TIME_LIMIT_S:,.0f}, a week (--time-limit)"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"planner: the seed is {self.seed}, must be at least 0 and at most {MAX_SEED} (--seed)")
        if self.budget_per_hour is not None and not 1e-3 <= self.budget_per_hour <= MAX_BUDGET_PER_HOUR:
            raise ConfigError(
                f"planner: the budget is {self.budget_per_hour:g} per hour, must be at least 0.001 and at most "
                f"{MAX_BUDGET_PER_HOUR:g} (--budget-per-hour)"
            )
        if self.goal == "money" or self.budget_per_hour is not None:
            unpriced = [node_type.name for node_type in self.node_types if node_type.price_per_hour is None]
            if unpriced:
                raise ConfigError(
                    f"cluster: node type {unpriced[0]!r} has no price_per_hour, which planning by money needs; "
                    "add that to the cluster file, or leave --objective and --budget-per-hour out"
                )

    @property
    def model(self) -> ModelSpec:
        return self.costs.model

    @property
    def seq_length(self) -> int:
        return self.costs.seq_length

    @property
    def precision(self) -> Precision:
        return self.costs.precision

    @property
    def milli_budget(self) -> float:
        """The budget in whole thousandths of the currency, rounded against the plan; infinite where there is none."""
        return math.inf if self.budget_per_hour is None else int(self.budget_per_hour * 1000)

    @property
    def delays_weight_gradients(self) -> bool:
        """Whether split backwards may gain anything: not where a transfer holds the device up."""
        return self.splits_backward and not self.costs.runtime.blocking_transfers

    def splits_sequence(self, tp: int) -> bool:
        """Sequence parallelism wherever it is possible: it takes no more time, less memory, and less of a boundary."""
        return tp > 1 and self.seq_length % tp == 0

    def computes_in_fp8(self, device: str, *, tp: int, micro_batch_size: int) -> bool:
        """Whether a stage of such devices does: wherever it is asked for and possible, as products take less time."""
        if not self.fp8:
            return False
        rows = micro_batch_size * self.seq_length // (tp if self.splits_sequence(tp) else 1)
        return self._fp8_obstacle(device, tp=tp, num_tokens=rows) is None

    def fp8_obstacle_of(self, device: str) -> str | None:
        """Why no stage of such devices computes in fp8, whatever its tp and microbatch; ``None`` if some may."""
        return self._fp8_obstacle(device, tp=1, num_tokens=FP8_MULTIPLE)

    def _fp8_obstacle(self, device: str, *, tp: int, num_tokens: int) -> str | None:
        described = self.cluster.device_types.of(device)
        return fp8_obstacle(self.model, described, precision=self.precision, tp=tp, num_tokens=num_tokens)

    @cached_property
    def topology(self) -> Topology:
        return Topology(self.cluster)

    @cached_property
    def known_parts(self) -> KnownParts:
        """Parts of the steps of plans that were simulated last, for those that have them too."""
        return KnownParts(MOST_KNOWN_PARTS)

    @cached_property
    def node_types(self) -> tuple[PlannerNodeType, ...]:
        """The node types in file order."""
        node_types = []
        first_rank = 0
        for index, node_type in enumerate(self.cluster.node_types):
            memory_gib = self.cluster.device_of_rank(first_rank).memory_gib
            if memory_gib is None:
                raise ConfigError(
                    f"cluster: node type {node_type.name!r} has devices of type {node_type.device!r}, whose memory is "
                    "unknown; set memory_gib"
                )
            node_types.append(
                PlannerNodeType(
                    index=index,
                    name=node_type.name,
                    device=node_type.device,
                    gpus_per_node=node_type.gpus_per_node,
                    count=node_type.count,
                    memory_bytes=memory_gib * GIB,
                    host_bytes=self._host_bytes(node_type),
                    zone=node_type.zone,
                    price_per_hour=node_type.price_per_hour,
                    first_rank=first_rank,
                )
            )
            first_rank += node_type.num_devices
        return tuple(node_types)

    @cached_property
    def usable_node_types(self) -> tuple[PlannerNodeType, ...]:
        """The node types whose devices have the precision, in file order; the others idle in every plan."""
        of = self.cluster.device_types.of
        return tuple(each for each in self.node_types if self.precision in of(each.device).precisions)

    def _host_bytes(self, node_type: NodeType) -> int:
        host_gib = node_type.usable_host_memory_gib
        if not (self.offload == "auto" and self.distributed_optimizer and host_gib and can_update(node_type)):
            return 0
        return int(host_gib * GIB) // node_type.gpus_per_node

    @property
    def offloads(self) -> bool:
        """Whether some host may update for its devices."""
        return any(node_type.host_bytes for node_type in self.node_types)

    @property
    def most_on_host(self) -> OnHost:
        """The most that stages may leave to hosts: everything where one may update."""
        return OnHost.WEIGHTS if self.offloads else OnHost.NOTHING

    def node_type_of(self, rank: int) -> PlannerNodeType:
        """The node type whose nodes ``rank`` is on."""
        return next(node_type for node_type in self.node_types if rank in node_type.ranks)

    def plan_of(self, replicas: Iterable[Replica]) -> Plan:
        """The plan of this problem with these pipelines; ranks in none of them idle."""
        pipelines = tuple(replicas)
        stages = [stage for replica in pipelines for stage in replica.stages]
        working = {rank for stage in stages for rank in stage.ranks}
        used = {stage.device for stage in stages}
        return Plan(
            model=self.model,
            seq_length=self.seq_length,
            global_batch_size=self.global_batch_size,
            precision=self.precision,
            distributed_optimizer=self.distributed_optimizer,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            devices=tuple(device for device in self.cluster.devices if device.name in used),
            replicas=pipelines,
            idle_ranks=tuple(rank for rank in range(self.cluster.num_devices) if rank not in working),
        )
