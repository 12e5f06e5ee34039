"""Asks CP-SAT the master problem: whether a cover of the cluster keeps a time for compute and one for gradient sums.

CP-SAT over whole replicas and microbatches. Deterministic: one worker, a fixed seed, limits in deterministic time as
well as in seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from hetero.planner.cover.constraints import CONSTRAINTS, Limits, layer_range_variables
from hetero.planner.cover.cover import Copies, Cover
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.cover.variables import Column, ColumnVars, MasterVars
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.replica.templates import Template, milli_price

EFFORT = 1.0
"""Deterministic time of one question, about a second: the same on a fast and on a busy machine."""

UNIT_S = 2.0
"""Seconds that a unit of deterministic time takes, about, with what making the model takes. An estimate."""

LEAST_S = 0.05
"""Seconds that a question gets however little time is left."""

Verdict = Literal["found", "none", "unknown"]


@dataclass(frozen=True, slots=True)
class Answer:
    """``cover`` if one was found; ``none`` is a proof that there is none, ``unknown`` a limit that was reached."""

    verdict: Verdict
    cover: Cover = ()


def columns_within(templates: Sequence[Template], problem: Problem, *, compute_s: float) -> list[Column]:
    """The templates that finish at least one microbatch within ``compute_s``, with how many copies and microbatches."""
    columns = []
    for template in templates:
        most = problem.global_batch_size // template.samples
        if microbatches := min(most, template.most_microbatches(compute_s)):
            replicas = min(most, template.most_copies(problem.node_types))
            columns.append(Column(template, replicas, microbatches))
    return columns


def find_cover(
    columns: Sequence[Column],
    problem: Problem,
    sync_tiers: SyncTiers,
    *,
    sync_s: float | None,
    deadline: Deadline,
    cheapest: bool = False,
) -> Answer:
    """Ask for a cover by ``columns`` whose gradient sums take at most ``sync_s``; with ``cheapest`` for the one of
    least price.

    deadline: after which the answer is ``unknown``, as it is after ``EFFORT``.
    """
    if not columns:
        return Answer("none")
    model = cp_model.CpModel()
    master = MasterVars(
        columns=tuple(ColumnVars(model, i, column) for i, column in enumerate(columns)),
        layer_ranges=()
        if sync_s is None
        else layer_range_variables(model, [column.template for column in columns], problem, sync_tiers),
    )
    limits = Limits(problem=problem, sync_tiers=sync_tiers, sync_s=sync_s)
    for constraint in CONSTRAINTS:
        constraint(model, master, limits)
    if cheapest:
        model.minimize(sum(milli_price(c.template, problem) * c.replicas for c in master.columns))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = problem.seed
    solver.parameters.max_deterministic_time = EFFORT
    if deadline.timer.is_deterministic:
        # A limit of the whole would change the answer, and is looked at next.
        solver.parameters.max_deterministic_time = min(EFFORT, max(LEAST_S, deadline.left_s) / UNIT_S)
    else:
        solver.parameters.max_time_in_seconds = max(LEAST_S, deadline.left_of_all_s)
    status = solver.solve(model)
    deadline.timer.spend(UNIT_S * solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:
        return Answer("none")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer("unknown")
    return Answer(
        "found",
        tuple(
            Copies(c.template, solver.value(c.replicas), solver.value(c.microbatches))
            for c in master.columns
            if solver.value(c.replicas)
        ),
    )
