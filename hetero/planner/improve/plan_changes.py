"""Changes of whole plans: of replicas that are alike together or of one alone, of samples, of who has which devices."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from hetero.plan.ir import Plan, Replica
from hetero.planner.improve.gradient_sync import BUCKET_NUMELS
from hetero.planner.improve.replica_changes import (
    REPLICA_FAMILIES,
    ReplicaChange,
    ReplicaFamily,
    deep_enough,
    laid_out,
)
from hetero.planner.problem import Problem

PlanChange = Callable[[], Plan]
PlanFamily = Callable[[Plan, Problem], Iterator[PlanChange]]

UNITS_MOVED = (1, 2, 4)
"""So many of the fewest samples that two replicas can exchange move at once. A heuristic."""


def families() -> tuple[PlanFamily, ...]:
    """All kinds of changes of a plan."""
    return (*(partial(of_replicas, family) for family in REPLICA_FAMILIES), samples, exchanges, idle_devices, buckets)


def of_replicas(family: ReplicaFamily, plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Changes of this kind, in all replicas that are alike and in one of them."""
    for members in plan.alike():
        for change in family(plan.replicas[members[0]], problem):
            yield partial(_with_change, plan, members, change)
            if len(members) > 1:
                yield partial(_with_change, plan, members[:1], change)


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
        for a, b in ((givers, takers), (givers[:1], takers[:1]), (givers[:1], takers), (givers, takers[:1])):
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
    """Stages of two unlike replicas change places, each with its devices and its layers."""
    firsts = [members[0] for members in plan.alike()]
    for a, b in itertools.combinations(firsts, 2):
        one, other = plan.replicas[a], plan.replicas[b]
        if one.is_interleaved or other.is_interleaved:
            continue
        for s, t in itertools.product(range(len(one.stages)), range(len(other.stages))):
            if one.stages[s].device != other.stages[t].device:
                yield partial(_exchanged, plan, a, s, b, t)


def _exchanged(plan: Plan, a: int, s: int, b: int, t: int) -> Plan:
    one, other = list(plan.replicas[a].stages), list(plan.replicas[b].stages)
    here, there = one[s], other[t]
    one[s] = there.with_layers(0, here.num_layers)
    other[t] = here.with_layers(0, there.num_layers)
    return plan.with_replicas({a: laid_out(plan.replicas[a], one), b: laid_out(plan.replicas[b], other)})


def idle_devices(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Idle devices of a node become a stage of a replica, with a layer of its longest one."""
    nodes: dict[int, list[int]] = {}
    for rank in plan.idle_ranks:
        nodes.setdefault(problem.topology.node(rank), []).append(rank)
    for ranks in nodes.values():
        for size in sorted({1, len(ranks)}):
            for r, *_ in plan.alike():
                if not plan.replicas[r].is_interleaved:
                    for place in range(len(plan.replicas[r].stages) + 1):
                        for tp in sorted({1, size}):
                            yield partial(_with_stage_of, plan, r, place, tuple(ranks[:size]), tp, problem)


def _with_stage_of(plan: Plan, r: int, place: int, ranks: tuple[int, ...], tp: int, problem: Problem) -> Plan:
    replica = plan.replicas[r]
    stages = list(replica.stages)
    seconds = [problem.costs.of(stage).microbatch_s / stage.samples_per_microbatch for stage in stages]
    longest = seconds.index(max(seconds))
    if stages[longest].num_layers <= 1:
        return plan
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
    return _with_replicas(plan, {r: laid_out(replica, stages)})


def buckets(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Another bucket size of the gradient sums."""
    for numel in (None, *BUCKET_NUMELS):
        if numel != plan.gradient_sync.bucket_numel:
            yield partial(
                dataclasses.replace, plan, gradient_sync=dataclasses.replace(plan.gradient_sync, bucket_numel=numel)
            )
