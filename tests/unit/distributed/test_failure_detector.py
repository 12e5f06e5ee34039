"""How long a silence has to last, counted in beats that take no time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from hetero.distributed.failure_detector import FailureDetector, FailureDetectorOptions
from hetero.distributed.rendezvous_store import ALL_CONNECTED

OPTIONS = FailureDetectorOptions(beat_s=0.5, lost_after_s=3.0, roll_call_s=0.0)
LAST_SIGN = 5
"""The beat of this rank at which the other one gives its last sign of life."""


class EndedError(Exception):
    """In place of the end of the process."""


class Beats(threading.Event):
    """Waits that take no time: each calls ``during`` with its number, and adds up what it would have taken."""

    def __init__(self, during: Callable[[int], None]) -> None:
        super().__init__()
        self._during = during
        self.count = 0
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        assert self.count < 100, "it is never missed"
        self.count += 1
        self.waited_s += timeout
        self._during(self.count)
        return False


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> FailureDetector:
    """That of rank 0 of two; its end is an error, with what it says."""

    def end(_: FailureDetector, message: str) -> None:
        raise EndedError(message)

    monkeypatch.setattr(FailureDetector, "_end", end)
    return FailureDetector(dist.HashStore(), rank=0, world_size=2, options=OPTIONS)


def silence_s(detector: FailureDetector, monitor: str, sign: Callable[[int], None], said: str) -> float:
    """How long the other side was silent before ``detector`` ended its process, in seconds of its beats."""

    def until_the_last(beat: int) -> None:
        if beat <= LAST_SIGN:
            sign(beat)

    beats: Any = Beats(until_the_last)
    detector._stop = beats
    with pytest.raises(EndedError, match=said):
        getattr(detector, monitor)()
    return beats.waited_s - LAST_SIGN * OPTIONS.beat_s


def test_a_neighbour_is_missed_after_so_many_beats_of_ones_own(detector: FailureDetector) -> None:
    def beat(number: int) -> None:
        detector._store.set("host/1", "a")
        detector._store.set("beat/1", f"{number} training")

    silent_s = silence_s(detector, "_monitor_neighbour", beat, r"rank 1 \(on a\), last heard of while training")
    assert OPTIONS.lost_after_s < silent_s <= OPTIONS.lost_after_s + OPTIONS.beat_s


def test_a_rank_that_has_not_arrived_is_not_missed(detector: FailureDetector) -> None:
    """It has a limit of its own, which is longer: hosts start at different speeds."""
    with pytest.raises(AssertionError, match="it is never missed"):
        silence_s(detector, "_monitor_neighbour", lambda _: None, "nothing")


def test_a_store_is_missed_after_so_many_beats_without_an_answer(detector: FailureDetector) -> None:
    def answer(_: int) -> None:
        detector._answers += 1

    silent_s = silence_s(detector, "_monitor_store", answer, "lost the rendezvous store, .*: no answer for 3 s")
    assert OPTIONS.lost_after_s < silent_s <= OPTIONS.lost_after_s + OPTIONS.beat_s


def test_what_a_stranger_wrote_into_the_store_is_shown_as_text(detector: FailureDetector) -> None:
    """Whoever reaches the store can write every key: no character of it moves the cursor or begins a line."""
    detector._store.set("cause/1", "an error\x1b[2J\nhetero: rank 0: all is well")
    detector._store.set("host/1", b"\xffgpu\x1b]0;title\x07".decode("latin-1"))
    detector._store.set("alive/1", "no JSON \x1b[31m")
    detector._call_the_roll()
    said = detector._report
    assert said.isprintable()
    assert r"gpu\x1b]0;title\x07) failed with an error\x1b[2J\nhetero: rank 0: all is well" in said
    detector._store.set("report", "over\x1b[2J\n")
    detector._call_the_roll()
    assert detector._report == r"over\x1b[2J\n"


def test_an_answer_that_cannot_be_read_accuses_none(detector: FailureDetector) -> None:
    detector._store.set("alive/1", "[]")
    assert detector._standstill(["timed out"]) == [
        "every rank still answers and waits for others: look at the network between them",
        "timed out",
    ]


def test_rank_0_alone_says_that_the_store_may_close() -> None:
    store = dist.HashStore()
    FailureDetector(store, rank=1, world_size=2, options=OPTIONS).close_store()
    assert not store.check([ALL_CONNECTED])
    FailureDetector(store, rank=0, world_size=2, options=OPTIONS).close_store()
    assert store.check([ALL_CONNECTED])
