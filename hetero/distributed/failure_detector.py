"""Ends every rank with one clear message when one of them dies, instead of letting them wait.

Each rank has a thread that touches its own key in the rendezvous store once a second and looks at the key of the
next rank, so that a rank which dies silently is noticed by its neighbour in the ring. A rank whose own step fails
says so first. Whoever notices calls the roll: every thread answers within a few seconds, whatever its main thread
is blocked in; who does not answer is gone. Then all end with exit code 3, naming who was lost, what it was doing, and
why. It begins before the first collective: a rank that does not even arrive is named after a time of its own.

The store should live in none of the ranks, as torchrun's does. Where rank 0 hosts it, losing rank 0 still ends all,
but nobody is left who could say which rank it was.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch.distributed as dist

from hetero.distributed.process_exit import EXIT_CODE
from hetero.distributed.rank_consensus import ConsensusError
from hetero.distributed.rendezvous_store import ALL_CONNECTED
from hetero.distributed.standstill import (
    Position,
    StepProgress,
    main_thread_line,
    main_thread_stack,
    main_thread_waits,
    still_ranks,
)
from hetero.errors import ConfigError, HeteroError, MembershipError
from hetero.printable import printable
from hetero.serialization import from_json, to_json
from hetero.text import number_ranges

_GLOO_LOST_PEER = re.compile(
    r"gloo connectfullmesh failed|gloo/\S+\.(cc|h):\d+\].*(connect|broken pipe|timed out|timeout|closed)", re.I | re.S
)
"""What gloo says when a peer is gone, beside the place in its source: its errors have no type of their own, those of
NCCL and of the store have."""

_MAX_CHARACTERS = 500
"""Of another rank's error. NCCL prints pages."""

_MAX_STILL_RANKS = 4
"""Ranks that stood still which a report names; it counts the others."""

_TIMED_OUT = re.compile(r"timed? ?out", re.I)
"""In the errors of gloo, of the store, and of NCCL's watchdog: a wait for other ranks has lasted too long."""

_ARRIVALS, _DEPARTURES = "arrivals", "departures"
"""Keys of the store: how many ranks have come, and how many have left without leaving anybody behind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureDetectorOptions:
    """How long a rank may be silent before it counts as lost, in seconds.

    beat_s: between two signs of life.
    lost_after_s: of silence that counts as death.
    roll_call_s: time to answer when all ranks are asked whether they are there.
    arrive_within_s: how long the first rank to arrive waits for the last: hosts start at different speeds.
    """

    beat_s: float = 1.0
    lost_after_s: float = 30.0
    roll_call_s: float = 5.0
    arrive_within_s: float = 600.0


class FailureDetector:
    """Context manager that notices lost ranks, around everything from the first collective to the last.

    A rank that is killed is reported by the others within ``lost_after_s + roll_call_s + 2 * beat_s`` seconds, and
    within ``roll_call_s + 2 * beat_s`` where a broken connection betrays it at once, as on gloo. Its
    ``arrive_within_s`` seconds to get here apart, that holds for every phase of a run.

    Args:
        store: the rendezvous store of the launch.
        hosts_store: it lives in this process, which then leaves last.
        before_end: told why this process ends, where its main thread cannot raise that: it is blocked.

    Attributes:
        describe: names a rank for the report. By its host; once the plan is known, set it to what gives
            ``rank 3 (replica 0 stage 1, A100-40)``.
        doing: what this rank does at the moment, such as ``saving step 4``; a report on a lost rank tells its last.
        progress: where it is in that.
        device_is_busy: whether its device has work left. A main thread that waits for the device then waits for what
            the device waits for.
        transport_error: what the libraries that carry messages have found wrong, empty while nothing is. Asked at every
            beat: their threads may see it while the main thread waits for a device that waits for ever.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        options: FailureDetectorOptions | None = None,
        hosts_store: bool = False,
        before_end: Callable[[MembershipError], None] | None = None,
    ) -> None:
        # A connection of its own: the main thread may be blocked in another.
        self._launch_store = store.clone()  # type: ignore[attr-defined,unused-ignore]  # not in torch 2.13's stubs
        self._store = dist.PrefixStore("failure-detector", self._launch_store)
        self._rank = rank
        self._world_size = world_size
        self._options = options or FailureDetectorOptions()
        self._hosts_store = hosts_store
        self._before_end = before_end
        self.describe: Callable[[int], str] = self._by_host
        self.doing = "joining"
        self.progress = StepProgress()
        self.device_is_busy: Callable[[], bool] = bool
        self.transport_error: Callable[[], str] = str
        self._seen: tuple[str, int] = ("", -1)
        self._seen_at_s = time.monotonic()
        self._stop = threading.Event()
        self._main_is_ending = threading.Event()
        self._answers = 0
        self._report = ""
        self._stood = False
        self._ring = threading.Thread(target=self._monitor_neighbour, name="failure-detector", daemon=True)
        self._guard = threading.Thread(target=self._monitor_store, name="failure-detector-store", daemon=True)

    def __enter__(self) -> "FailureDetector":
        self._ring.start()
        self._guard.start()
        return self

    def wait_for_all(self) -> None:
        """Wait until every rank of the launch has come here.

        Raises:
            MembershipError: some have not after ``arrive_within_s`` seconds; it names them.
        """
        deadline = time.monotonic() + self._options.arrive_within_s
        try:
            # From here on its silence means something.
            self._store.set(f"beat/{self._rank}", f"0 {self._activity()}")
            self._store.set(f"host/{self._rank}", socket.gethostname())
            self._store.add(_ARRIVALS, 1)
            pause_s = 0.02
            while self._store.add(_ARRIVALS, 0) < self._world_size:
                if time.monotonic() > deadline:
                    raise MembershipError(
                        f"of {self._world_size} ranks, {number_ranges(self._not_arrived())} did not arrive within "
                        f"{self._options.arrive_within_s:g} s; look at what they printed last, start one process per "
                        "rank, or raise --distributed-timeout-minutes"
                    )
                time.sleep(pause_s)
                # Thousands of ranks ask one store.
                pause_s = min(1.5 * pause_s, 1.0)
        except dist.DistError as gone:
            raise MembershipError(self._store_is_lost(gone)) from gone

    def close_store(self) -> None:
        """Let the store take no more connections; on rank 0, once all ranks have made theirs and all their groups.

        A stranger who comes later cannot reach it. Whoever serves the store watches for this key.

        Raises:
            MembershipError: the store is lost.
        """
        if self._rank == 0:
            try:
                self._launch_store.set(ALL_CONNECTED, "")
            except dist.DistError as gone:
                raise MembershipError(self._store_is_lost(gone)) from gone

    def tell(self, error: BaseException) -> None:
        """Let the others know why this rank leaves, before the connections to it break. Only the first call counts."""
        if self._main_is_ending.is_set():
            return
        self._main_is_ending.set()
        if isinstance(error, ConsensusError):
            self._say_done()
            return
        lost = _lost_peer_in(error)
        self._store.set(f"{'cause' if lost is None else 'broken'}/{self._rank}", _in_one_line(lost or error))
        self._store.set("failed", "")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """On an error, tell the others, and turn a lost connection into a ``MembershipError`` that names who left."""
        lost_peer = is_lost_peer(error)
        try:
            if error is not None:
                self.tell(error)
            else:
                self._main_is_ending.set()
                self._say_done()
                self._outstay_the_others()
            self._stop.set()
            # It may be calling the roll. In a store that no longer answers it is blocked for ever.
            self._ring.join(self._options.roll_call_s + self._options.beat_s)
            if self._ring.is_alive():
                raise dist.DistStoreError("no answer")
            if lost_peer and not self._report:
                self._call_the_roll()
            if error is not None and not isinstance(error, ConsensusError):
                self._outstay_the_others()
        except dist.DistError as gone:
            self._report = self._store_is_lost(gone)
        finally:
            self._stop.set()
        if lost_peer:
            raise MembershipError(self._report) from error

    def _say_done(self) -> None:
        self._store.set(f"done/{self._rank}", "")
        self._store.add(_DEPARTURES, 1)

    def _outstay_the_others(self) -> None:
        """Who hosts the store takes it along, and ranks that still need it would believe that rank 0 was lost.

        Waits until all have left, or after a failure as long as they need to read the report.
        """
        deadline = time.monotonic() + self._options.lost_after_s
        while self._hosts_store and time.monotonic() < deadline:
            if self._store.add(_DEPARTURES, 0) == self._world_size:
                return
            if self._has("failed"):
                deadline = min(deadline, time.monotonic() + self._options.roll_call_s + self._options.beat_s)
            time.sleep(self._options.beat_s / 10)

    def _monitor_neighbour(self) -> None:
        """Give a sign of life at every beat, and end all ranks when the neighbour has been silent for too long.

        Silence is counted in this rank's own beats: who stood still itself, as on a host that did, cannot judge.
        """
        neighbour = (self._rank + 1) % self._world_size
        last_beat, beats, missed = b"", 0, 0
        while not self._stop.wait(self._options.beat_s):
            try:
                beats += 1
                self._store.set(f"beat/{self._rank}", f"{beats} {self._activity()}")
                # Who has left monitors nobody any more.
                while neighbour != self._rank and self._has(f"done/{neighbour}"):
                    neighbour = (neighbour + 1) % self._world_size
                beat = self._read(f"beat/{neighbour}")
                # Who has not arrived yet has a limit of its own.
                last_beat, missed = beat, 0 if beat != last_beat or not beat else missed + 1
                if missed > self._patience:
                    self._store.set("failed", "")
                if error := self.transport_error():
                    self._store.set(f"broken/{self._rank}", error)
                    self._store.set("failed", "")
                if self._has("failed"):
                    self._call_the_roll()
                    self._end(self._report)
            except dist.DistError as error:
                self._end(self._store_is_lost(error))

    def _monitor_store(self) -> None:
        """End this rank when the store has not answered for too long.

        A store whose host stands still, or whose network is cut, blocks its callers without an error.
        """
        answers, missed = self._answers, 0
        while not self._stop.wait(self._options.beat_s):
            answers, missed = self._answers, 0 if self._answers != answers else missed + 1
            if missed > self._patience:
                self._end(self._store_is_lost(f"no answer for {self._options.lost_after_s:g} s"))

    @property
    def _patience(self) -> float:
        """Beats that may be missed."""
        return self._options.lost_after_s / self._options.beat_s

    def _call_the_roll(self) -> None:
        """Answer, and get the report on who is missing and who gave a reason.

        The first to ask writes it for all: thousands that ask the store about thousands would take minutes.
        """
        self._store.set(f"alive/{self._rank}", to_json(self._position()))
        own = str(self._rank)
        if self._store.compare_set("reporter", "", own) != own.encode():
            deadline = time.monotonic() + self._options.roll_call_s + self._options.beat_s
            while not self._has("report") and time.monotonic() < deadline:
                time.sleep(0.1)
        self._report = self._read_text("report") or self._compiled_report()
        self._store.set("report", self._report)
        self._stood = own in self._read_text("still").split()

    def _compiled_report(self) -> str:
        """Wait for the answers of all, and name those that gave none."""
        deadline = time.monotonic() + self._options.roll_call_s
        absent = list(range(self._world_size))
        while absent and time.monotonic() < deadline:
            time.sleep(0.1)
            absent = [rank for rank in absent if not self._answered(rank)]
        failed = self._errors("cause")
        started = [rank for rank in absent if self._has(f"host/{rank}")]
        if started:
            gone = " and ".join(self.describe(rank) + self._last_words(rank) for rank in started)
            failed.append(f"{gone}, did not answer and must have died; start again without what was lost")
        if expected := [rank for rank in absent if rank not in started]:
            failed.append(f"ranks {number_ranges(expected)} had not arrived yet")
        if not failed:
            broken = self._errors("broken")
            failed = self._standstill(broken) or [*broken, "every rank still answers"]
        return f"{'; '.join(failed)}. Training stopped on all ranks."

    def _standstill(self, broken: Sequence[str]) -> list[str]:
        """Name the ranks that others have waited for in vain, if that is what their errors say."""
        waits = [text for text in broken if _TIMED_OUT.search(text)]
        if not waits:
            return []
        positions = dict(self._positions())
        still = still_ranks(positions)
        self._store.set("still", " ".join(map(str, still)))
        stood = [self._stood_still(rank, positions[rank]) for rank in still[:_MAX_STILL_RANKS]]
        if len(still) > _MAX_STILL_RANKS:
            stood.append(f"{len(still) - _MAX_STILL_RANKS} more ranks stood still")
        if not still:
            stood = ["every rank still answers and waits for others: look at the network between them"]
        return [*stood, waits[0]]

    def _positions(self) -> Iterator[tuple[int, Position]]:
        """Where each rank was that has answered in a way that can be read."""
        for rank in range(self._world_size):
            answer = self._read(f"alive/{rank}").decode(errors="backslashreplace")
            with contextlib.suppress(ConfigError):
                yield rank, from_json(Position, answer, source=f"rank {rank}")

    def _stood_still(self, rank: int, position: Position) -> str:
        return (
            f"{self.describe(rank)} stood still: {printable(position.doing)} for {position.unchanged_s:.0f} s, "
            f"at {printable(position.line)}, and it waits for no other rank; look at its stack in its output, or raise "
            "--distributed-timeout-minutes if it only needs longer"
        )

    def _activity(self) -> str:
        """Return what the main thread does, and note since when."""
        place, count = str(self.progress.place), self.progress.count
        activity = f"{self.doing} ({place})" if place else self.doing
        if (activity, count) != self._seen:
            self._seen, self._seen_at_s = (activity, count), time.monotonic()
        return activity

    def _position(self) -> Position:
        doing = self._activity()
        return Position(
            doing=doing,
            unchanged_s=time.monotonic() - self._seen_at_s,
            waits=self._main_is_ending.is_set() or main_thread_waits() or self.device_is_busy(),
            line=main_thread_line(),
        )

    def _answered(self, rank: int) -> bool:
        return any(self._has(f"{key}/{rank}") for key in ("alive", "done", "cause"))

    def _errors(self, key: str) -> list[str]:
        """List the errors that ranks left under ``key``, each once with all ranks that have it."""
        ranks_with: dict[str, list[str]] = {}
        for rank, error in self._told(key):
            ranks_with.setdefault(error, []).append(self.describe(rank))
        return [f"{' and '.join(ranks)} failed with {error}" for error, ranks in ranks_with.items()]

    def _told(self, key: str) -> list[tuple[int, str]]:
        """What each rank left under ``key``, for those that did."""
        texts = [(rank, self._read_text(f"{key}/{rank}")) for rank in range(self._world_size)]
        return [(rank, text) for rank, text in texts if text]

    def _not_arrived(self) -> list[int]:
        return [rank for rank in range(self._world_size) if not self._has(f"host/{rank}")]

    def _by_host(self, rank: int) -> str:
        host = self._read_text(f"host/{rank}")
        return f"rank {rank} (on {host})" if host else f"rank {rank}"

    def _last_words(self, rank: int) -> str:
        _, _, doing = self._read_text(f"beat/{rank}").partition(" ")
        return f", last heard of while {doing}" if doing else ""

    def _has(self, key: str) -> bool:
        found = bool(self._store.check([key]))
        self._answers += 1
        return found

    def _read(self, key: str) -> bytes:
        return bytes(self._store.get(key)) if self._has(key) else b""

    def _read_text(self, key: str) -> str:
        """Return what is under ``key`` as one line to show: whoever reaches the store may have written it."""
        return printable(self._read(key).decode(errors="backslashreplace"))

    def _store_is_lost(self, why: object) -> str:
        return f"lost the rendezvous store, and with it the other ranks: {why}. Is the host of rank 0 still there?"

    def _end(self, message: str) -> None:
        """End this process from a thread, unless its main thread is just doing so and comes to an end with it."""
        options = self._options
        if self._main_is_ending.wait(options.beat_s) and self._stop.wait(options.roll_call_s + options.beat_s):
            return
        try:
            sys.stderr.write(f"hetero: rank {self._rank}: {message}\n")
            if self._stood:
                sys.stderr.write(f"rank {self._rank} stood still here:\n{main_thread_stack()}")
            sys.stderr.flush()
            sys.stdout.flush()
            if self._before_end is not None:
                self._before_end(MembershipError(message))
            self._outstay_the_others()
        finally:
            os._exit(EXIT_CODE)


def is_lost_peer(error: BaseException | None) -> bool:
    """Say whether ``error`` may be the consequence of another rank's end."""
    return _lost_peer_in(error) is not None


def _lost_peer_in(error: BaseException | None) -> BaseException | None:
    """Return the error in the chain of ``error`` that says that a peer is lost, or a wait for one too long."""
    return next((each for each in _chain(error) if _says_that_a_peer_is_lost(each)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from: megatron-core wraps what happens while it builds a dataset.

    Whoever raised a ``HeteroError`` knew what had happened.
    """
    while error is not None and not isinstance(error, HeteroError):
        yield error
        error = error.__cause__


def _says_that_a_peer_is_lost(error: BaseException) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _GLOO_LOST_PEER.search(str(error)) is not None


def _in_one_line(error: BaseException) -> str:
    """``ValueError: its message``; many are empty, such as an assertion's."""
    message = " ".join(str(error).split())[:_MAX_CHARACTERS]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
