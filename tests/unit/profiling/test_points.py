"""What a profiler measures, in which order, and what a profile has of it already."""

import dataclasses
import itertools

from hypothesis import given
from hypothesis import strategies as st

from hetero.profiling.points import ProfilePoint, described, farthest_first, points
from hetero.spec.profile import RecomputedTime, SplitBackwardTime, UpdateTime
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import profile

SIZES = st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, unique=True).map(sorted)


def test_the_middle_comes_first_and_then_the_extremes() -> None:
    order = list(farthest_first([1, 2, 4, 8], [1, 2, 4, 8]))
    assert order[0] == (2, 2)
    assert order[1] == (8, 8)
    assert set(order[2:4]) == {(8, 1), (1, 8)}


@given(tps=SIZES, sizes=SIZES)
def test_every_pair_comes_once(tps: list[int], sizes: list[int]) -> None:
    order = list(farthest_first(tps, sizes))
    assert sorted(order) == sorted(itertools.product(tps, sizes))


def test_a_short_budget_knows_something_of_every_part() -> None:
    """The middle of block, update, head and embedding are the first four; every sort is there before all blocks are."""
    order = points([1, 2, 4, 8], [1, 2, 4, 8], recomputes=["selective", "full"])
    assert [str(each) for each in order[:4]] == [
        "block, tp 2, microbatch 2",
        "update of block, tp 2",
        "head, tp 2, microbatch 2",
        "embedding, tp 2, microbatch 2",
    ]
    first_of_sort = {(each.what, each.kind): number for number, each in reversed(list(enumerate(order)))}
    blocks = [number for number, each in enumerate(order) if (each.what, each.kind) == ("passes", "block")]
    assert len(first_of_sort) == 11
    assert max(first_of_sort.values()) < blocks[-1]
    assert len(order) == len(set(order)) == 8 * 16 + 3 * 4


def test_recomputation_that_nobody_wants_is_left_out() -> None:
    assert {each.what for each in points([1], [1], recomputes=["full"])} == {"passes", "full", "split", "update"}


def test_points_are_named_in_one_line() -> None:
    order = points([1, 2], [1, 2], recomputes=[])
    chosen = [each for each in order if each.kind in ("head", "block") and each.what != "split" and each != order[0]]
    assert described(chosen) == (
        "update of block (tp 1, tp 2); head (tp 1: microbatch 1, 2; tp 2: microbatch 1, 2); "
        "block (tp 1: microbatch 2; tp 2: microbatch 1, 2); update of head (tp 1, tp 2)"
    )


def test_points_share_a_part_of_the_model_whatever_the_size_of_the_microbatch() -> None:
    order = points([1], [1, 2, 4], recomputes=["selective", "full"])
    assert len({each.part for each in order}) == 5 + 3, "five modules, and the block in three other ways"
    assert {each.what for each in order if each.part == order[0].part} == {"passes", "update"}


def test_a_profile_has_what_is_in_it() -> None:
    times = {"tp": 1, "micro_batch_size": 2}
    made = dataclasses.replace(
        profile(gpt2_model(), tps=(1,), micro_batch_sizes=(1, 2)),
        recomputed=(RecomputedTime(recompute="full", forward_s=1, backward_s=3, **times),),
        split_backwards=(SplitBackwardTime(input_gradients_s=1, weight_gradients_s=1, **times),),
        updates=(UpdateTime(kind="block", tp=1, update_s=1.0),),
    )
    order = points([1, 2], [1, 2], recomputes=["selective", "full"])
    there = {each for each in order if each.is_in(made)}
    passes = {
        ProfilePoint(what="passes", kind=kind, tp=1, micro_batch_size=size)
        for kind in ("embedding", "block", "head")
        for size in (1, 2)
    }
    others = {ProfilePoint(what=what, kind="block", **times) for what in ("full", "split")}
    assert there == {*passes, *others, ProfilePoint(what="update", kind="block", tp=1, micro_batch_size=1)}
