"""What a stage keeps, in blocks: read from a stage, written to it, and changed by a block."""

import dataclasses

import pytest

from hetero.cost.offload.blocks import BlockChoice, OffloadChoice
from hetero.plan.ir import Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.improve.stage_residency import BlockMoves, Exchange, StageResidency, exchanges
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


TEN_LAYERS = Stage(first_layer=1, end_layer=11, ranks=(0,), device="A", micro_batch_size=1, in_flight=1)


def in_words(found: StageResidency | None) -> tuple[int, ...] | None:
    return None if found is None else (found.again, found.optimizer, found.gradients, found.weights, found.activations)


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (Exchange("optimizer", True), None),
        (Exchange("optimizer", False), (5, 3, 8, 9, 0)),
        (Exchange("optimizer", True, "gradients"), (5, 5, 5, 9, 0)),
        (Exchange("optimizer", True, "again"), (9, 5, 8, 9, 0)),
        (Exchange("optimizer", True, "weights"), None),
        (Exchange("optimizer", True, "activations"), (5, 5, 8, 9, 9)),
        (Exchange("optimizer", False, "gradients"), (5, 3, 10, 10, 0)),
        (Exchange("again", True, "weights"), None),
        (Exchange("again", True, "gradients"), (4, 4, 7, 9, 0)),
        (Exchange("again", False, "weights"), (6, 4, 8, 10, 0)),
        (Exchange("gradients", False, "again"), (4, 4, 7, 9, 0)),
        (Exchange("activations", True), None),
        (Exchange("activations", False, "optimizer"), None),
    ],
)
def test_an_exchange_takes_what_has_room(exchange: Exchange, expected: tuple[int, ...] | None) -> None:
    """State takes 12 bytes of a block, gradients 4, weights 2 and activations 3; what is there fills the device."""
    held = dataclasses.replace(
        TEN_LAYERS,
        recompute="full",
        recompute_num_layers=5,
        offload=Offload(optimizer_from=5.0, gradients_from=9.0, weights_from=10.0),
    )
    here = StageResidency.of(held, num_layers=20)

    def num_bytes(residency: StageResidency) -> int:
        kept = 10 - max(residency.again, residency.activations)
        return 12 * residency.optimizer + 4 * residency.gradients + 2 * residency.weights + 3 * kept

    assert in_words(here) == (5, 4, 8, 9, 0)
    assert in_words(here.exchanged(exchange, lambda other: num_bytes(other) <= num_bytes(here))) == expected


def test_nothing_has_to_leave_where_there_is_room() -> None:
    held = dataclasses.replace(TEN_LAYERS, offload=Offload(optimizer_from=5.0, gradients_from=9.0))
    here = StageResidency.of(held, num_layers=20)
    assert here.exchanged(Exchange("optimizer", True, "gradients"), lambda _: True) is None
    assert in_words(here.exchanged(Exchange("optimizer", True), lambda _: True)) == (0, 5, 8, 10, 0)


def test_everything_is_exchanged_for_everything() -> None:
    listed = list(exchanges(["again", "optimizer", "weights"]))
    assert len(listed) == len(set(listed)) == 2 * 3 * 3
    assert Exchange("weights", False, "again") in listed
