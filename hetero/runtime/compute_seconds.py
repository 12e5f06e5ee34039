"""Adds up how long a rank computes in a step, without what it waits for others."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.distributed.timing import Collective, Start, Timing, Waitable
from hetero.plan.gradient_groups import Bucket
from hetero.runtime.layer_choice import runs_cuda
from hetero.schedule.actions import UPDATE, Action
from hetero.schedule.program import QueuedAction


class _Clock(Protocol):
    """Marks moments of the computing, which have to be over when one asks for the seconds between them."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def forget(self) -> None:
        """Nobody asks for the marks so far any more."""


class HostClock:
    """Of computes during which the host waits, as on a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def forget(self) -> None:
        pass


class StreamClock:
    """Of computes on the CUDA stream that they are started on: events, of which a step reuses those of the last."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def forget(self) -> None:
        self._used = 0


class ComputeSeconds(Timing):
    """Lets everything happen as :class:`Timing` does, and measures the forwards and backwards of a step.

    Received activations are there before a compute begins. What a forward waits for weights that are gathered does not
    count; what ranks of one tensor-parallel or expert-parallel group wait for each other does, so that all of a group
    look as slow as their slowest. Updates and evaluations do not count.
    """

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._computed: list[tuple[Any, Any]] = []
        self._waited: list[tuple[Any, Any]] = []
        self._computes = False
        self._outside = False

    @contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        if action == UPDATE or self._outside:
            yield
            return
        begin = self._clock.mark()
        self._computes = True
        yield
        self._computes = False
        self._computed.append((begin, self._clock.mark()))

    def collective(
        self,
        queued: QueuedAction,
        operation: Collective,
        bucket: Bucket,
        start: Start,
        *,
        ready_s: float | None = None,
    ) -> Sequence[Waitable]:
        return [_WaitedFor(self, work) for work in start()]

    def wait_beside(self, works: Sequence[Waitable]) -> float:
        for work in works:
            (work.work if isinstance(work, _WaitedFor) else work).wait()
        return 0.0

    @contextmanager
    def outside_steps(self) -> Iterator[None]:
        self._outside = True
        yield
        self._outside = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surrounds what waits for other ranks; within a compute it is taken off."""
        if not self._computes:
            yield
            return
        begin = self._clock.mark()
        yield
        self._waited.append((begin, self._clock.mark()))

    def end_step(self) -> float:
        """Seconds of this rank's computes since the last call, which are over: all ranks have agreed on the step."""
        seconds = sum(self._clock.seconds(*each) for each in self._computed)
        seconds -= sum(self._clock.seconds(*each) for each in self._waited)
        self._computed.clear()
        self._waited.clear()
        self._clock.forget()
        return seconds


@dataclass(frozen=True, slots=True)
class _WaitedFor:
    timing: ComputeSeconds
    work: Waitable

    def wait(self) -> object:
        with self.timing.waiting():
            return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def compute_seconds(device: torch.device) -> ComputeSeconds:
    """What measures a rank on ``device``, without waiting for it."""
    return ComputeSeconds(StreamClock()) if runs_cuda(device) else ComputeSeconds(HostClock())
