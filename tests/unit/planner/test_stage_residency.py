"""What a stage keeps, in blocks: read from a stage, written to it, and changed by a block."""

import dataclasses

import pytest

from hetero.cost.offload.blocks import BlockChoice, OffloadChoice
from hetero.plan.ir import Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.improve.stage_residency import BlockMoves, StageResidency
from tests.helpers.plans import stage

FIRST, MIDDLE, LAST = (stage(layers=layers, ranks=(0,)) for layers in ((0, 3), (3, 5.5), (5.5, 8)))


@pytest.mark.parametrize(
    ("held", "fields"),
    [
        (FIRST, {"recompute": "full", "offload": Offload(optimizer_from=-1.0, speculate=True)}),
        (FIRST, {"recompute": "full", "recompute_num_layers": 2, "offload": Offload(optimizer_from=2.0)}),
        (MIDDLE, {"offload": Offload(optimizer_from=5.0, activations_until=3.0)}),
        (MIDDLE, {"offload": Offload(optimizer_from=3.0, gradients_from=4.0, weights_from=5.0)}),
        (LAST, {"offload": Offload(optimizer_from=8.0, activations_until=5.5)}),
        (LAST, {"offload": NOTHING_ON_HOST}),
    ],
)
def test_what_is_read_is_written(held: Stage, fields: dict[str, object]) -> None:
    held = dataclasses.replace(held, **fields)
    assert dataclasses.replace(held, **StageResidency.of(held, num_layers=8).fields()) == held


@pytest.mark.parametrize(("held", "positions"), [(FIRST, (-1, 0, 1, 2)), (MIDDLE, (3, 4, 5)), (LAST, (5.5, 6, 7, 8))])
def test_a_choice_is_written_by_position(held: Stage, positions: tuple[float, ...]) -> None:
    """The last two blocks are updated on the host, of the last one gradients add up there, and the first two have their
    activations there."""
    num_blocks = len(positions)
    blocks = tuple(
        BlockChoice(optimizer=i >= num_blocks - 2, gradients=i == num_blocks - 1, activations=i < 2)
        for i in range(num_blocks)
    )
    chosen = StageResidency.chosen(OffloadChoice(blocks=blocks, speculate=True), held, num_layers=8)
    changed = dataclasses.replace(held, **chosen.fields())
    assert changed.offload == Offload(
        optimizer_from=positions[-2], gradients_from=positions[-1], speculate=True, activations_until=positions[1]
    )
    assert changed.recompute == "none"


def test_a_change_goes_no_further_than_there_are_blocks() -> None:
    everything = dataclasses.replace(FIRST, recompute="full", offload=Offload(optimizer_from=-1.0))
    here = StageResidency.of(everything, num_layers=8)
    assert not here.moved(BlockMoves(optimizer=-1)).is_possible
    assert not here.moved(BlockMoves(again=1)).is_possible
    kept = here.moved(BlockMoves(again=-3, optimizer=4))
    assert kept.is_possible
    assert dataclasses.replace(everything, **kept.fields()) == FIRST
    assert not kept.moved(BlockMoves(optimizer=1)).is_possible


def test_what_is_on_the_host_stays_nested() -> None:
    """Where a block's optimizer state stays its gradients and weights do; gradients do not leave before it."""
    held = dataclasses.replace(MIDDLE, offload=Offload(optimizer_from=4.0, gradients_from=4.0, weights_from=4.0))
    here = StageResidency.of(held, num_layers=8)
    assert here.moved(BlockMoves(optimizer=1)).fields()["offload"] == Offload(
        optimizer_from=5.0, gradients_from=5.0, weights_from=5.0
    )
    assert here.moved(BlockMoves(gradients=-1)) == here
    assert not here.moved(BlockMoves(weights=3)).is_possible
    below = here.moved(BlockMoves(optimizer=-1, gradients=-1))
    assert below.is_possible
    assert below.fields()["offload"] == Offload(optimizer_from=3.0, gradients_from=3.0, weights_from=4.0)
