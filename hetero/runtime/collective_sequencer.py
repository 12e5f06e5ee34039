"""Runs collectives of several phases in order, beside the backward, where each phase needs the one before.

On CUDA they wait for one another on a stream of their own. Without it a thread waits for them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import require_started
from hetero.distributed.timing import Waitable, wait_for_all
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import has_streams, stream_for

Phase = Callable[[], Sequence[dist.Work | None]]
"""Starts collectives of groups of this rank and returns what torch gives to wait for before the next phase."""


class CollectiveSequencer:
    """Runs each phase of a sequence after the one before, and one sequence after the other.

    All ranks start the sequences that they share in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self._runner = _StreamRunner(device) if has_streams(device) else _ThreadRunner()

    def start(self, phases: Sequence[Phase]) -> Waitable:
        """Run ``phases`` after all that have been started before."""
        return self._runner.start(phases)


class _ThreadRunner:
    """Runs sequences on one thread, which waits for each phase."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collective-sequencer")

    def start(self, phases: Sequence[Phase]) -> Waitable:
        return _Running(self._thread.submit(_run, phases))


class _StreamRunner:
    """Runs sequences on one CUDA stream, on which each phase waits for the one before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, phases: Sequence[Phase]) -> Waitable:
        stream = stream_for(self._device, StreamRole.SUM_PHASES)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            _run(phases)
            return _Recorded(stream.record_event())


def _run(phases: Sequence[Phase]) -> None:
    for phase in phases:
        wait_for_all(require_started(phase()))


@dataclass(frozen=True, slots=True)
class _Running:
    """A sequence on the thread; waiting raises what it raised."""

    future: Future[None]

    def wait(self) -> object:
        return self.future.result()

    def is_completed(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A sequence on the stream; waiting holds up the caller's stream only."""

    event: torch.cuda.Event

    def wait(self) -> object:
        torch.cuda.current_stream().wait_event(self.event)
        return None

    def is_completed(self) -> bool:
        done: bool = self.event.query()
        return done
