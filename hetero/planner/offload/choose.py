"""Asks CP-SAT for the choice of the shortest step, for one stage or for stages that share a host.

Deterministic: one worker, a fixed seed, limits in deterministic time as well as in seconds. Of choices with equal steps
it takes one that leaves least to the host, and computes least again.
"""

from dataclasses import dataclass
from typing import Literal

from ortools.sat.python import cp_model

from hetero.cost.offload.block_prices import OffloadQuestion
from hetero.cost.offload.blocks import BlockChoice, OffloadChoice
from hetero.cost.offload.offloaded_step import OffloadedStep, offloaded_step
from hetero.planner.deadline import Deadline
from hetero.planner.offload.constraints import CONSTRAINTS, choices_are_positions
from hetero.planner.offload.variables import HostVars, StageVars
from hetero.units import US_PER_S

EFFORT = 60.0
"""Deterministic time of one question, about seconds: the same on a fast and on a busy machine."""

ANYTHING = BlockChoice(optimizer=True, gradients=True, weights=True, activations=True, recompute=True)

LEAST_S = 0.05
"""Seconds that a question gets however little time is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadAnswer:
    """What was found: ``none`` is a proof that nothing fits, ``unknown`` a limit that was reached before anything was.

    choices: of each stage; none without ``found``.
    step: what they take, by the formulas, unrounded.
    bound_s: no choice has a shorter step, in the units of the model.
    proven: the step of the choices is the bound.
    """

    verdict: Literal["found", "none", "unknown"]
    choices: tuple[OffloadChoice, ...] = ()
    step: OffloadedStep | None = None
    rounded_step_s: float = 0.0
    bound_s: float = 0.0
    proven: bool = False


def choose_offload(
    question: OffloadQuestion,
    deadline: Deadline,
    *,
    shape: Literal["positions", "free"] = "positions",
    may: BlockChoice = ANYTHING,
    seed: int = 0,
) -> OffloadAnswer:
    """The choice of the shortest step that the devices and the host have the memory for.

    shape: ``positions`` as a plan can say it, or any legal choice for every block.
    may: what may be chosen of a block at all.
    deadline: after which the best choice so far is the answer, as it is after ``EFFORT``.
    """
    model = cp_model.CpModel()
    host = HostVars(model, question)
    for constraint in CONSTRAINTS:
        constraint(model, host, question)
    if shape == "positions":
        choices_are_positions(model, host, question)
    for stage in host.stages:
        for block in stage.blocks:
            for chosen, allowed in zip(block.chosen, may, strict=True):
                if not allowed:
                    model.add(chosen == 0)
    host.decide_in_order(model)
    step_us = host.step_us(question)
    model.minimize(step_us)
    solver = _solver(deadline, seed)
    status = solver.solve(model)
    deadline.timer.spend(solver.response_proto.deterministic_time)
    if status == cp_model.INFEASIBLE:
        return OffloadAnswer(verdict="none")
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return OffloadAnswer(verdict="unknown")
    shortest_us, bound_us = solver.value(step_us), solver.best_objective_bound
    choices = _choices(host, solver)
    model.add(step_us <= shortest_us)
    beside = sum(stage.speculate + sum(block.recompute for block in stage.blocks) for stage in host.stages)
    model.minimize(host.host_mib() + beside)
    _hint(model, host, solver)
    leaner = _solver(deadline, seed)
    if leaner.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        choices = _choices(host, leaner)
    deadline.timer.spend(leaner.response_proto.deterministic_time)
    return OffloadAnswer(
        verdict="found",
        choices=choices,
        step=offloaded_step(question, choices),
        rounded_step_s=shortest_us / US_PER_S,
        bound_s=bound_us / US_PER_S,
        proven=status == cp_model.OPTIMAL,
    )


def _solver(deadline: Deadline, seed: int) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.search_branching = cp_model.FIXED_SEARCH
    solver.parameters.max_deterministic_time = EFFORT
    if deadline.timer.is_deterministic:
        # A limit of the whole would change the answer, and is looked at next.
        solver.parameters.max_deterministic_time = min(EFFORT, max(LEAST_S, deadline.left_s))
    else:
        solver.parameters.max_time_in_seconds = max(LEAST_S, deadline.left_of_all_s)
    return solver


def _hint(model: cp_model.CpModel, host: HostVars, solver: cp_model.CpSolver) -> None:
    """Begin from what ``solver`` has found."""
    for stage in host.stages:
        for block in stage.blocks:
            for variable in block.chosen:
                model.add_hint(variable, solver.value(variable))


def _choices(host: HostVars, solver: cp_model.CpSolver) -> tuple[OffloadChoice, ...]:
    return tuple(_choice(stage, solver) for stage in host.stages)


def _choice(stage: StageVars, solver: cp_model.CpSolver) -> OffloadChoice:
    return OffloadChoice(
        blocks=tuple(BlockChoice(*map(solver.boolean_value, block.chosen)) for block in stage.blocks),
        speculate=solver.boolean_value(stage.speculate),
        threads=next(count for count, has in stage.threads.items() if solver.boolean_value(has)),
    )
