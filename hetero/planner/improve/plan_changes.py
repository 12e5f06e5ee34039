"""Changes of whole plans: of replicas that are alike together or of one alone, of samples, of who has which devices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from hetero.plan.ir import GradientSyncPlan, Plan, Replica
from hetero.planner.improve.gradient_sync import BUCKET_NUMELS, domains_of
from hetero.planner.improve.replica_changes import (
    REPLICA_FAMILIES,
    ReplicaChange,
    ReplicaFamily,
    Slack,
    barely_deep,
    deep_enough,
    delays,
    depths,
    evenly_deep,
    laid_out,
    layers,
)
from hetero.planner.improve.split_backward import DELAY_RULES, Delay, with_delays
from hetero.planner.problem import Problem

PlanChange = Callable[[], Plan]
PlanFamily = Callable[[Plan, Problem], Iterator[PlanChange]]

UNITS_MOVED = (1, 2, 4)
"""So many of the fewest samples that two replicas can exchange move at once. A heuristic."""

DepthRule = Callable[[Replica], Replica]
"""Says how much each stage has in flight."""

DEPTH_RULES: tuple[DepthRule, ...] = (
    partial(evenly_deep, per_stage=2),
    partial(evenly_deep, per_stage=3),
    partial(barely_deep, slack=Slack(equal=1.5, larger=0.75, smaller=0.5)),
    partial(barely_deep, slack=Slack(equal=1.5, larger=1.5, smaller=2.0)),
)
"""Heuristics: with two per stage a transfer is hidden. Of ninety slacks on seventy plans that deal nodes anew, of
eight clusters, these are good where the other rules are not."""


def families() -> tuple[PlanFamily, ...]:
    """All kinds of changes of a plan."""
    of_plans = samples, exchanges, idle_devices, buckets, domains, rules, aligned, interleaved_layers_by_rules
    return (*(partial(of_replicas, family) for family in REPLICA_FAMILIES), *of_plans)


def timings() -> tuple[PlanFamily, ...]:
    """The kinds that change only when a stage computes what: depths, and delays of the weights' gradients."""
    return partial(of_replicas, depths), partial(of_replicas, delays)


def of_replicas(family: ReplicaFamily, plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Changes of this kind, in all replicas that are alike and in one of them."""
    for members in plan.alike():
        for change in family(plan.replicas[members[0]], problem):
            for some in one_or_all(members):
                yield partial(_with_change, plan, some, change)


def one_or_all(members: list[int]) -> list[list[int]]:
    """Of replicas that are alike all, and where they are several the first one alone."""
    return [members] if len(members) == 1 else [members, members[:1]]


def _with_change(plan: Plan, members: list[int], change: ReplicaChange) -> Plan:
    changed, before = change(), plan.replicas[members[0]]
    found = {r: _on_ranks_of(plan.replicas[r], before, changed) for r in members}
    return _with_replicas(plan, found)


def _on_ranks_of(replica: Replica, model: Replica, changed: Replica) -> Replica:
    """``changed``, which was made of ``model``, on the ranks that ``replica`` has in the places of those."""
    if replica is model:
        return changed
    rank_of = {
        theirs: own
        for here, there in zip(replica.stages, model.stages, strict=True)
        for own, theirs in zip(here.ranks, there.ranks, strict=True)
    }
    mapped = []
    for stage in changed.stages:
        ranks = tuple(rank_of[rank] for rank in stage.ranks)
        mapped.append(tuple(sorted(ranks)) if list(stage.ranks) == sorted(stage.ranks) else ranks)
    return changed.with_each_stage(ranks=mapped)


def _with_replicas(plan: Plan, replicas: Mapping[int, Replica]) -> Plan:
    """``plan`` with other replicas in the places of some; ranks that no stage has any more, or still, idle."""
    changed = plan.with_replicas(replicas)
    working = {rank for _, _, stage in changed.stages() for rank in stage.ranks}
    return dataclasses.replace(changed, idle_ranks=tuple(sorted(set(plan.ranks()) - working)))


def samples(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Samples move between replicas that are alike and others, and between single ones of both kinds."""
    kinds = plan.alike()
    for givers, takers in itertools.permutations(kinds, 2):
        for a, b in itertools.product(one_or_all(givers), one_or_all(takers)):
            for units in UNITS_MOVED:
                yield partial(_moved, plan, a, b, units)
    for members in kinds:
        if len(members) > 1:
            yield partial(_moved, plan, members[:1], members[1:2], 1)


def _moved(plan: Plan, givers: list[int], takers: list[int], units: int) -> Plan:
    found = plan
    for _ in range(units):
        found = found.with_samples_moved(givers, takers) or found
    return found.with_replicas({r: deep_enough(found.replicas[r]) for r in (*givers, *takers)})


def exchanges(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Stages of two unlike replicas change places, each with its devices and its layers, or those of as many pairs."""
    for here, there in itertools.combinations(plan.alike(), 2):
        one, other = plan.replicas[here[0]], plan.replicas[there[0]]
        if one.is_interleaved or other.is_interleaved:
            continue
        for s, t in itertools.product(range(len(one.stages)), range(len(other.stages))):
            if one.stages[s].device != other.stages[t].device:
                yield partial(_exchanged, plan, [(here[0], there[0])], s, t)
                if len(here) == len(there) > 1:
                    yield partial(_exchanged, plan, list(zip(here, there, strict=True)), s, t)


def _exchanged(plan: Plan, pairs: Sequence[tuple[int, int]], s: int, t: int) -> Plan:
    changed: dict[int, Replica] = {}
    for a, b in pairs:
        one, other = list(plan.replicas[a].stages), list(plan.replicas[b].stages)
        here, there = one[s], other[t]
        one[s] = there.with_layers(0, here.num_layers)
        other[t] = here.with_layers(0, there.num_layers)
        changed |= {a: laid_out(plan.replicas[a], one), b: laid_out(plan.replicas[b], other)}
    return plan.with_replicas(changed)


def idle_devices(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Idle devices of a node become a stage of a replica, with a layer of its longest one; or those of as many nodes in
    all replicas that are alike."""
    nodes: dict[int, list[int]] = {}
    for rank in plan.idle_ranks:
        if problem.node_type_of(rank) in problem.usable_node_types:
            nodes.setdefault(problem.topology.node(rank), []).append(rank)
    alike: dict[tuple[str, int], list[list[int]]] = {}
    for ranks in nodes.values():
        alike.setdefault((problem.node_type_of(ranks[0]).device, len(ranks)), []).append(ranks)
    for members in plan.alike():
        if plan.replicas[members[0]].is_interleaved:
            continue
        for (_, size), of_nodes in alike.items():
            dealt = [(members[:1], [of_nodes[0][:count]]) for count in sorted({1, size})]
            if 1 < len(members) <= len(of_nodes):
                dealt.append((members, of_nodes[: len(members)]))
            for replicas, new in dealt:
                for place in range(len(plan.replicas[members[0]].stages) + 1):
                    for tp in sorted({1, len(new[0])}):
                        yield partial(_with_stage_of_each, plan, replicas, place, new, tp, problem)


def _with_stage_of_each(
    plan: Plan, replicas: Sequence[int], place: int, ranks: Sequence[Sequence[int]], tp: int, problem: Problem
) -> Plan:
    changed = {}
    for r, new in zip(replicas, ranks, strict=True):
        replica = _with_stage_of(plan.replicas[r], place, tuple(new), tp, problem)
        if replica is not None:
            changed[r] = replica
    return _with_replicas(plan, changed)


def _with_stage_of(replica: Replica, place: int, ranks: tuple[int, ...], tp: int, problem: Problem) -> Replica | None:
    stages = list(replica.stages)
    seconds = [problem.costs.of(stage).microbatch_s / stage.samples_per_microbatch for stage in stages]
    longest = seconds.index(max(seconds))
    if stages[longest].num_layers <= 1:
        return None
    device = problem.node_type_of(ranks[0]).device
    size = max(1, stages[longest].samples_per_microbatch // (len(ranks) // tp))
    new = dataclasses.replace(
        stages[longest].with_layers(0, 1),
        ranks=ranks,
        device=device,
        tp=tp,
        dp=len(ranks) // tp,
        micro_batch_size=size,
        sequence_parallel=problem.splits_sequence(tp),
        fp8=problem.computes_in_fp8(device, tp=tp, micro_batch_size=size),
        recompute="none",
        recompute_num_layers=None,
    )
    stages[longest] = stages[longest].with_layers(0, stages[longest].num_layers - 1)
    stages.insert(place, new)
    return laid_out(replica, stages)


def buckets(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Another bucket size of the gradient sums."""
    for numel in (None, *BUCKET_NUMELS):
        if numel != plan.gradient_sync.bucket_numel:
            yield partial(_with_sync, plan, dataclasses.replace(plan.gradient_sync, bucket_numel=numel))


def rules(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Depths and delays of the weights' gradients by a rule each in all replicas, or one of the two as it is."""
    for depth, delay in _pairs_of_rules(plan, problem):
        yield partial(_by_rules, plan, depth, delay)


def _pairs_of_rules(plan: Plan, problem: Problem) -> Iterator[tuple[DepthRule | None, Delay | None]]:
    """Of depths and of delays. The depths of interleaved stages have no rule."""
    of_depths = (None,) if _is_interleaved(plan) else (None, *DEPTH_RULES)
    of_delays = (None, *DELAY_RULES) if problem.delays_weight_gradients else (None,)
    for depth, delay in itertools.product(of_depths, of_delays):
        if depth is not None or delay is not None:
            yield depth, delay


def layers_by_rules(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Layers move from one stage to another, and then depths and delays go by rules. Where a stage waits for weights'
    gradients of another one, neither alone gains anything."""
    for change in of_replicas(layers, plan, problem):
        for depth, delay in _pairs_of_rules(plan, problem):
            yield partial(_changed_by_rules, change, depth, delay)


def interleaved_layers_by_rules(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """The same where all pipelines are interleaved: there they are few, as depths have no rule."""
    return layers_by_rules(plan, problem) if _is_interleaved(plan) else iter(())


def plain_layers_by_rules(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """The same elsewhere: many, of which few help."""
    return iter(()) if _is_interleaved(plan) else layers_by_rules(plan, problem)


def _is_interleaved(plan: Plan) -> bool:
    return all(replica.is_interleaved for replica in plan.replicas)


def _changed_by_rules(change: PlanChange, depth: DepthRule | None, delay: Delay | None) -> Plan:
    return _by_rules(change(), depth, delay)


def _by_rules(plan: Plan, depth: DepthRule | None, delay: Delay | None) -> Plan:
    if depth is not None:
        plan = plan.with_replicas({r: depth(replica) for r, replica in enumerate(plan.replicas)})
    return plan if delay is None else with_delays(plan, delay)


def aligned(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Replicas on equal devices become alike: those of one kind get what those of another say of their stages. A change
    of one of them alone gains nothing where both end at the same time."""
    kinds = plan.alike()
    for models, others in itertools.permutations(kinds, 2):
        model = plan.replicas[models[0]]
        if _devices_of(model) == _devices_of(plan.replicas[others[0]]):
            yield partial(_aligned, plan, model, others)


def _devices_of(replica: Replica) -> list[tuple[str, int]]:
    return [(stage.device, len(stage.ranks)) for stage in replica.stages]


def _aligned(plan: Plan, model: Replica, others: Sequence[int]) -> Plan:
    changed = {}
    for r in others:
        replica = plan.replicas[r]
        alike = model.with_each_stage(ranks=[stage.ranks for stage in replica.stages])
        changed[r] = deep_enough(dataclasses.replace(alike, num_samples=replica.num_samples))
    return plan.with_replicas(changed)


def domains(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Gradient sums over all holders at once, by node or by zone."""
    for found in dict.fromkeys([(), *domains_of(plan, problem)]):
        if found != plan.gradient_sync.domains:
            yield partial(_with_sync, plan, dataclasses.replace(plan.gradient_sync, domains=found))


def _with_sync(plan: Plan, sync: GradientSyncPlan) -> Plan:
    return dataclasses.replace(plan, gradient_sync=sync)
