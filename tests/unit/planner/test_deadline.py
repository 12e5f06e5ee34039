"""A time limit and its parts, in seconds that pass and in counted work."""

import pytest

from hetero.planner.deadline import LOOK_S, CountedWork, Deadline
from hetero.planner.rungs import rungs
from hetero.planner.time_shares import TimeShare


def test_what_does_not_fit_into_a_part_is_left_out_of_the_whole() -> None:
    whole = Deadline(100.0)
    part = whole.part(0.1)
    assert part.has(5.0)
    assert not whole.left_something_out
    assert not part.part(0.5).has(20.0)
    assert whole.left_something_out
    assert part.left_something_out
    assert whole.has(50.0), "it is not over for that"


def test_counted_work_is_what_was_spent() -> None:
    deadline = Deadline(1.0, CountedWork())
    assert not deadline.is_over()
    assert deadline.has(0.5)
    assert deadline.left_s == pytest.approx(0.5 - LOOK_S)
    assert not deadline.has(0.6)
    assert deadline.left_s == pytest.approx(0.5 - LOOK_S), "what is left out is not spent"
    deadline.timer.spend(0.5)
    assert deadline.is_over()


def test_parts_of_counted_work_share_one_count() -> None:
    whole = Deadline(1.0, CountedWork())
    part = TimeShare.LISTING.of(whole)
    assert part.limit_s == pytest.approx(0.5)
    assert part.has(0.5)
    assert part.is_over()
    assert not whole.is_over()
    assert whole.left_s == pytest.approx(0.5 - 2 * LOOK_S)


def test_a_step_that_only_the_whole_has_no_time_for_ends_it() -> None:
    """With a later end it would have been begun; a smaller one in its place would be of another course."""
    limit = Deadline(1.0, CountedWork())
    rung = limit.until(3.0)
    step = rung.part(0.5)
    assert not step.has(1.6), "the step itself has 1.5 s"
    assert not limit.is_over()
    assert not step.has(1.2)
    assert step.is_interrupted
    assert not step.has(0.01)
    assert limit.is_over()


def test_what_was_over_stays_so_when_work_is_given_back() -> None:
    limit = Deadline(1.0, CountedWork())
    assert limit.has(1.0)
    assert limit.is_over()
    limit.give_back(0.9)
    assert limit.is_over()
    assert not limit.has(0.01)


def test_a_part_knows_whether_it_ran_out() -> None:
    whole = Deadline(1.0, CountedWork())
    first, second = whole.part(0.1), whole.part(0.5)
    assert not second.is_over()
    assert not whole.ran_out
    first.timer.spend(0.2)
    assert first.is_over()
    assert first.ran_out
    assert whole.ran_out
    assert not second.ran_out
    assert not first.is_interrupted, "its own limit was reached"


def test_rungs_end_at_the_same_seconds_whatever_the_limit_is() -> None:
    def ends(limit_s: float) -> list[tuple[float, float]]:
        limit = Deadline(limit_s, CountedWork())
        found = []
        for rung in rungs(limit):
            found.append((limit.elapsed_s, limit.elapsed_s + rung.left_s))
            rung.timer.spend(rung.left_s)
        return found

    short, long = ends(2.0), ends(40.0)
    assert long[: len(short)] == short
    assert [end_s for _, end_s in long] == pytest.approx([1 / 9, 1, 9, 27, 108], abs=0.01)
