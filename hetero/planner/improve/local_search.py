"""Small changes to a finished plan, judged by the simulator.

The search prices steps by a formula. What the simulator sees beside it, transfers that meet on a link or sums of
gradients that hide behind a drain, can make a neighbour of its answer better: one layer further on, other microbatches,
another depth, a few samples elsewhere. Replicas of one shape change together. The first change that helps is taken, as
long as one does and there is time. Half layers (:mod:`hetero.planner.improve.half_layers`) are tried where none of
these helps.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.half_layers import Stages, layers_moved, like, with_halves_moved
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, goal_value, score_fitted

ENOUGH = 0.9998
"""A change has to better the goal by this factor."""


def neighbours(plan: Plan) -> Iterator[Plan]:
    """All plans that one small change makes of ``plan``."""
    yield from changed(plan, _changes)
    for giving, taking in itertools.permutations(plan.alike(), 2):
        if (moved := _samples_moved(plan, giving, taking)) is not None:
            yield moved


def search_locally(
    best: ScoredPlan,
    problem: Problem,
    deadline: Deadline,
    *,
    neighbours: Callable[[Plan], Iterator[Plan]] = neighbours,
    most: int | None = None,
) -> ScoredPlan:
    """``best``, or what small changes make of it before ``deadline`` is over, or ``most`` plans have been looked at."""
    seen = {best.plan}
    improved = True
    while improved:
        improved = False
        for plan in itertools.chain(neighbours(best.plan), with_halves_moved(best.plan, problem)):
            if deadline.is_over() or len(seen) == most:
                return best
            if plan in seen:
                continue
            seen.add(plan)
            found = _scored(plan, problem, deadline)
            if found is not None and goal_value(found, problem) < ENOUGH * goal_value(best, problem):
                best, improved = found, True
                break
    return best


def _scored(plan: Plan, problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    try:
        return score_fitted(plan, problem, deadline)
    except (PlanError, ConfigError):
        return None  # A microbatch that does not divide, for instance, or a size that nobody measured.


def changed(plan: Plan, changes: Callable[[Replica], Iterator[Stages]]) -> Iterator[Plan]:
    """``plan`` with other stages in all replicas of one shape."""
    for members in plan.alike():
        for stages in changes(plan.replicas[members[0]]):
            yield _with(plan, {r: like(plan.replicas[r], stages) for r in members})


def _changes(replica: Replica) -> Iterator[Stages]:
    """The stages of ``replica`` with a layer moved, another depth, or other microbatches, on one stage or all."""
    stages = replica.stages
    for a, b in itertools.permutations(range(len(stages)), 2):
        if stages[a].num_layers > 1:
            yield layers_moved(stages, a, b, 1)
    for factor in (2.0, 0.5):
        for chosen in [range(len(stages)), *([s] for s in range(len(stages)))]:
            sizes = [s.micro_batch_size * (factor if i in chosen else 1) for i, s in enumerate(stages)]
            if all(size == int(size) >= 1 for size in sizes):
                yield tuple(
                    dataclasses.replace(s, micro_batch_size=int(size)) for s, size in zip(stages, sizes, strict=True)
                )
    for more in (1, -1):
        for last in range(len(stages) - 1):
            if stages[last].in_flight + more >= 1:
                yield tuple(
                    dataclasses.replace(s, in_flight=s.in_flight + more) if i <= last else s
                    for i, s in enumerate(stages)
                )


def _samples_moved(plan: Plan, giving: list[int], taking: list[int]) -> Plan | None:
    """The fewest whole microbatches that all replicas of one class can hand to all of another."""

    def unit(members: list[int]) -> int:
        return math.lcm(*(stage.samples_per_microbatch for stage in plan.replicas[members[0]].stages))

    total = math.lcm(unit(giving) * len(giving), unit(taking) * len(taking))
    if plan.replicas[giving[0]].num_samples <= total // len(giving):
        return None
    changes = {r: -total // len(giving) for r in giving} | {r: total // len(taking) for r in taking}
    return _with(
        plan,
        {
            r: dataclasses.replace(plan.replicas[r], num_samples=plan.replicas[r].num_samples + more)
            for r, more in changes.items()
        },
    )


def _with(plan: Plan, replicas: dict[int, Replica]) -> Plan:
    return dataclasses.replace(plan, replicas=tuple(replicas.get(r, old) for r, old in enumerate(plan.replicas)))
