"""Computes a few layers more again where a changed plan lacks a little memory."""

from hetero.cost.memory import plan_memory
from hetero.plan.ir import Plan, Replica
from hetero.plan.validate import validate
from hetero.planner.deadline import Deadline
from hetero.planner.improve.replica_changes import one_layer_more_recomputed
from hetero.planner.problem import Problem
from hetero.planner.scoring import bytes_over_capacity

MOST_RECOMPUTED_MORE = 4
"""Layers at most of a stage. A heuristic."""


def recomputing_more(plan: Plan, problem: Problem, deadline: Deadline) -> Plan | None:
    """``plan`` with as many layers more computed again as memory asks for; ``None`` where a few are not enough, or the
    time is over.

    Raises:
        PlanError: the plan is not legal; there may have been no time to see that before.
    """
    validate(plan)
    for _ in range(MOST_RECOMPUTED_MORE):
        over = bytes_over_capacity(plan, problem, plan_memory(plan, problem.costs))
        if not over or deadline.is_over():
            return None if over else plan
        changed: dict[int, Replica] = {}
        for r, s in over:
            more = one_layer_more_recomputed(changed.get(r, plan.replicas[r]), s)
            if more is None or more.is_interleaved:
                return None
            changed[r] = more
        plan = plan.with_replicas(changed)
    return None
