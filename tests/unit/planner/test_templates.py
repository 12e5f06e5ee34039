"""How long a template takes for a number of microbatches, and how many it does in a time."""

import pytest

from hetero.planner.replica.templates import Template

TEMPLATE = Template(
    placed_slots=(), stages=(), samples=2, fill_s=2.5, period_s=0.75, update_s=0.5, devices=(), node_layers=()
)


def test_a_step_is_the_first_microbatch_and_a_period_for_each_other() -> None:
    assert TEMPLATE.seconds(1) == pytest.approx(3.0)
    assert TEMPLATE.seconds(9) == pytest.approx(3.0 + 8 * 0.75)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_in_its_time_it_does_so_many_and_a_moment_earlier_one_less(count: int) -> None:
    seconds = TEMPLATE.seconds(count)
    assert TEMPLATE.most_microbatches(seconds) == count
    assert TEMPLATE.most_microbatches(seconds - 0.01) == count - 1
