"""Cuts between attention and MLP: found where they help, never where they do not, and legal."""

import dataclasses
from collections.abc import Sequence

import pytest

from hetero.cost.capacity import capacity_bytes
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner import scoring
from hetero.planner.improve.half_layer_moves import levelled, with_half_layers_moved
from hetero.planner.problem import Problem
from hetero.planner.reference.exhaustive import exhaustive_best
from hetero.planner.scoring import score_fitted, score_plan, with_more_recompute
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile
from tests.unit.planner.clusters import planned


def model_of(num_layers: int) -> ModelSpec:
    """A layer weighs 0.8 GB with Adam's state. One head, so that tensor parallelism cannot cut it."""
    return gpt2_model(
        num_layers=num_layers,
        hidden_size=2048,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=2048,
        ffn_hidden_size=8192,
        padded_vocab_size=1024,
        tied_embeddings=False,
    )


def question(num_layers: int, num_devices: int, *, memory_gib: int = 40, batch: int = 32) -> Problem:
    """Equal devices with fast links: a block takes 3 s per sample, embedding and head nearly nothing."""
    model = model_of(num_layers)
    spec = nodes(1, gpus_per_node=num_devices, gb_per_s=50.0)
    spec = dataclasses.replace(spec, node_types=(dataclasses.replace(spec.node_types[0], memory_gib=memory_gib),))
    costs = cost_model(model, [profile(model, ends_s=(0.01, 0.05))])
    return Problem(cluster=spec, costs=costs, global_batch_size=batch)


def pipeline(problem: Problem, *cuts: float, num_replicas: int = 1) -> Plan:
    """Stages of one rank each between ``cuts``, every replica alike."""
    edges = [0, *cuts, problem.model.num_layers]
    replicas = [
        replica(
            *(
                stage(layers=(edges[s], edges[s + 1]), ranks=(r * (len(cuts) + 1) + s,), device="A100-40")
                for s in range(len(cuts) + 1)
            ),
            num_samples=problem.global_batch_size // num_replicas,
        )
        for r in range(num_replicas)
    ]
    return plan(problem.model, replicas)


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


@pytest.mark.parametrize(("num_layers", "num_devices"), [(3, 2), (6, 4)])
def test_the_planner_cuts_layers_where_that_beats_every_whole_division(num_layers: int, num_devices: int) -> None:
    """Devices hold two layers, so each replica needs all of them, and one in every two has a layer too many."""
    problem = question(num_layers, num_devices, memory_gib=3)
    whole = exhaustive_best(problem, sizes=(1, 2, 3, 4), samples=(1, 2, 4, 8))
    result = planned(problem)
    assert layers(result.plan) == [1.5] * num_devices
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
