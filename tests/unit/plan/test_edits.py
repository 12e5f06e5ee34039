"""Edits of a plan: each changes what it says, keeps the rest, and leaves the plan that it was made of alone."""

import dataclasses
from typing import Any

import pytest

from hetero.plan.ir import Plan, Replica
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

MODEL = gpt2_model(num_layers=6, tied_embeddings=False)


def pipeline(*ranks: int, num_samples: int = 8) -> Replica:
    """Three stages of two layers each."""
    stages = (stage(layers=(2 * s, 2 * s + 2), ranks=(rank,), depth=3 - s) for s, rank in enumerate(ranks))
    return replica(*stages, num_samples=num_samples)


def layers_of(changed: Replica) -> list[tuple[float, float]]:
    return [(each.start, each.end) for each in changed.stages]


def test_one_stage_changes_and_the_others_stay() -> None:
    before = pipeline(0, 1, 2)
    after = before.with_stage(1, in_flight=5, recompute="selective")
    assert [each.in_flight for each in after.stages] == [3, 5, 1]
    assert [each.recompute for each in after.stages] == ["none", "selective", "none"]
    assert before == pipeline(0, 1, 2)
    with pytest.raises(TypeError, match="depth"):
        before.with_stage(1, depth=5)


def test_another_precision_has_no_fp8() -> None:
    """Which goes with bf16: what verifies a plan in float64, or emulates it in float32, computes without."""
    before = plan(MODEL, [pipeline(0, 1, 2).with_stage(1, fp8=True)]).with_precision("bf16")
    assert [stage.fp8 for _, _, stage in before.stages()] == [False, True, False]
    after = before.with_precision("fp64")
    assert (after.precision, [stage.fp8 for _, _, stage in after.stages()]) == ("fp64", [False] * 3)
    assert after.with_precision("bf16") == plan(MODEL, [pipeline(0, 1, 2)]).with_precision("bf16")


def test_each_stage_gets_its_own_value() -> None:
    after = pipeline(0, 1, 2).with_each_stage(in_flight=[6, 5, 4], wgrad_delay=[None, 0, 1])
    assert [(each.in_flight, each.wgrad_delay) for each in after.stages] == [(6, None), (5, 0), (4, 1)]
    with pytest.raises(ValueError, match="shorter"):
        pipeline(0, 1, 2).with_each_stage(in_flight=[6, 5])


@pytest.mark.parametrize(
    ("source", "target", "num_layers", "expected"),
    [
        (0, 1, 1, [(0, 1), (1, 4), (4, 6)]),
        (2, 0, 1, [(0, 3), (3, 5), (5, 6)]),
        (0, 2, 0.5, [(0, 1.5), (1.5, 3.5), (3.5, 6)]),
    ],
)
def test_layers_move_and_stages_between_shift(
    source: int, target: int, num_layers: float, expected: list[tuple[float, float]]
) -> None:
    after = pipeline(0, 1, 2).with_layers_moved(source, target, num_layers)
    assert layers_of(after) == expected
    validate(plan(MODEL, [after]))


def test_a_stage_recomputes_no_more_layers_than_it_has_left() -> None:
    before = pipeline(0, 1, 2).with_stage(0, recompute="full", recompute_num_layers=2)
    assert before.with_layers_moved(0, 1, 1).stages[0].recompute_num_layers == 1


@pytest.mark.parametrize(
    ("number", "before", "moved", "after"),
    [
        (0, {"optimizer_from": -1}, (0, 1), {"optimizer_from": -1}),
        (0, {"optimizer_from": 1, "speculate": True}, (0, 1), {}),
        (1, {"optimizer_from": 2.5, "gradients_from": 3}, (1, 2), {"optimizer_from": 2.5}),
        (2, {"optimizer_from": 4.5, "gradients_from": 6}, (2, 0), {"optimizer_from": 5, "gradients_from": 6}),
        (2, {"optimizer_from": 6, "weights_from": 6, "gradients_from": 6, "activations_until": 6}, (2, 1), None),
    ],
    ids=[
        "the embedding's",
        "of layers that go",
        "gradients of layers that go",
        "of layers that begin later",
        "the head's",
    ],
)
def test_what_is_on_the_host_stays_there_as_far_as_the_stage_has_it(
    number: int, before: dict[str, Any], moved: tuple[int, int], after: dict[str, Any] | None
) -> None:
    """A layer moves; ``None`` for all as before."""
    start = pipeline(0, 1, 2).with_stage(number, offload=Offload(**before))
    changed = start.with_layers_moved(*moved, 1)
    assert changed.stages[number].offload == Offload(**(before if after is None else after))
    validate(dataclasses.replace(plan(MODEL, [changed]), distributed_optimizer=True))


def test_alike_replicas_change_together_on_their_own_ranks() -> None:
    before = plan(MODEL, [pipeline(0, 1, 2), pipeline(3, 4, 5)])
    after = before.with_alike([0, 1], before.replicas[0].with_layers_moved(0, 1, 1))
    assert [layers_of(each) for each in after.replicas] == [[(0, 1), (1, 4), (4, 6)]] * 2
    assert after.ranks() == before.ranks()
    assert after.alike() == [[0, 1]]
    validate(after)


def test_replicas_are_alike_but_for_their_ranks() -> None:
    first, other = pipeline(0, 1, 2), pipeline(3, 4, 5)
    in_turns = first.with_each_stage(ranks=[(0,), (1,), (0,)])
    unlike = [first.with_stage(1, in_flight=7), in_turns, first.with_stage(0, recompute="full")]
    assert plan(MODEL, [first, *unlike, other]).alike() == [[0, 4], [1], [2], [3]]


def test_replicas_take_the_places_of_others() -> None:
    before = plan(MODEL, [pipeline(0, 1, 2), pipeline(3, 4, 5)])
    deeper = before.replicas[1].with_stage(0, in_flight=4)
    assert before.with_replica(1, deeper).replicas == (before.replicas[0], deeper)
    assert before.with_replicas({}) == before


def shares(changed: Plan | None) -> list[int] | None:
    return None if changed is None else [each.num_samples for each in changed.replicas]


def test_samples_move_in_whole_microbatches() -> None:
    one, other = pipeline(0, 1, 2), pipeline(3, 4, 5)
    doubled = other.with_each_stage(micro_batch_size=[2, 2, 2])
    assert shares(plan(MODEL, [one, other]).with_samples_moved([0], [1])) == [7, 9]
    assert shares(plan(MODEL, [one, doubled]).with_samples_moved([0], [1])) == [6, 10]
    assert shares(plan(MODEL, [one, other, pipeline(6, 7, 8)]).with_samples_moved([0, 1], [2])) == [7, 7, 10]
    assert shares(plan(MODEL, [pipeline(0, 1, 2, num_samples=1), other]).with_samples_moved([0], [1])) is None
