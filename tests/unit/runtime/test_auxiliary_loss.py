"""What is said of an auxiliary loss that depends on the plan."""

import pytest

from hetero.plan.ir import Plan
from hetero.runtime.auxiliary_loss import changed_microbatch_note, microbatch_note
from hetero.runtime.options import StageOptions
from tests.helpers.models import moe_model
from tests.helpers.plans import plan, replica, stage

PER_MICROBATCH = StageOptions(moe_router_load_balancing="aux_loss", moe_aux_loss_coeff=0.01)
WITHOUT = [
    StageOptions(),
    StageOptions(moe_router_load_balancing="aux_loss"),
    StageOptions(moe_router_load_balancing="seq_aux_loss", moe_aux_loss_coeff=0.01),
]


def with_sizes(*sizes: int, layers_of_first: int = 3) -> Plan:
    """One replica for each size, of which the first has two stages if it has not all layers."""
    made = [replica(stage(layers=(0, 6), ranks=(rank,), mbs=size)) for rank, size in enumerate(sizes)]
    last = stage(layers=(0, layers_of_first), ranks=(len(sizes),), mbs=sizes[0])
    rest = stage(layers=(layers_of_first, 6), ranks=(len(sizes) + 1,), mbs=sizes[0])
    return plan(moe_model(), [*made, replica(last, rest)])


def test_a_run_begins_with_a_word_about_its_microbatches() -> None:
    assert microbatch_note(PER_MICROBATCH, with_sizes(1)) == (
        "auxiliary loss: aux_loss is a mean over each microbatch and depends on the plan, here microbatches of 1 "
        "sample; --moe-router-load-balancing-type seq_aux_loss depends on no plan"
    )
    mixed = microbatch_note(PER_MICROBATCH, with_sizes(4, 1, 2))
    assert mixed is not None
    assert "microbatches of 1, 2 and 4 samples, so that not all layers and samples have the same one;" in mixed


@pytest.mark.parametrize("options", WITHOUT)
def test_a_run_without_such_a_loss_says_nothing(options: StageOptions) -> None:
    assert microbatch_note(options, with_sizes(1, 2)) is None
    assert changed_microbatch_note(options, with_sizes(1), with_sizes(2)) is None


@pytest.mark.parametrize(
    ("before", "now"),
    [(with_sizes(2), with_sizes(2, 2)), (with_sizes(2, 1), with_sizes(2, 1)), (None, with_sizes(1))],
    ids=["the same size", "the same plan", "unknown"],
)
def test_a_run_that_keeps_its_loss_says_nothing(before: Plan | None, now: Plan) -> None:
    assert changed_microbatch_note(PER_MICROBATCH, before, now) is None


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (with_sizes(1), with_sizes(2), "had microbatches of 1 sample and goes on with microbatches of 2 samples,"),
        (with_sizes(2, 1), with_sizes(2), "had microbatches of 1 and 2 samples and goes on with microbatches of 2 "),
        (with_sizes(2, 1), with_sizes(2, 1, layers_of_first=4), "goes on with microbatches of 1 and 2 samples, so wi"),
    ],
    ids=["another size", "one size", "other layers"],
)
def test_a_run_says_that_it_goes_on_with_another_loss(before: Plan, now: Plan, said: str) -> None:
    note = changed_microbatch_note(PER_MICROBATCH, before, now)
    assert note is not None
    assert said in note
