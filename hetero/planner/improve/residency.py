"""Chooses for finished plans what is kept on devices: activations, optimizer state, gradients and weights.

A stage of the search leaves all of its optimizer's state to its host or nothing, gradients and weights likewise, and
computes all of its layers again or none. Here CP-SAT (:mod:`hetero.planner.offload`) chooses by position instead, host
by host: which first layers are computed again, which first activations go to the host, from where on the host updates,
adds up gradients and has the weights, and whether it previews. Its formula is a guide; the simulator says what a plan
takes, and so the same choice is also looked at with and without previews, for each host alone, and with blocks of one
exchanged for blocks of another.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from hetero.cost.offload.blocks import BlockChoice, OffloadChoice
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.host_of_replica import HostOfReplica
from hetero.planner.improve.residency_exchanges import changeable_stages, exchanged
from hetero.planner.improve.stage_residency import Kind, StageResidency, exchanges
from hetero.planner.offload.choose import choose_offload
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, is_better, memory_is_short, score_plan

MOST_STARTS = 3
"""Plans for which it is chosen, the best first. A heuristic."""

MOST_ROUNDS = 3
"""What one host has changes what is best on the next one; so often all are asked at most. A heuristic."""

CHOICES = (
    BlockChoice(optimizer=True, recompute=True),
    BlockChoice(optimizer=True, activations=True, recompute=True),
)
"""What of a block is chosen: at first without activations, which are slow to simulate and often late though they are in
time by the formula."""

STREAMING_CHOICES = tuple(choice._replace(gradients=True, weights=True) for choice in CHOICES)
"""What is chosen besides where that leaves something to gain: layers that are computed again, activations on the host,
or gradients, of a model that is too large otherwise."""


def choose_residency(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what another choice of what is kept on devices makes of it or of the next ones."""
    best = shortlist.best
    if not problem.offloads:
        return best
    for start in shortlist.starts(MOST_STARTS):
        if memory_is_short(start):
            found = start
            # Activations last: what streams may leave nothing to gain by them, and takes less time to look at.
            for may, streaming in zip(CHOICES, STREAMING_CHOICES, strict=True):
                found = _chosen_anew(found, may, problem, deadline)
                if _something_is_to_gain(found.plan):
                    found = _chosen_anew(found, streaming, problem, deadline)
            best = found if is_better(found, best, problem) else best
    return best


def _something_is_to_gain(plan: Plan) -> bool:
    """Whether ``plan`` does more for memory than to leave updates to hosts."""
    return any(
        stage.recompute != "none" or (stage.offload.activations_until, stage.offload.gradients_from) != (None, None)
        for _, _, stage in plan.stages()
    )


def _chosen_anew(start: ScoredPlan, may: BlockChoice, problem: Problem, deadline: Deadline) -> ScoredPlan:
    best = start
    for _ in range(MOST_ROUNDS):
        before = best = _exchange_blocks(best, may, problem, deadline)
        for plan in _candidates(before.plan, may, problem, deadline):
            if deadline.is_over():
                return best
            found = _score(plan, problem, deadline)
            if found is not None and is_better(found, best, problem):
                best = found
        if best is before:
            break
    return best


def _exchange_blocks(best: ScoredPlan, may: BlockChoice, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """Preview all updates or none, and exchange blocks of one stage after the other, in the same way again as long as
    that fits and helps: the question to CP-SAT rounds memory against the plan, and its formula is not the simulator."""
    kinds: list[Kind] = ["again", "optimizer"]
    kinds += ["gradients", "weights"] if may.weights else []
    kinds += ["activations"] if may.activations else []
    improved = True
    while improved:
        improved = False
        for previews in (False, True)[: 1 + problem.previews]:
            plan = _with_previews(best.plan, previews)
            found = _score(plan, problem, deadline) if plan != best.plan and not deadline.is_over() else None
            if found is not None and is_better(found, best, problem):
                best, improved = found, True
        for members, s in changeable_stages(best.plan):
            for exchange in exchanges(kinds):
                while not deadline.is_over():
                    changed = exchanged(best.plan, members, s, exchange, problem)
                    found = _score(changed, problem, deadline) if changed is not None else None
                    if found is None or not is_better(found, best, problem):
                        break
                    best, improved = found, True
    return best


def _score(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    try:
        return score_plan(plan, problem, deadline)
    except (PlanError, ConfigError):
        return None  # A depth that is not legal with another recomputation, for instance.


def _candidates(plan: Plan, may: BlockChoice, problem: Problem, deadline: Deadline) -> Iterator[Plan]:
    """``plan`` and the same with other microbatches, each with what CP-SAT chooses for all hosts, and for each alone;
    with previews as chosen, everywhere, and nowhere."""
    seen = {plan}
    for start in (plan, *_with_other_microbatches(plan)):
        for made in _chosen_for_hosts(start, may, problem, deadline):
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


def _chosen_for_hosts(plan: Plan, may: BlockChoice, problem: Problem, deadline: Deadline) -> Iterator[Plan]:
    """``plan`` with what CP-SAT chooses for all hosts together, and for each alone."""
    changes = []
    for members in plan.alike():
        for stages in _stages_of_hosts(plan, members[0], problem):
            if deadline.is_over():
                return
            if (chosen := _choice(HostOfReplica(plan, members[0], problem), stages, may, deadline)) is not None:
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
    asked: HostOfReplica, stages: Sequence[int], may: BlockChoice, deadline: Deadline
) -> tuple[OffloadChoice, ...] | None:
    """What CP-SAT chooses for stages of one replica on one host; ``None`` if it finds nothing, or cannot be asked."""
    try:
        question = asked.question(stages)
    except ConfigError:
        return None  # There are fewer threads than ranks, for instance.
    return choose_offload(question, deadline, may=may, seed=asked.problem.seed).choices or None


def _with_choices(plan: Plan, members: Sequence[int], choices: Mapping[int, OffloadChoice]) -> Plan:
    replica = plan.replicas[members[0]]
    for s, choice in choices.items():
        stage = replica.stages[s]
        replica = replica.with_stage(
            s, **StageResidency.chosen(choice, stage, num_layers=plan.model.num_layers).fields()
        )
    return plan.with_alike(members, replica)


def _with_previews(plan: Plan, previews: bool) -> Plan:
    """``plan`` with previews on all hosts that update, or on none."""
    changed: dict[int, Replica] = {}
    for r, s, stage in plan.stages():
        if stage.offload.updates and stage.offload.speculate != previews:
            offload = dataclasses.replace(stage.offload, speculate=previews)
            changed[r] = changed.get(r, plan.replicas[r]).with_stage(s, offload=offload)
    return plan.with_replicas(changed) if changed else plan
