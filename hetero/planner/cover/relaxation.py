"""Relaxes the master problem to a linear program: no whole numbers, no gradient sums, one price per node type.

    max sum_t w_t x_t                 with   sum_t d[t, k] x_t <= D_k   and  x_t <= X_t
    min sum_k D_k p_k + sum_t X_t q_t with   sum_k d[t, k] p_k + q_t >= w_t

w_t = b_t m_t are the samples that a copy finishes in time. Prices p_k >= 0 say how many samples a device of type k is
worth, q_t >= 0 how many more the place of a copy is worth where there may be X_t copies only. By duality no cover
finishes more samples than ``capacity``. A copy of t wastes sum_k d[t, k] p_k + q_t - w_t of it; a template that wastes
more than capacity - global batch is in no cover at all, so it may be left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ortools.linear_solver import pywraplp

from hetero.planner.cover.variables import Column
from hetero.planner.problem import Problem

SLACK = 1e-6
"""Relative: what the linear program's floating point may be wrong by."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the linear program proves: the samples that the whole cluster is worth, and what a copy of each column
    wastes of them."""

    capacity: float
    wasted: tuple[float, ...]


def relax(columns: Sequence[Column], problem: Problem) -> Relaxation:
    """Solve the dual program for the prices; what they prove is then computed from them, whatever their rounding."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    prices = [solver.NumVar(0, infinity, node_type.name) for node_type in problem.node_types]
    objective = solver.Objective()
    objective.SetMinimization()
    for node_type, price in zip(problem.node_types, prices, strict=True):
        objective.SetCoefficient(price, node_type.num_devices)
    for column in columns:
        worth = solver.Constraint(column.samples, infinity)
        for n, price in zip(column.template.devices, prices, strict=True):
            if n:
                worth.SetCoefficient(price, n)
        if _is_scarce(column, problem):
            place = solver.NumVar(0, infinity, "")
            worth.SetCoefficient(place, 1)
            objective.SetCoefficient(place, column.most_replicas)
    status = solver.Solve()
    assert status == pywraplp.Solver.OPTIMAL, "prices that are high enough are always possible"
    found = [max(0.0, price.solution_value()) for price in prices]

    capacity = sum(node_type.num_devices * price for node_type, price in zip(problem.node_types, found, strict=True))
    wasted = []
    for column in columns:
        worth = sum(n * price for n, price in zip(column.template.devices, found, strict=True))
        short = max(0.0, column.samples - worth)
        capacity += column.most_replicas * short
        wasted.append(worth + short - column.samples)
    return Relaxation(capacity, tuple(wasted))


def _is_scarce(column: Column, problem: Problem) -> bool:
    """Whether there may be fewer copies than the cluster has devices for."""
    return column.most_replicas < column.template.most_copies(problem.node_types)


def worth_using(columns: Sequence[Column], problem: Problem) -> list[Column]:
    """The columns that a cover within the same time may use; none if there is no such cover."""
    if not columns:
        return []
    relaxed = relax(columns, problem)
    spare = relaxed.capacity * (1 + SLACK) - problem.global_batch_size
    return [column for column, wasted in zip(columns, relaxed.wasted, strict=True) if wasted <= spare]
