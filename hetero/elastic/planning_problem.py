"""What a launch asks the planner, whatever nodes are there: written once, asked again after every change."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from hetero.cost.runtime_model import LaunchedRuntime
from hetero.data.cost_models import model_costs
from hetero.elastic.records import NodeInfo, RunFlags
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Precision
from hetero.planner.problem import Offloading, Problem
from hetero.serialization import STRICT, near_match
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Profile

NodeCounts = Mapping[str, int]
"""How many nodes are there, by node type; one that is not named has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningProblem:
    """A question to the planner without its nodes, as JSON.

    cluster: all node types that may ever be there, and their links; its counts are those of the whole cluster.
    runtime: what the launch's flags choose, dropout included.
    splits_backward: plans may split backwards.
    profiles: beside those that ship.
    data_sheets: price devices without any profile by their data sheets.
    time_limit_s: seconds for a plan that nobody waits for.
    offload: as of :class:`~hetero.planner.problem.Problem`.
    small_model: what computes, is copied and stored where ``model`` is emulated; ``None`` where it is not.
    run: how long it is, and what becomes of its checkpoints.
    slower_types: the node types of the cluster that stand for stragglers, and how many times as slow these are
        (:mod:`hetero.elastic.stragglers`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    cluster: ClusterSpec
    model: ModelSpec
    seq_length: int
    precision: Precision
    global_batch_size: int
    distributed_optimizer: bool
    splits_backward: bool
    runtime: LaunchedRuntime
    profiles: tuple[Profile, ...] = ()
    data_sheets: bool = False
    time_limit_s: float = Problem.time_limit_s
    offload: Offloading = Problem.offload
    small_model: ModelSpec | None = None
    run: RunFlags = field(default_factory=RunFlags)
    slower_types: dict[str, float] = field(default_factory=dict)

    @property
    def trained_model(self) -> ModelSpec:
        """The model whose state ranks have."""
        return self.small_model or self.model

    def trained(self, plan: Plan) -> Plan:
        """``plan`` as ranks execute it, for what they have in memory: an emulation's in fp32."""
        if self.small_model is None:
            return plan
        return dataclasses.replace(plan.with_precision("fp32"), model=self.small_model)

    def is_answered_by(self, plan: Plan) -> bool:
        """Whether ranks of this run may execute ``plan``: a job may go on with other flags than its last epoch had."""
        dropouts = (
            (plan.hidden_dropout, self.runtime.hidden_dropout),
            (plan.attention_dropout, self.runtime.attention_dropout),
        )
        return (
            plan.model == self.model
            and plan.seq_length == self.seq_length
            and plan.global_batch_size == self.global_batch_size
            and plan.precision == self.precision
            and plan.distributed_optimizer == self.distributed_optimizer
            and all(planned in (None, given) for planned, given in dropouts)
        )

    def on(self, cluster: ClusterSpec, *, time_limit_s: float | None = None, previews: bool = False) -> Problem:
        """The question for all nodes of ``cluster``, by default with the launch's time limit.

        previews: hosts may preview updates, as elastic training refuses.

        Raises:
            ConfigError: a profile, a number or the cluster is wrong.
        """
        costs = model_costs(
            self.model,
            seq_length=self.seq_length,
            precision=self.precision,
            profiles=self.profiles,
            data_sheets=self.data_sheets,
            runtime=self.runtime.model(),
            where=cluster,
        )
        return Problem(
            cluster=cluster,
            costs=costs,
            global_batch_size=self.global_batch_size,
            distributed_optimizer=self.distributed_optimizer,
            hidden_dropout=self.runtime.hidden_dropout,
            attention_dropout=self.runtime.attention_dropout,
            time_limit_s=self.time_limit_s if time_limit_s is None else time_limit_s,
            splits_backward=self.splits_backward,
            offload=self.offload,
            previews=previews,
        )

    def counts_of(self, nodes: Iterable[NodeInfo]) -> dict[str, int]:
        """How many of ``nodes`` there are of each node type, in the order of the cluster file.

        Raises:
            ConfigError: a node is of a type that the file does not have, or starts another number of ranks than that
                has devices.
        """
        types = {each.name: each for each in self.cluster.node_types}
        counts = dict.fromkeys(types, 0)
        for node in nodes:
            if node.node_type not in types:
                hint = near_match(node.node_type, list(types)) or f" (known: {', '.join(types)})"
                raise ConfigError(
                    f"node {node.name}: the cluster file has no node type {node.node_type!r}{hint}; name the right one "
                    "when its agent is started, or describe it in the file"
                )
            if node.num_ranks != types[node.node_type].gpus_per_node:
                raise ConfigError(
                    f"node {node.name}: it starts {node.num_ranks} ranks, a node of type {node.node_type!r} has "
                    f"gpus_per_node {types[node.node_type].gpus_per_node} in the cluster file; make them equal"
                )
            counts[node.node_type] += 1
        return counts


def present_cluster(cluster: ClusterSpec, counts: NodeCounts) -> ClusterSpec:
    """The cluster with as many nodes as are there: ``counts`` in place of its own, and without types that have none.

    Raises:
        ConfigError: a type that is none of the cluster's.
        PlanError: there are no nodes at all.
    """
    known = [node_type.name for node_type in cluster.node_types]
    for name in counts:
        if name not in known:
            hint = near_match(name, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"cluster: it has no node type {name!r}{hint}")
    present = tuple(
        dataclasses.replace(node_type, count=counts[node_type.name], nodes=())
        for node_type in cluster.node_types
        if counts.get(node_type.name, 0) > 0
    )
    if not present:
        raise PlanError(f"no node is there; one of type {' or '.join(known)} has to come")
    names, zones = {each.name for each in present}, {each.zone for each in present}
    links = dataclasses.replace(
        cluster.links,
        node_pairs=tuple(pair for pair in cluster.links.node_pairs if names.issuperset(pair.node_types)),
        zone_pairs=tuple(pair for pair in cluster.links.zone_pairs if zones.issuperset(pair.zones)),
    )
    return ClusterSpec(devices=cluster.devices, node_types=present, links=links)
