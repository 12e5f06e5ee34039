"""Ends every rank with one clear message when one of them dies, instead of letting them wait.

Each rank has a thread that touches its own key in the rendezvous store once a second and looks at the key of the
next rank, so that a rank which dies silently is noticed by its neighbour in the ring. A rank whose own step fails
says so first. Whoever notices calls the roll: every thread answers within a few seconds, whatever its main thread
is blocked in; who does not answer is gone. Then all end with exit code 3, naming who was lost and why.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from hetero.errors import HeteroError, MembershipError

EXIT_CODE = 3
"""Exit code of a rank that ended because another one was lost."""

_LOST_PEER_SIGNS = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "timed out", "NCCL", "connect")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchOptions:
    """beat_s: seconds between touches. lost_after_s: silence that counts as death. roll_call_s: time to answer."""

    beat_s: float = 1.0
    lost_after_s: float = 30.0
    roll_call_s: float = 5.0


class Watch:
    """Context manager around everything that waits for other ranks.

    A rank that is killed is reported by the others within ``lost_after_s + roll_call_s + 2 * beat_s`` seconds, and
    within ``roll_call_s + 2 * beat_s`` where a broken connection betrays it at once, as on gloo.

    Args:
        store: the rendezvous store of the launch.
        describe: names a rank for the message, such as ``rank 3 (replica 0 stage 1, A100-40)``.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        describe: Callable[[int], str],
        options: WatchOptions | None = None,
    ) -> None:
        # A connection of its own: the main thread may be blocked in another.
        self._store = dist.PrefixStore("hetero-watch", store.clone())
        self._rank = rank
        self._world_size = world_size
        self._describe = describe
        self._options = options or WatchOptions()
        self._stop = threading.Event()
        self._main_is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetero-watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """On an error, tell the others, and turn a lost connection into a ``MembershipError`` that names who left."""
        self._main_is_ending.set()
        self._stop.set()
        self._thread.join()
        if error is None:
            self._store.set(f"done/{self._rank}", "")
            return
        lost_peer = isinstance(error, RuntimeError) and not isinstance(error, HeteroError) and _lost_peer(error)
        if not lost_peer:
            self._store.set(f"cause/{self._rank}", f"{type(error).__name__}: {str(error).splitlines()[0]}")
        self._store.set("failed", str(self._rank))
        if lost_peer:
            raise MembershipError(self._roll_call()) from error

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        last_seen, last_beat, beats = time.monotonic(), b"", 0
        while not self._stop.wait(self._options.beat_s):
            try:
                beats += 1
                self._store.set(f"beat/{self._rank}", str(beats))
                beat = self._read(f"beat/{neighbour}")
                if beat != last_beat or self._has(f"done/{neighbour}"):
                    last_seen, last_beat = time.monotonic(), beat
                elif time.monotonic() - last_seen > self._options.lost_after_s:
                    self._store.set("failed", str(self._rank))
                if self._has("failed"):
                    self._end(self._roll_call())
            except dist.DistError as error:
                self._end(f"rank {self._rank} lost the rendezvous store, and with it the other ranks: {error}")

    def _roll_call(self) -> str:
        """Answer, wait for the others to answer, and say who is missing and who gave a reason."""
        self._store.set(f"alive/{self._rank}", "")
        deadline = time.monotonic() + self._options.roll_call_s
        absent = set(range(self._world_size))
        while absent and time.monotonic() < deadline:
            absent = {rank for rank in absent if not self._has(f"alive/{rank}") and not self._has(f"done/{rank}")}
            time.sleep(0.1)
        causes = {rank: self._read(f"cause/{rank}").decode() for rank in range(self._world_size)}
        failed = [f"{self._describe(rank)} failed with {cause}" for rank, cause in causes.items() if cause]
        gone = [self._describe(rank) for rank in sorted(absent) if not causes[rank]]
        if gone:
            failed.append(f"{', '.join(gone)} did not answer and must have died")
        reason = "; ".join(failed) or "the connection to a peer broke, but every rank still answers"
        return f"{reason}. Training stopped on all ranks; start it again without what was lost."

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._has(key) else b""

    def _end(self, message: str) -> None:
        """End this process from the thread, unless its main thread is just doing so."""
        if self._main_is_ending.wait(self._options.beat_s):
            return
        sys.stderr.write(f"hetero: rank {self._rank}: {message}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _LOST_PEER_SIGNS)
