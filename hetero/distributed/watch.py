"""Ends every rank with one clear message when one of them dies, instead of letting them wait.

Each rank has a thread that touches its own key in the rendezvous store once a second and looks at the key of the
next rank, so that a rank which dies silently is noticed by its neighbour in the ring. A rank whose own step fails
says so first. Whoever notices calls the roll: every thread answers within a few seconds, whatever its main thread
is blocked in; who does not answer is gone. Then all end with exit code 3, naming who was lost and why.

The store should live in none of the ranks, as torchrun's does. Where rank 0 hosts it, losing rank 0 still ends all,
but nobody is left who could say which rank it was.
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

_LOST_PEER_SIGNS = ("connect", "broken pipe", "timed out", "timeout", "nccl")
"""What the messages of gloo and NCCL say, in small letters, when a peer is gone. They have no type of their own."""

_MAX_CHARACTERS = 500
"""Of another rank's error. NCCL prints pages."""


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
        self._last_answer = time.monotonic()
        self._report = ""
        self._ring = threading.Thread(target=self._watch_neighbour, name="hetero-watch", daemon=True)
        self._guard = threading.Thread(target=self._watch_store, name="hetero-watch-store", daemon=True)

    def __enter__(self) -> "Watch":
        self._last_answer = time.monotonic()
        self._ring.start()
        self._guard.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """On an error, tell the others, and turn a lost connection into a ``MembershipError`` that names who left."""
        self._main_is_ending.set()
        self._stop.set()
        # It may be calling the roll. In a store that no longer answers it is blocked for ever.
        self._ring.join(self._options.roll_call_s + self._options.beat_s)
        lost_peer = _is_lost_peer(error)
        try:
            if self._ring.is_alive():
                raise dist.DistStoreError("no answer")
            self._tell(error, key="broken" if lost_peer else "cause")
            if lost_peer and not self._report:
                self._call_the_roll()
        except dist.DistError as gone:
            self._report = self._store_is_lost(gone)
        if lost_peer:
            raise MembershipError(self._report) from error

    def _tell(self, error: BaseException | None, *, key: str) -> None:
        if error is None:
            self._store.set(f"done/{self._rank}", "")
            return
        self._store.set(f"{key}/{self._rank}", _in_one_line(error))
        self._store.set("failed", "")

    def _watch_neighbour(self) -> None:
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
                    self._store.set("failed", "")
                if self._has("failed"):
                    self._call_the_roll()
                    self._end(self._report)
            except dist.DistError as error:
                self._end(self._store_is_lost(error))

    def _watch_store(self) -> None:
        """A store whose host stands still, or whose network is cut, blocks its callers without an error."""
        while not self._stop.wait(self._options.beat_s):
            if time.monotonic() - self._last_answer > self._options.lost_after_s:
                self._end(self._store_is_lost(f"no answer for {self._options.lost_after_s:g} s"))

    def _call_the_roll(self) -> None:
        """Answer, wait for the others to answer, and report who is missing and who gave a reason."""
        self._store.set(f"alive/{self._rank}", "")
        deadline = time.monotonic() + self._options.roll_call_s
        absent = list(range(self._world_size))
        while absent and time.monotonic() < deadline:
            time.sleep(0.1)
            absent = [rank for rank in absent if not self._answered(rank)]
        failed = [f"{self._describe(rank)} failed with {cause}" for rank, cause in self._told("cause")]
        gone = ", ".join(self._describe(rank) for rank in absent)
        broken = [f"{self._describe(rank)} failed with {text}" for rank, text in self._told("broken")]
        if gone:
            failed.append(f"{gone} did not answer and must have died; start again without what was lost")
        if not failed:
            failed = [*broken, "every rank still answers"]
        self._report = f"{'; '.join(failed)}. Training stopped on all ranks."

    def _answered(self, rank: int) -> bool:
        return any(self._has(f"{key}/{rank}") for key in ("alive", "done", "cause"))

    def _told(self, key: str) -> list[tuple[int, str]]:
        """What each rank left under ``key``, for those that did."""
        texts = [(rank, self._read(f"{key}/{rank}").decode()) for rank in range(self._world_size)]
        return [(rank, text) for rank, text in texts if text]

    def _has(self, key: str) -> bool:
        found = bool(self._store.check([key]))
        self._last_answer = time.monotonic()
        return found

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._has(key) else b""

    def _store_is_lost(self, why: object) -> str:
        return f"lost the rendezvous store, and with it the other ranks: {why}. Is the host of rank 0 still there?"

    def _end(self, message: str) -> None:
        """End this process from a thread, unless its main thread is just doing so."""
        if self._main_is_ending.wait(self._options.beat_s):
            return
        try:
            sys.stderr.write(f"hetero: rank {self._rank}: {message}\n")
            sys.stderr.flush()
            sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)


def _is_lost_peer(error: BaseException | None) -> bool:
    """Whether ``error`` may be the consequence of another rank's end."""
    if not isinstance(error, RuntimeError) or isinstance(error, HeteroError):
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST_PEER_SIGNS)


def _in_one_line(error: BaseException) -> str:
    """``ValueError: its message``; many are empty, such as an assertion's."""
    message = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
