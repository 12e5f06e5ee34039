import io
import re
import time

import pytest
from rich.console import Console

from hetero import progress
from hetero.progress import WorkProgress


def wait_for(stream: io.StringIO, text: str) -> str:
    deadline = time.monotonic() + 30
    while text not in stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    return stream.getvalue()


def test_lines_come_before_anything_is_done_and_while_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(progress, "NEXT_LINE_S", 0.01)
    stream = io.StringIO()
    with WorkProgress("training", total=4, console=Console(file=stream)) as shown:
        assert wait_for(stream, "\n").startswith("training: begun, after ")
        shown.show(1, "step 1 of 4")
        shown.show(2, "step 2 of 4")
        said = wait_for(stream, " left\n")
    assert re.search(r"^training: step 2 of 4, after \d:\d\d:\d\d, about \d:\d\d:\d\d left$", said, re.MULTILINE)
    told = stream.getvalue()
    time.sleep(0.05)
    assert stream.getvalue() == told, "nothing is said once the work is done"


def test_what_is_done_at_once_says_nothing() -> None:
    stream = io.StringIO()
    with WorkProgress("training", total=2, console=Console(file=stream)) as shown:
        shown.show(2, "step 2 of 2")
    assert stream.getvalue() == ""


def test_a_terminal_is_told_in_place() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with WorkProgress("training", total=2, text="starting", console=console) as shown:
        assert "training" in wait_for(stream, "starting")
        shown.show(1, "step 1 of 2")
        assert "step 1 of 2" in wait_for(stream, "step 1 of 2")
    # Erased at the end, so that what comes next stands where the bar was.
    assert stream.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05")])
def test_clock(seconds: float, text: str) -> None:
    assert progress._clock(seconds) == text
