"""Adds up how long a rank computes in a step, without what it waits for others, and where the rest of a step goes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.cost.simulation.stage_times import RankTimes
from hetero.distributed.timing import Collective, Start, Timing, Waitable, wait_for_all
from hetero.plan.gradient_groups import Bucket
from hetero.runtime.layer_choice import runs_cuda
from hetero.schedule.actions import UPDATE, Action
from hetero.schedule.program import QueuedAction


class _Clock(Protocol):
    """Marks moments of the computing, which have to be over when one asks for the seconds between them."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def wait(self, mark: Any) -> None:
        """Wait until a mark is over."""

    def forget(self) -> None:
        """Nobody asks for the marks so far any more."""


class HostClock:
    """Of computes during which the host waits, as on a CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def wait(self, mark: float) -> None:
        pass

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

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def forget(self) -> None:
        self._used = 0


class ComputeSeconds(Timing):
    """Lets everything happen as :class:`Timing` does, and measures the forwards and backwards of a step.

    Received activations are there before a compute begins. What a forward waits for weights that are gathered does not
    count; what ranks of one tensor-parallel or expert-parallel group wait for each other does, so that all of a group
    look as slow as their slowest. Updates and evaluations do not count.

    Of a step that begins with :meth:`begin_step`, also what else its seconds go to: :meth:`times`.

    Args:
        always: measure the computes of every step; without it, of those alone that begin with :meth:`begin_step`.
    """

    def __init__(self, clock: _Clock, *, always: bool = True) -> None:
        self._clock = clock
        self._always = always
        self._began: Any = None
        self._agreed: Any = None
        self._updated: tuple[Any, Any] | None = None
        self._computed: list[tuple[Any, Any]] = []
        self._waited: list[tuple[Any, Any]] = []
        self._computes = False
        self._outside = False

    @contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        if self._outside or not (self._always or self._began is not None):
            yield
            return
        if action == UPDATE:
            if self._began is None:
                yield
            else:
                begin = self._clock.mark()
                yield
                self._updated = (begin, self._clock.mark())
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
        wait_for_all(work.work if isinstance(work, _WaitedFor) else work for work in works)
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

    def meet(self) -> None:
        if self._began is not None and not self._outside:
            self._agreed = self._clock.mark()

    def begin_step(self) -> None:
        """Measure the step that begins now as a whole: the update before it has been started."""
        self.end_step()
        self._began = self._clock.mark()

    def times(self) -> RankTimes | None:
        """Where the seconds of the step went that began with :meth:`begin_step`, whose update has been started.

        They count from its begin; ``None`` if none did, or the ranks did not come to agree. Waits for the device.
        Transfers that nothing hides are a part of the bubble: a receiver does not see when its neighbour began to send.
        """
        if self._began is None or self._agreed is None:
            return None
        self._clock.wait(self._updated[1] if self._updated is not None else self._agreed)
        ends = [self._clock.seconds(self._began, end) for _, end in self._computed]
        return RankTimes(
            begin_s=0.0,
            computed_s=max(ends, default=0.0),
            summed_s=self._clock.seconds(self._began, self._agreed),
            busy_s=self._busy_s(),
            update_s=self._clock.seconds(*self._updated) if self._updated is not None else 0.0,
            exposed_s=0.0,
        )

    def end_step(self) -> float:
        """Seconds of this rank's computes since the last call, which are over: all ranks have agreed on the step."""
        seconds = self._busy_s()
        self._computed.clear()
        self._waited.clear()
        self._began = self._agreed = self._updated = None
        self._clock.forget()
        return seconds

    def _busy_s(self) -> float:
        seconds = sum(self._clock.seconds(*each) for each in self._computed)
        return seconds - sum(self._clock.seconds(*each) for each in self._waited)


@dataclass(frozen=True, slots=True)
class _WaitedFor:
    timing: ComputeSeconds
    work: Waitable

    def wait(self) -> object:
        with self.timing.waiting():
            return self.work.wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


def compute_seconds(device: torch.device, *, always: bool = True) -> ComputeSeconds:
    """What measures a rank on ``device``, without waiting for it. Args as those of :class:`ComputeSeconds`."""
    return ComputeSeconds(StreamClock() if runs_cuda(device) else HostClock(), always=always)
