"""The phases of a sequence wait for one another, sequences follow one another, and who waits gets what fails."""

import threading
from dataclasses import dataclass, field

import pytest
import torch

from hetero.runtime.collective_sequencer import CollectiveSequencer


@dataclass
class Log:
    """What happened, in order, as a work sees it that is only through when waited for."""

    seen: list[str] = field(default_factory=list)

    def phase(self, name: str) -> "Step":
        return Step(self, name)


@dataclass
class Step:
    log: Log
    name: str

    def __call__(self) -> list["Step"]:
        self.log.seen.append(f"start {self.name}")
        return [self]

    def wait(self) -> None:
        self.log.seen.append(f"end {self.name}")


def test_each_phase_starts_after_the_one_before_has_ended() -> None:
    log = Log()
    sequencer = CollectiveSequencer(torch.device("cpu"))
    running = [sequencer.start([log.phase(f"{sequence}{phase}") for phase in "xyz"]) for sequence in "ab"]
    for each in running:
        each.wait()
    assert log.seen == [
        f"{what} {sequence}{phase}" for sequence in "ab" for phase in "xyz" for what in ("start", "end")
    ]
    assert all(each.is_completed() for each in running)


def test_the_caller_goes_on_meanwhile() -> None:
    released = threading.Event()

    def held() -> list[Step]:
        assert released.wait(timeout=30)
        return []

    running = CollectiveSequencer(torch.device("cpu")).start([held])
    assert not running.is_completed()
    released.set()
    running.wait()
    assert running.is_completed()


def test_what_a_phase_raises_is_raised_to_who_waits() -> None:
    def failing() -> list[Step]:
        raise RuntimeError("a peer has gone")

    running = CollectiveSequencer(torch.device("cpu")).start([failing])
    with pytest.raises(RuntimeError, match="a peer has gone"):
        running.wait()
