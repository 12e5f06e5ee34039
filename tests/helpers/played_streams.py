"""Streams, events and pinned memory of CUDA, played on a CPU: copies happen late, each stream in its own order.

A played stream is a thread that does what it is given in order, each copy a little late. Whatever a thread of the
runtime computes, it computes at once, as on the one stream of a rank's computes: a compute that waits for an event
holds up its thread. A collective that is issued in a stream begins when all before it in the stream is over.

Not played: memory that the device's allocator hands out again, and kernels that run while their host goes on.
"""

import contextlib
import gc
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from hetero.distributed.timing import Timing
from hetero.runtime import device_streams

LATE_BY_S = 0.001
"""What a copy is late by at most."""


class PlayedEvent:
    """Has come once the streams in which it was recorded are that far."""

    def __init__(self, *_: object, **__: object) -> None:
        self._come = threading.Event()

    def record(self, stream: "PlayedStream") -> None:
        stream.give(self._come.set)

    def wait(self) -> None:
        assert self._come.wait(timeout=60), "an event that never comes"

    synchronize = wait

    def query(self) -> bool:
        return self._come.is_set()


class PlayedStream:
    """Does what it is given in order, in a thread."""

    def __init__(self, played: "PlayedCuda", device: torch.device) -> None:
        self.device = device
        self._played = played
        self._given: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def give(self, work: Callable[[], object]) -> None:
        self._given.put(work)

    def record_event(self, event: PlayedEvent | None = None) -> PlayedEvent:
        event = event or PlayedEvent()
        event.record(self)
        return event

    def wait_event(self, event: PlayedEvent) -> None:
        self.give(event.wait)

    def wait_stream(self, other: "PlayedStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def query(self) -> bool:
        return True

    def end(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        lateness = random.Random(len(self._played.streams))
        while (work := self._given.get()) is not None:
            time.sleep(LATE_BY_S * lateness.random())
            work()


class _ComputeStream(PlayedStream):
    """The stream of whoever has entered no other: whatever it is given is done at once."""

    def __init__(self, played: "PlayedCuda") -> None:
        self.device = torch.device("cpu")
        self._played = played

    def give(self, work: Callable[[], object]) -> None:
        work()

    def synchronize(self) -> None:
        self._played.is_busy = False

    def query(self) -> bool:
        return not self._played.is_busy


@dataclass
class PlayedCuda:
    """What was asked of CUDA.

    streams: that were taken from torch's pool.
    registered: bytes by address, of pinned memory that is there.
    most_registered: of bytes that were there at a time.
    registrations: bytes of each registration.
    forbidden: why memory may not be pinned now; empty where it may.
    is_busy: computes are said to be under way, until they are waited for.
    """

    streams: list[PlayedStream] = field(default_factory=list)
    registered: dict[int, int] = field(default_factory=dict)
    most_registered: int = 0
    registrations: list[int] = field(default_factory=list)
    forbidden: str = ""
    is_busy: bool = False
    _current: threading.local = field(default_factory=threading.local)

    def make_stream(self, device: torch.device) -> PlayedStream:
        stream = PlayedStream(self, device)
        self.streams.append(stream)
        return stream

    def current_stream(self, device: Any = None) -> PlayedStream:
        found: PlayedStream = getattr(self._current, "stream", None) or _ComputeStream(self)
        return found

    @contextlib.contextmanager
    def within(self, stream: PlayedStream | None) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def cudart(self) -> "PlayedCuda":
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert not self.forbidden, f"memory is pinned {self.forbidden}"
        assert address not in self.registered
        self.registered[address] = num_bytes
        self.registrations.append(num_bytes)
        self.most_registered = max(self.most_registered, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < start + size for start, size in self.registered.items())


@contextlib.contextmanager
def played_cuda() -> Iterator[PlayedCuda]:
    """Let the runtime believe that the CPU has streams, and its host memory that can be pinned."""
    played = PlayedCuda()
    copy, to, collective = torch.Tensor.copy_, torch.Tensor.to, Timing.collective

    def copy_late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking:
            played.current_stream().give(lambda: copy(target.detach(), source.detach()))
            return target
        return copy(target, source)

    def to_late(tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        if not non_blocking:
            return to(tensor, *args, **options)
        return copy_late(torch.empty_like(tensor), tensor, non_blocking=True)

    def collective_in_order(timing: Timing, *args: Any, **options: Any) -> Any:
        played.current_stream().synchronize()
        return collective(timing, *args, **options)

    with contextlib.ExitStack() as patches:
        has_streams = device_streams.has_streams
        for name, module in list(sys.modules.items()):
            if name.startswith("hetero.") and getattr(module, "has_streams", None) is has_streams:
                patches.enter_context(mock.patch.object(module, "has_streams", return_value=True))
        for owner, stand_ins in (
            (
                torch.cuda,
                {
                    "Stream": played.make_stream,
                    "Event": PlayedEvent,
                    "stream": played.within,
                    "current_stream": played.current_stream,
                    "default_stream": played.current_stream,
                    "device": lambda _: contextlib.nullcontext(),
                    "cudart": played.cudart,
                },
            ),
            (torch.Tensor, {"copy_": copy_late, "to": to_late, "record_stream": lambda *_: None}),
            (Timing, {"collective": collective_in_order}),
        ):
            for name, stand_in in stand_ins.items():
                patches.enter_context(mock.patch.object(owner, name, stand_in))
        device_streams._make_stream.cache_clear()
        try:
            yield played
        finally:
            gc.collect()
            device_streams._make_stream.cache_clear()
            for stream in played.streams:
                stream.end()
