"""Cuts between attention and MLP: found where they help, never where they do not, and legal."""

from collections.abc import Sequence

import pytest

from hetero.cost.capacity import capacity_bytes
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner import scoring
from hetero.planner.improve.half_layer_moves import levelled, with_half_layers_moved
from hetero.planner.reference.exhaustive import exhaustive_best
from hetero.planner.scoring import score_fitted, score_plan, with_more_recompute
from tests.helpers.cases import slow
from tests.unit.planner.clusters import planned
from tests.unit.planner.few_layers import pipeline, question


def layers(made: Plan, r: int = 0) -> list[float]:
    return [each.num_layers for each in made.replicas[r].stages]


@pytest.mark.parametrize(
    ("num_layers", "cuts", "expected"),
    [(6, (2, 3, 4), [1.5, 1.5, 1.5, 1.5]), (3, (2,), [1.5, 1.5]), (3, (1,), [1.5, 1.5]), (2, (0.5,), [1, 1])],
)
def test_stages_are_levelled(num_layers: int, cuts: Sequence[float], expected: list[float]) -> None:
    problem = question(num_layers, len(cuts) + 1)
    found = levelled(pipeline(problem, *cuts), problem)
    assert found is not None
    assert layers(found) == expected
    validate(found)


@pytest.mark.parametrize(("num_layers", "cuts"), [(6, (2, 4)), (2, (1,)), (1, ()), (120, (60,))])
def test_what_is_level_stays(num_layers: int, cuts: Sequence[float]) -> None:
    problem = question(num_layers, len(cuts) + 1)
    assert levelled(pipeline(problem, *cuts), problem) is None
    assert list(with_half_layers_moved(pipeline(problem, *cuts), problem)) == []


def test_levelled_stages_are_as_deep_as_equal_ones_need() -> None:
    problem = question(6, 4)
    made = pipeline(problem, 2, 3, 4)
    made = made.with_replica(0, made.replicas[0].with_each_stage(in_flight=[3, 2, 1, 1]))
    found = levelled(made, problem)
    assert found is not None
    assert [each.in_flight for each in found.replicas[0].stages] == [4, 3, 2, 1]


def test_replicas_of_one_shape_change_together_on_their_own_ranks() -> None:
    problem = question(3, 4)
    made = pipeline(problem, 2, num_replicas=2)
    for found in with_half_layers_moved(made, problem):
        validate(found)
        assert layers(found, 0) == layers(found, 1) != layers(made)
        assert [s.ranks for _, _, s in found.stages()] == [(0,), (1,), (2,), (3,)]


def test_only_what_makes_the_longest_changed_stage_shorter_is_looked_at() -> None:
    """A half moves at most two stages on, and never to where it makes a longer stage than it came from."""
    problem = question(8, 4)
    found = [layers(each) for each in with_half_layers_moved(pipeline(problem, 3, 5, 6), problem)]
    assert [2.5, 2.5, 1, 2] in found
    assert [2.5, 2, 1.5, 2] in found
    assert all(max(each) <= 2.5 for each in found[1:] if each[0] < 3)
    assert [2.5, 2, 1, 2.5] not in found[1:], "three stages on"


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "num_devices"), [*slow((3, 2)), (6, 4)])
def test_the_planner_cuts_layers_where_that_beats_every_whole_division(num_layers: int, num_devices: int) -> None:
    """Devices hold two layers, so each replica needs all of them, and one in every two has a layer too many."""
    problem = question(num_layers, num_devices, memory_gib=3)
    whole = exhaustive_best(problem, sizes=(1, 2, 3, 4), samples=(1, 2, 4, 8))
    result = planned(problem)
    (replica,) = result.plan.replicas
    held = [sum(replica.stages[s].num_layers for s in group) for group in replica.device_groups]
    assert held == [1.5] * num_devices, "of a device, in one stage or interleaved"
    assert result.lower_bound_s <= result.simulation.step_s < 0.9 * whole.step_s
    for (r, s), parts in result.memory.items():
        capacity = capacity_bytes(result.plan.replicas[r].stages[s], problem.cluster)
        assert capacity is not None
        assert parts.total <= capacity


def test_where_memory_is_short_a_half_is_paid_for_with_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths are the smallest, so that nothing else is left to give."""
    problem = question(3, 2)
    whole = pipeline(problem, 1.5)
    made = whole.with_replica(0, whole.replicas[0].with_each_stage(in_flight=[1, 1]))
    needed = score_plan(made, problem)
    assert needed is not None
    assert score_fitted(made, problem) == needed
    peak = max(parts.total for parts in needed.memory.values())

    def with_capacity(num_bytes: int) -> Plan | None:
        monkeypatch.setattr(scoring, "capacity_bytes", lambda *_: num_bytes)
        return with_more_recompute(made, problem)

    assert with_capacity(peak) is made
    assert with_capacity(1) is None
    more = with_capacity(peak - 1)
    assert more is not None
    assert "none" in {s.recompute for _, _, s in more.stages()} != {"none"}, "only where it is short"
    found = score_fitted(made, problem)
    assert found is not None
    assert found.plan == more
