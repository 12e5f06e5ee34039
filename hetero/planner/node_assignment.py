"""Assigns each of n nodes one of n places so that the costs add up to as little as possible."""

from collections.abc import Sequence

from ortools.graph.python.linear_sum_assignment import SimpleLinearSumAssignment


def cheapest_places(costs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The place of every node, with the least sum of ``costs[node][place]``; of equal sums one with the fewest nodes
    away from the place of their own number.

    OR-Tools solves it exactly, by cost scaling (Goldberg and Kennedy 1995).

    Args:
        costs: whole numbers from 0 on, as many places as nodes, each sum below 2^63 / (nodes + 1).
    """
    count = len(costs)
    solver = SimpleLinearSumAssignment()
    for node, row in enumerate(costs):
        assert len(row) == count, (len(row), count)
        for place, cost in enumerate(row):
            solver.add_arc_with_cost(node, place, cost * (count + 1) + (node != place))
    if count and solver.solve() != solver.OPTIMAL:
        raise AssertionError(f"an assignment of {count} nodes has no overflow and always a solution")
    return tuple(solver.right_mate(node) for node in range(count))
