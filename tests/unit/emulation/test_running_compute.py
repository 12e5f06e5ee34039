"""A forward whose weights come late ends later."""

import pytest

from hetero.emulation.cluster.timing import RunningCompute
from hetero.schedule.actions import Action, ActionKind


@pytest.mark.parametrize(
    ("until_s", "share", "end_s"),
    [
        (10.5, 0.25, 14.0),  # there before a quarter of the four seconds is over: nobody waited
        (12.0, 0.25, 15.0),  # three quarters of them are still to run
        (13.0, 1.0, 14.0),
        (15.0, 1.0, 15.0),
    ],
)
def test_what_is_left_is_run_when_its_weights_are_there(until_s: float, share: float, end_s: float) -> None:
    running = RunningCompute(Action(0, ActionKind.F, 0), start_s=10.0, seconds=4.0, end_s=14.0)
    running.had_to_wait(until_s, share=share)
    assert running.end_s == pytest.approx(end_s)
