"""Smaller batches of a ramp-up: every replica has its part in whole microbatches, or one message says what is wrong."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import PlanError
from hetero.plan.batch_shares import check_batch_sizes, with_batch_size
from hetero.plan.batch_sizes import BatchRampup, BatchSizes
from hetero.plan.gradient_groups import by_number, gradient_buckets
from hetero.plan.ir import Plan
from hetero.plan.lowering import lower
from hetero.plan.validate import validate
from tests.helpers.host_training import left_to_hosts
from tests.helpers.layouts import layout
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage


def check_rampup(made: Plan, rampup: BatchRampup) -> None:
    sizes = BatchSizes(made.global_batch_size, rampup).smaller
    check_batch_sizes(made, sizes, flag=f"--rampup-batch-size {rampup}")


def of_units(*replicas: tuple[int, int]) -> Plan:
    """One rank per replica: its samples per microbatch, and its microbatches."""
    return plan(
        gpt2_model(),
        [
            replica(stage(layers=(0, 6), ranks=(r,), mbs=unit), num_samples=unit * count)
            for r, (unit, count) in enumerate(replicas)
        ],
    )


def shares(a_plan: Plan, size: int) -> list[int]:
    return [each.num_samples for each in with_batch_size(a_plan, size).replicas]


@pytest.mark.parametrize(
    ("replicas", "size", "expected"),
    [
        # By largest remainders of 5 : 3 : 1.
        (((1, 5), (1, 3), (1, 1)), 8, [4, 3, 1]),
        (((1, 5), (1, 3), (1, 1)), 4, [2, 1, 1]),
        (((1, 5), (1, 3), (1, 1)), 3, [1, 1, 1]),
        # A small replica keeps a microbatch, which it takes from those that have too many.
        (((1, 30), (1, 30), (1, 1), (1, 1)), 10, [4, 4, 1, 1]),
        # Units of 4 and 2 that had 2 : 1.
        (((4, 4), (2, 4)), 12, [8, 4]),
        (((4, 4), (2, 4)), 10, [8, 2]),
        (((4, 4), (2, 4)), 6, [4, 2]),
        # The nearest to 4 of 8 would leave 5 to multiples of 2.
        (((3, 4), (2, 6)), 8, [6, 2]),
    ],
)
def test_written_out(replicas: tuple[tuple[int, int], ...], size: int, expected: list[int]) -> None:
    assert shares(of_units(*replicas), size) == expected


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4), st.data())
def test_a_batch_is_shared_wherever_it_can_be(replicas: list[tuple[int, int]], data: st.DataObject) -> None:
    whole = of_units(*replicas)
    size = data.draw(st.integers(1, whole.global_batch_size))
    possible = any(
        sum(unit * count for (unit, _), count in zip(replicas, counts, strict=True)) == size
        for counts in itertools.product(*(range(1, size // unit + 1) for unit, _ in replicas))
    )
    if not possible:
        with pytest.raises(PlanError, match=f"cannot share {size} samples"):
            with_batch_size(whole, size)
        return
    smaller = with_batch_size(whole, size)
    validate(smaller)
    if len({unit for unit, _ in replicas}) == 1:
        for mine, full in zip(smaller.replicas, whole.replicas, strict=True):
            unit = full.stages[0].micro_batch_size
            wanted = size * full.num_samples / whole.global_batch_size
            assert mine.num_samples < wanted + unit or mine.num_samples == unit
    assert with_batch_size(whole, whole.global_batch_size) == whole


@pytest.mark.parametrize(("name", "size"), [("everything", 6), ("idle-ranks", 3), ("interleaved-shares", 8)])
def test_weights_are_gathered_alike_in_batches_of_all_sizes(name: str, size: int) -> None:
    """What is on its way from one step's update is awaited in the next step's forwards, which may be more."""
    whole = left_to_hosts(layout(name, "gpt2-tied"), speculate=False)
    smaller = with_batch_size(whole, size)
    buckets = by_number(gradient_buckets(whole, bucket_numel=3000))
    assert buckets == by_number(gradient_buckets(smaller, bucket_numel=3000))
    programs = list(zip(lower(whole, buckets), lower(smaller, buckets), strict=True))
    assert any(before.queues["gather"] for before, _ in programs)
    assert any(before != after for before, after in programs)
    for before, after in programs:
        assert before.queues["gather"] == after.queues["gather"]
        assert before.queues.get("copy_in") == after.queues.get("copy_in")


def test_all_sizes_that_cannot_be_shared_are_told_at_once() -> None:
    whole = of_units((4, 4), (2, 4))
    check_rampup(whole, BatchRampup(start=6, increment=2, samples=100))
    with pytest.raises(PlanError) as error:
        check_rampup(whole, BatchRampup(start=3, increment=3, samples=1000))
    assert str(error.value) == (
        "--rampup-batch-size 3 3 1000: 2 replicas cannot share batches of 3, 9, 15, 21 samples, as each takes at least "
        "one whole microbatch of its stages, multiples of 2, 4; sizes that 4 divides, of at least 8, are possible, or "
        "lower the micro batch sizes"
    )
    check_rampup(whole, BatchRampup(start=8, increment=4, samples=1000))


def test_the_error_names_only_what_is_possible() -> None:
    """Single samples are the smallest microbatches."""
    with pytest.raises(PlanError, match=r"^--eval-global-batch-size 1: 2 .* of 1; sizes of at least 2 are possible$"):
        check_batch_sizes(of_units((1, 2), (1, 2)), [1], flag="--eval-global-batch-size 1")


def test_a_batch_at_which_interleaved_stages_deadlock_is_told() -> None:
    """Six microbatches go through with fewer in flight than five do, which are no multiple of two ranks."""
    depths = (4, 2, 6, 4, 5, 5)
    in_turns = [stage(layers=(s, s + 1), ranks=(s % 2,), depth=depth) for s, depth in enumerate(depths)]
    whole = plan(gpt2_model(), [replica(*in_turns, num_samples=6)])
    validate(whole)
    check_rampup(whole, BatchRampup(start=4, increment=2, samples=10))
    message = r"^--rampup-batch-size 5 1 10: in batches of 5 samples, replica 0: in_flight \[4, 2, 6, 4, 5, 5\] of its "
    with pytest.raises(
        PlanError, match=message + r"interleaved stages would deadlock; set it to \[5, 3, 6, 5, 5, 5\]$"
    ):
        check_rampup(whole, BatchRampup(start=5, increment=1, samples=10))
