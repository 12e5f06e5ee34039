"""Plans one combination of a sweep, and the uniform plan beside it."""

import dataclasses

from hetero.cost.model_flops import overall_mfu, utilizations
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.certainty import certainty_of
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.plan_provenance import with_provenance
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import best_uniform
from hetero.planner.replica.feasibility import check_problem
from hetero.planner.scoring import price_per_hour
from hetero.report.plan_wording import shape_of
from hetero.report.sweep_rows import SweepRow
from hetero.sweep.combinations import Combination
from hetero.version import VERSION


def evaluate(combination: Combination) -> tuple[SweepRow, Plan | None]:
    """The row of a combination, and its plan with its provenance; a row that says what was short, if nothing fits."""
    try:
        problem = combination.problem()
        check_problem(problem)
        uniform = best_uniform(problem, limit_s=combination.settings.uniform_limit_s)
        result = plan_cluster(problem, yardsticks=[uniform])
    except (PlanError, ConfigError) as error:
        return dataclasses.replace(_asked(combination), why=str(error)), None
    simulation = result.simulation
    step = certainty_of(simulation, problem.topology, problem.costs).step
    found = utilizations(simulation, problem.costs)
    row = dataclasses.replace(
        _asked(combination),
        step_s=simulation.step_s,
        step_low_s=step.low_s,
        step_high_s=step.high_s,
        samples_per_s=simulation.samples_per_s,
        bubble_share=simulation.bubble_share,
        mfu=overall_mfu(found) if found else None,
        confidence=simulation.confidence.name.lower().replace("_", " "),
        gap=result.gap,
        finished=result.finished,
        planning_s=result.planning_s,
        idle_devices=len(result.plan.idle_ranks),
        shape=shape_of(result.plan),
        uniform_name=uniform.name if uniform.best is not None else "",
        uniform_step_s=None if uniform.best is None else uniform.best.step_s,
        price_per_hour=_price(result.plan, problem),
    )
    plan = with_provenance(simulation, step, cluster=problem.cluster, command=combination.command)
    return row, plan


def _asked(combination: Combination) -> SweepRow:
    """The row without an outcome."""
    return SweepRow(
        key=combination.key,
        version=VERSION,
        num_devices=combination.cluster.num_devices,
        **combination.place._asdict(),
    )


def _price(plan: Plan, problem: Problem) -> float | None:
    """``None`` if a node type that works has no price."""
    working = set(plan.ranks()).difference(plan.idle_ranks)
    used = [each for each in problem.node_types if not working.isdisjoint(each.ranks)]
    return None if any(each.price_per_hour is None for each in used) else price_per_hour(plan, problem)
