"""Plans a cluster: stage options, replica templates, a cover of the cluster by them, and passes over the best plans."""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.cost.simulation.simulator import Simulation
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.plan.ir import Plan
from hetero.planner.certainty import RunnerUp
from hetero.planner.construction import EARLY_RUNGS, Construction, Found, ProgressReport
from hetero.planner.cover.cover import CoverScore
from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.cover.search import TOLERANCE
from hetero.planner.deadline import Deadline
from hetero.planner.garbage_collection import rare_garbage_collection
from hetero.planner.improve.passes import Improvement
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick
from hetero.planner.replica.feasibility import check_links, nothing_found
from hetero.planner.ring_interfaces import RingsWithOneInterface, good_with_either
from hetero.planner.rungs import rungs
from hetero.planner.scoring import ScoredPlan, goal_value, is_within_budget
from hetero.planner.siblings import siblings
from hetero.planner.time_shares import TimeShare


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A plan and what is known about it.

    simulation: its predicted step.
    memory: peak parts of one device of every stage, by replica and stage.
    score: the shortest step that the search found, by its own formula; the bound is on this one. The plan may be
        another of its best covers, since the simulator chooses among them. ``None`` if time ran out before there was a
        cover: the plan is then one of those that are made first.
    bound_s: no cover of the cluster by templates of the space has a shorter step by that formula.
    lower_bound_s: no plan whatever has a shorter step by the simulator.
    finished: the space was enumerated and the search ended by itself, and neither by the time limit.
    processes: that searched, each with a seed of its own.
    failed_processes: exit codes of those among them that ended without an answer.
    runners_up: the best of the other plans that were looked at, by what they are.
    rings: what the step is if a ring has one interface of each node; ``None`` where that is no question, or was not
        looked at.
    """

    plan: Plan
    simulation: Simulation
    memory: Mapping[tuple[int, int], MemoryBreakdown]
    score: CoverScore | None
    bound_s: float
    lower_bound_s: float = 0.0
    num_templates: int
    planning_s: float
    processes: int = 1
    failed_processes: tuple[int, ...] = ()
    finished: bool
    runners_up: tuple[RunnerUp, ...] = ()
    rings: RingsWithOneInterface | None = None

    @property
    def scored(self) -> ScoredPlan:
        """The plan as yardsticks are shown beside it."""
        return ScoredPlan(plan=self.plan, simulation=self.simulation, memory=self.memory)

    @property
    def gap(self) -> float:
        """By how much at most the best cover's step is above the shortest one, relative to it and by the formula;
        without a cover the plan's own step."""
        return max(0.0, 1 - self.bound_s / (self.simulation if self.score is None else self.score).step_s)

    @property
    def gap_to_any(self) -> float:
        """The part of the plan's step by which another plan could be shorter at most, by the simulator."""
        return max(0.0, 1 - self.lower_bound_s / self.simulation.step_s)


def plan_cluster(
    problem: Problem,
    *,
    yardsticks: Sequence[Yardstick] = (),
    report: ProgressReport | None = None,
    tolerance: float = TOLERANCE,
    deadline: Deadline | None = None,
    processes: int = 1,
) -> PlanResult:
    """Find the best plan for ``problem`` within its time limit.

    yardsticks: what others would plan, found before: the search may begin with their plans, and its result is no worse
        than any of them that keeps the budget.
    tolerance: relative; covers that are better by less are not looked for.
    deadline: in place of the problem's time limit, such as one that counts work instead of seconds.
    processes: that search at once, each with a seed of its own; what else is known of the plan is by the first one.

    Raises:
        PlanError: no plan fits, and the message says what is short by how much and what would help; or time ran out
            before there was any plan, of which nobody knows then whether it exists.
        ConfigError: a device has no profile, a link is missing, or ``processes`` are none or too many.
    """
    deadline = deadline or TimeShare.PLANNING.of_seconds(problem.time_limit_s)
    check_links(problem)
    planning = deadline.part(1 - TimeShare.RINGS.share) if problem.cluster.leaves_rings_open else deadline

    known = [each.best for each in yardsticks if each.best is not None and is_within_budget(each.best.plan, problem)]

    def search(problem: Problem) -> Sequence[ScoredPlan]:
        return _search(problem, planning, tolerance, known)[1].plans

    with siblings(problem, search, number=processes - 1) as others:
        progress = _with_all_seconds(report, deadline)
        construction, improvement = _search(problem, planning, tolerance, known, progress)
        improved = sorted([*improvement.plans, *others.plans(), *known], key=lambda each: goal_value(each, problem))
    if not improved:
        raise nothing_found(problem, construction.found.templates, complete=False)
    uniform = (construction.first.uniform, *(each.best for each in yardsticks if each.is_uniform))
    shown = [*known, *(each for each in uniform if each is not None)]
    most = min((goal_value(each, problem) for each in shown), default=math.inf)
    best, rings = good_with_either(improved[0], (*improved, *construction.found.plans), problem, deadline, most=most)
    listed = {
        "the next best plan of other stages": (*construction.plans, construction.published),
        "a uniform plan": uniform,
    }
    runners_up = _runners_up(best, listed, problem)
    result = _result(best, construction.found, runners_up, lower_bound_s(problem), deadline)
    return dataclasses.replace(result, rings=rings, processes=processes, failed_processes=tuple(others.failed))


@rare_garbage_collection()
def _search(
    problem: Problem,
    planning: Deadline,
    tolerance: float,
    known: Sequence[ScoredPlan],
    report: ProgressReport | None = None,
) -> tuple[Construction, Improvement]:
    """Rung after rung until the time is over, or nothing is left to look at.

    Raises:
        PlanError: as :func:`plan_cluster`.
    """
    construction = Construction(problem, tolerance=tolerance, known=known, report=report)
    improvement = Improvement(problem)
    for number, rung in enumerate(rungs(planning)):
        going_on = TimeShare.GOING_ON if number < EARLY_RUNGS else TimeShare.LATER_GOING_ON
        improvement.go_on(going_on.of(rung))
        shortlist = construction.go_on(rung)
        if shortlist is not None:
            improvement.improve(shortlist, rung)
        if construction.is_through and improvement.is_through:
            break
    return construction, improvement


def _with_all_seconds(report: ProgressReport | None, deadline: Deadline) -> ProgressReport | None:
    """Report the seconds since planning began, and not since this search did."""
    if report is None:
        return None
    return lambda progress: report(dataclasses.replace(progress, elapsed_s=deadline.elapsed_s))


def _runners_up(
    best: ScoredPlan, others: Mapping[str, Sequence[ScoredPlan | None]], problem: Problem
) -> tuple[RunnerUp, ...]:
    """Of each list the best plan that is another one than ``best``: by its devices and degrees, and not by a layer."""
    found = []
    for name, plans in others.items():
        unlike = [each for each in plans if each is not None and _stages_of(each.plan) != _stages_of(best.plan)]
        if unlike:
            other = min(unlike, key=lambda each: goal_value(each, problem))
            found.append(RunnerUp(name, other.simulation, goal_value(other, problem) / goal_value(best, problem)))
    return tuple(found)


def _stages_of(plan: Plan) -> Counter[tuple[tuple[str, int, int], ...]]:
    """The replicas by what their stages are made of: device, tp and dp."""
    return Counter(tuple((stage.device, stage.tp, stage.dp) for stage in replica.stages) for replica in plan.replicas)


def _result(
    best: ScoredPlan, found: Found, runners_up: tuple[RunnerUp, ...], lower_bound_s: float, deadline: Deadline
) -> PlanResult:
    shortest = min((each for _, each in found.covers), key=lambda each: each.step_s, default=None)
    return PlanResult(
        plan=best.plan,
        simulation=best.simulation,
        memory=best.memory,
        score=shortest,
        bound_s=lower_bound_s if shortest is None else min(found.bound_s, shortest.step_s),
        lower_bound_s=lower_bound_s,
        num_templates=len(found.templates),
        planning_s=deadline.elapsed_s,
        finished=found.complete,
        runners_up=runners_up,
    )
