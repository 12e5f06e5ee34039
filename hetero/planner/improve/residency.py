"""Chooses for finished plans what is kept on devices: how much is computed again, and whose updates hosts make.

A stage of the search leaves all of its optimizer's state to its host or nothing, and computes all of its layers again
or none. Here CP-SAT (:mod:`hetero.planner.offload`) chooses by position instead, host by host: which first layers are
computed again, from where on the host updates, and whether it previews. Its formula is a guide; the simulator says what
a plan takes, and so the same choice is also looked at with and without previews, and for each host alone.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.cost.cost_model import StageConfig
from hetero.cost.gradient_volume import owned_parameters
from hetero.cost.host_memory import host_memory_of_ranks
from hetero.cost.layers.stage_modules import modules_of
from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.offload.blocks import (
    BlockChoice,
    ElementBytes,
    OffloadChoice,
    OffloadStage,
    offload_blocks,
    other_bytes,
)
from hetero.cost.offload.host_resources import HostResources
from hetero.cost.stage_memory import memory_of_stage
from hetero.errors import ConfigError, PlanError
from hetero.plan.communicators import gradient_communicators
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.deadline import Deadline
from hetero.planner.improve.local_search import with_alike_changed
from hetero.planner.offload.choose import choose_offload
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, is_better, memory_is_short, score_plan
from hetero.spec.parameters import HALF
from hetero.units import GIB

MOST_STARTS = 3
"""Plans for which it is chosen, the best first. A heuristic."""

MOST_ROUNDS = 3
"""What one host has changes what is best on the next one; so often all are asked at most. A heuristic."""

WITH_RUNTIME = BlockChoice(optimizer=True, recompute=True)
"""What of a choice the runtime can execute."""


def choose_residency(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what another choice of what is kept on devices makes of it or of the next ones."""
    best = shortlist.best
    if not problem.offloads:
        return best
    for start in shortlist.starts(MOST_STARTS):
        if memory_is_short(start):
            found = _chosen_anew(start, problem, deadline)
            best = found if is_better(found, best, problem) else best
    return best


def _chosen_anew(start: ScoredPlan, problem: Problem, deadline: Deadline) -> ScoredPlan:
    best = start
    for _ in range(MOST_ROUNDS):
        before = best
        for plan in _candidates(before.plan, problem, deadline):
            if deadline.is_over():
                return best
            found = _score(plan, problem, deadline)
            if found is not None and is_better(found, best, problem):
                best = found
        best = _move_layer_by_layer(best, problem, deadline)
        if best is before:
            break
    return best


def _move_layer_by_layer(best: ScoredPlan, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """Change by one layer what one stage computes again or leaves to its host, as long as it fits and helps: the
    question to CP-SAT rounds memory against the plan, and its formula is not the simulator."""
    improved = True
    while improved:
        improved = False
        for plan in with_alike_changed(best.plan, _with_a_layer_elsewhere):
            if deadline.is_over():
                return best
            found = _score(plan, problem, deadline)
            if found is not None and is_better(found, best, problem):
                best, improved = found, True
    return best


def _with_a_layer_elsewhere(replica: Replica) -> Iterator[Replica]:
    """One layer less computed again, one less updated by the host, or the memory of a few for the other."""
    for s, stage in enumerate(replica.stages):
        for again, on_host in ((-1, 0), (0, -1), (1, -1), (2, -1), (-1, 1), (-2, 1)):
            fields = {**_more_computed_again(stage, again), **_more_on_host(stage, on_host)}
            if fields:
                yield replica.with_stage(s, **fields)


def _more_computed_again(stage: Stage, layers: int) -> Mapping[str, Any]:
    """The fields of a stage that computes so many layers more again."""
    most = len(stage.layer_numbers)
    so_far = (stage.recompute_num_layers or most) if stage.recompute == "full" else 0
    again = min(most, max(0, so_far + layers))
    if again == so_far or stage.recompute == "selective" or stage.wgrad_delay is not None:
        return {}
    return {"recompute": "full" if again else "none", "recompute_num_layers": again if 0 < again < most else None}


def _more_on_host(stage: Stage, layers: int) -> Mapping[str, Any]:
    """The fields of a stage that leaves so many layers more to its host, if it leaves any."""
    first = stage.offload.optimizer_from
    if first is None or not layers:
        return {}
    if layers > 0:
        earlier = first - layers if first - layers > stage.start else (stage.start or -1.0)
        return {} if earlier >= first else {"offload": dataclasses.replace(stage.offload, optimizer_from=earlier)}
    later = 0.0 if first < 0 else first - layers
    kept = dataclasses.replace(stage.offload, optimizer_from=later) if later < stage.end else NOTHING_ON_HOST
    return {"offload": kept}


def _score(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    try:
        return score_plan(plan, problem, deadline)
    except (PlanError, ConfigError):
        return None  # A depth that is not legal with another recomputation, for instance.


def _candidates(plan: Plan, problem: Problem, deadline: Deadline) -> Iterator[Plan]:
    """``plan`` and the same with other microbatches, each with what CP-SAT chooses for all hosts, and for each alone;
    with previews as chosen, everywhere, and nowhere."""
    seen = {plan}
    for start in (plan, *_with_other_microbatches(plan)):
        for made in _chosen_for_hosts(start, problem, deadline):
            for previews in (None, False, True)[: 2 + problem.previews]:
                changed = made if previews is None else _with_previews(made, previews)
                if changed not in seen:
                    seen.add(changed)
                    yield changed


def _with_other_microbatches(plan: Plan) -> Iterator[Plan]:
    """All microbatches twice as large or half as large: what fits on devices then is chosen with them."""
    for factor in (2.0, 0.5):
        changed = {r: _with_microbatches(replica, factor) for r, replica in enumerate(plan.replicas)}
        possible = {r: replica for r, replica in changed.items() if replica is not None}
        if len(possible) == len(changed):
            yield plan.with_replicas(possible)


def _with_microbatches(replica: Replica, factor: float) -> Replica | None:
    """With microbatches so many times as large and no more of them in flight than there are; ``None`` if they do not
    divide the samples."""
    sizes = [stage.micro_batch_size * factor for stage in replica.stages]
    for stage, size in zip(replica.stages, sizes, strict=True):
        if size % 1 or replica.num_samples % int(size * stage.dp):
            return None
    depths = [
        max(1, min(stage.in_flight, int(replica.num_microbatches(s) / factor)))
        for s, stage in enumerate(replica.stages)
    ]
    return replica.with_each_stage(micro_batch_size=[int(size) for size in sizes], in_flight=depths)


def _chosen_for_hosts(plan: Plan, problem: Problem, deadline: Deadline) -> Iterator[Plan]:
    """``plan`` with what CP-SAT chooses for all hosts together, and for each alone."""
    changes = []
    for members in plan.alike():
        for stages in _stages_of_hosts(plan, members[0], problem):
            if deadline.is_over():
                return
            if (chosen := _choice(plan, members[0], stages, problem, deadline)) is not None:
                changes.append((members, dict(zip(stages, chosen, strict=True))))
    together = plan
    for members, choices in changes:
        together = _with_choices(together, members, choices)
    yield together
    if len(changes) > 1:
        for members, choices in changes:
            yield _with_choices(plan, members, choices)


def _stages_of_hosts(plan: Plan, r: int, problem: Problem) -> list[tuple[int, ...]]:
    """The stages of a replica that CP-SAT may choose for, host by host.

    Those that share their devices with others of the replica, or split their backwards, are left as they are.
    """
    replica = plan.replicas[r]
    if replica.is_interleaved:
        return []
    by_node: dict[int, list[int]] = defaultdict(list)
    for s, stage in enumerate(replica.stages):
        if problem.node_type_of(stage.ranks[0]).host_bytes and stage.wgrad_delay is None:
            by_node[problem.cluster.node_of_rank(stage.ranks[0])].append(s)
    return [tuple(stages) for stages in by_node.values()]


def _choice(
    plan: Plan, r: int, stages: Sequence[int], problem: Problem, deadline: Deadline
) -> tuple[OffloadChoice, ...] | None:
    """What CP-SAT chooses for stages of one replica on one host; ``None`` if it finds nothing, or cannot be asked."""
    try:
        question = _Pipeline(plan, r, problem).question(stages)
    except ConfigError:
        return None  # There are fewer threads than ranks, for instance.
    answer = choose_offload(question, deadline, may=WITH_RUNTIME, seed=problem.seed)
    return answer.choices or None


@dataclass(frozen=True)
class _Pipeline:
    """One replica of a plan, with what its stages take."""

    plan: Plan
    r: int
    problem: Problem

    @property
    def replica(self) -> Replica:
        return self.plan.replicas[self.r]

    def question(self, stages: Sequence[int]) -> OffloadQuestion:
        """What to choose for these stages, all else as it is in the plan.

        Raises:
            ConfigError: the host cannot be asked for so many ranks.
        """
        priced = [self.problem.costs.stage(StageConfig.of(stage)) for stage in self.replica.stages]
        fill_s, drain_s = [0.0], [0.0]
        for each in priced:
            fill_s.append(fill_s[-1] + each.forward_s)
            drain_s.append(drain_s[-1] + each.backward_s)
        others = [each for s, each in enumerate(priced) if s not in stages]
        ranks = [rank for s in stages for rank in self.replica.stages[s].ranks]
        return OffloadQuestion(
            stages=tuple(self._stage(s, fill_s[s], drain_s[s]) for s in stages),
            host=self._host(ranks),
            num_microbatches=self.replica.num_microbatches(0),
            rest_s=sum(each.microbatch_s for each in others),
            rest_period_s=max((each.microbatch_s for each in others), default=0.0),
            may_speculate=self.problem.previews,
        )

    def _stage(self, s: int, fill_s: float, drain_s: float) -> OffloadStage:
        stage, problem = self.replica.stages[s], self.problem
        kept = dataclasses.replace(stage, recompute="none", recompute_num_layers=None)
        costs = problem.costs
        owned = owned_parameters(self.plan)
        parameters = costs.parameters_per_rank(
            device=stage.device, first_layer=stage.start, end_layer=stage.end, tp=stage.tp
        )
        most = max(owned[rank][s].numel for rank in stage.ranks)
        communicators = gradient_communicators(self.plan)
        num_gradient_groups = max(sum(rank in ranks for ranks in communicators) for rank in stage.ranks)
        memory = memory_of_stage(
            kept,
            costs,
            num_neighbours=(s > 0) + (s + 1 < len(self.replica.stages)),
            shares_gradients=num_gradient_groups > 0,
            num_gradient_groups=num_gradient_groups,
        )
        node_type = problem.node_type_of(stage.ranks[0])
        return OffloadStage(
            blocks=offload_blocks(costs, StageConfig.of(kept), optimizer_ways=parameters / most if most else 1.0),
            element_bytes=ElementBytes.of(costs),
            in_flight=stage.in_flight,
            capacity_bytes=node_type.memory_bytes,
            other_bytes=other_bytes(memory),
            allocator_slack=costs.runtime.allocator_slack,
            cards=self._cards(stage),
            fill_s=fill_s,
            drain_s=drain_s,
        )

    def _cards(self, stage: Stage) -> tuple[int, ...]:
        """The ranks of a stage behind each switch of its node."""
        node_type = self.problem.node_type_of(stage.ranks[0])
        host = self.problem.cluster.node_types[node_type.index].host
        per_switch = host.gpus_per_switch if host is not None and host.to_host is not None else node_type.gpus_per_node
        behind = [0] * -(-node_type.gpus_per_node // per_switch)
        for rank in stage.ranks:
            behind[(rank - node_type.first_rank) % node_type.gpus_per_node // per_switch] += 1
        return tuple(behind)

    def _host(self, ranks: Sequence[int]) -> HostResources:
        """The part of a host that these of its ranks have while all others use theirs."""
        problem, node_type = self.problem, self.problem.node_type_of(ranks[0])
        described = problem.cluster.node_types[node_type.index]
        assert described.host is not None
        assert described.usable_host_memory_gib is not None
        node = problem.cluster.node_of_rank(ranks[0])
        taken = sum(
            memory.total
            for rank, memory in host_memory_of_ranks(self.plan, problem.costs).items()
            if rank not in ranks and problem.cluster.node_of_rank(rank) == node
        )
        whole = HostResources.of(
            described.host, memory_bytes=max(0, int(described.usable_host_memory_gib * GIB) - taken)
        )
        return whole.part(len(ranks), of=node_type.gpus_per_node)


def _with_choices(plan: Plan, members: Sequence[int], choices: Mapping[int, OffloadChoice]) -> Plan:
    replica = plan.replicas[members[0]]
    for s, choice in choices.items():
        stage = replica.stages[s]
        again = sum(block.recompute for block in choice.blocks)
        layers = len(stage.layer_numbers)
        first = _first_on_host(stage, choice)
        speculates = choice.speculate and first is not None
        replica = replica.with_stage(
            s,
            recompute="full" if again else "none",
            recompute_num_layers=again if 0 < again < layers else None,
            offload=NOTHING_ON_HOST if first is None else Offload(optimizer_from=first, speculate=speculates),
        )
    return plan.with_alike(members, replica)


def _first_on_host(stage: Stage, choice: OffloadChoice) -> float | None:
    """The position of the first block that the host updates."""
    # The blocks are an embedding if the stage has one, its layers and halves of layers, and a head if it has one.
    positions = [-1.0] if stage.start == 0 else []
    here = stage.start
    for kind in modules_of(stage.start, stage.end):
        positions.append(here)
        here += 1 if kind == "block" else HALF
    positions.append(stage.end)
    return next((position for position, block in zip(positions, choice.blocks, strict=False) if block.optimizer), None)


def _with_previews(plan: Plan, previews: bool) -> Plan:
    """``plan`` with previews on all hosts that update, or on none."""
    changed: dict[int, Replica] = {}
    for r, s, stage in plan.stages():
        if stage.offload.optimizer_from is not None and stage.offload.speculate != previews:
            offload = dataclasses.replace(stage.offload, speculate=previews)
            changed[r] = changed.get(r, plan.replicas[r]).with_stage(s, offload=offload)
    return plan.with_replicas(changed) if changed else plan
