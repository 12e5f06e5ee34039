"""A time limit and its parts."""

from hetero.planner.deadline import Deadline


def test_what_does_not_fit_into_a_part_is_left_out_of_the_whole() -> None:
    whole = Deadline(100.0)
    part = whole.part(0.1)
    assert part.has(5.0)
    assert not whole.left_something_out
    assert not part.part(0.5).has(20.0)
    assert whole.left_something_out
    assert part.left_something_out
    assert whole.has(50.0), "it is not over for that"
