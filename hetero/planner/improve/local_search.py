"""Searches locally from a finished plan, judged by the simulator.

The search for covers prices steps by a formula. What the simulator sees beside it, transfers that meet on a link or
sums of gradients that hide behind a drain, can make a neighbour of its answer better: one layer further on, other
microbatches, another depth, a few samples elsewhere. Replicas that are alike change together. The first change that
helps is taken, as long as one does and there is time: a first-improvement local search, which is a heuristic. Half
layers (:mod:`hetero.planner.improve.half_layer_moves`) are tried where none of these helps.
"""

import itertools
from collections.abc import Callable, Iterator

from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.half_layer_moves import with_half_layers_moved
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, is_better, score_if_legal

Neighbours = Callable[[Plan], Iterator[Plan]]


def change_locally(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan, or what small changes make of it."""
    return search_locally(shortlist.best, problem, deadline)


def neighbours(plan: Plan) -> Iterator[Plan]:
    """All plans that one small change makes of ``plan``."""
    yield from with_alike_changed(plan, _changes)
    for givers, takers in itertools.permutations(plan.alike(), 2):
        if (moved := plan.with_samples_moved(givers, takers)) is not None:
            yield moved


def search_locally(
    best: ScoredPlan,
    problem: Problem,
    deadline: Deadline,
    *,
    neighbours: Neighbours = neighbours,
    most: int | None = None,
) -> ScoredPlan:
    """Take small changes of ``best`` that help, until none does, ``deadline`` is over, or ``most`` plans have been
    looked at."""
    seen = {best.plan}
    improved = True
    while improved:
        improved = False
        for plan in itertools.chain(neighbours(best.plan), with_half_layers_moved(best.plan, problem)):
            if deadline.is_over() or len(seen) == most:
                return best
            if plan in seen:
                continue
            seen.add(plan)
            found = score_if_legal(plan, problem, deadline)
            if found is not None and is_better(found, best, problem):
                best, improved = found, True
                break
    return best


def with_alike_changed(plan: Plan, changes: Callable[[Replica], Iterator[Replica]]) -> Iterator[Plan]:
    """``plan`` with each of the ``changes`` of a replica, made in all that are alike."""
    for members in plan.alike():
        for changed in changes(plan.replicas[members[0]]):
            yield plan.with_alike(members, changed)


def _changes(replica: Replica) -> Iterator[Replica]:
    """``replica`` with a layer moved, other microbatches on one stage or all, or another depth up to some stage."""
    stages = replica.stages
    for a, b in itertools.permutations(range(len(stages)), 2):
        if stages[a].num_layers > 1:
            yield replica.with_layers_moved(a, b, 1)
    for factor in (2.0, 0.5):
        for chosen in [range(len(stages)), *([s] for s in range(len(stages)))]:
            sizes = [stage.micro_batch_size * (factor if s in chosen else 1) for s, stage in enumerate(stages)]
            if all(size == int(size) >= 1 for size in sizes):
                yield replica.with_each_stage(micro_batch_size=[int(size) for size in sizes])
    for more in (1, -1):
        for last in range(len(stages) - 1):
            if stages[last].in_flight + more >= 1:
                depths = [stage.in_flight + more * (s <= last) for s, stage in enumerate(stages)]
                yield replica.with_each_stage(in_flight=depths)
