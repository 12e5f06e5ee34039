"""A time limit and its parts, in seconds that pass and in counted work."""

import pytest

from hetero.planner.deadline import LOOK_S, CountedWork, Deadline
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
