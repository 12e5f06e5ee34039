"""Follows how an etcd does: whether it answers reads, takes writes, and still has what it had.

All requests of one agent go by it, whichever thread makes them: while reads fail, only the thread that reads asks;
while writes fail, only one that tries. So no etcd that is away, and no proxy in front of it, is flooded.
"""

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.elastic.etcd_errors import is_lease_missing
from hetero.elastic.job_store import JobState
from hetero.errors import MembershipStoreError, StoreRefusalError

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 2.0
"""Between two tries of a thread, which double from the first pause to the longest. With signs of life for a lease of
3 s, four of them in that time, an etcd that is away is asked 1.8 times a second; when it is back, the next sign of life
notices that."""


_SIGNS_PER_LEASE = 4
"""So two or three may be lost on the way."""
_SIGNS_TO_SLOW_STORE = 8
"""Per lease, for some leases after the answer to one took half of a lease: while etcd commits to a slow disk it renews
nothing, so the lease has to be new when that begins. With 1.3 s for an fsync that is 2.6 s of a lease of 3 s."""
_SLOW_FOR_LEASES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What keeps this node from reading or changing anything in etcd.

    since_s: when it began, by ``time.monotonic``.
    problem: for people, with etcd's own words.
    takes_no_writes: etcd answers reads; only changes fail.
    """

    since_s: float
    problem: str
    takes_no_writes: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    """A request that failed.

    since_s: when the first one of those in a row did.
    took_s: from the request to its failure.
    """

    since_s: float
    error: MembershipStoreError
    took_s: float


class Pauses:
    """Pauses between tries that fail, each twice as long as the one before, up to a limit."""

    def __init__(self) -> None:
        self.seconds = _FIRST_PAUSE_S

    def grow(self) -> None:
        """Wait longer the next time."""
        self.seconds = min(2 * self.seconds, _LONGEST_PAUSE_S)

    def reset(self) -> None:
        """Wait for the shortest time again."""
        self.seconds = _FIRST_PAUSE_S


class LeasePace:
    """How often a lease is renewed. Times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self._slow_until_s = -math.inf

    def pause_s(self, lease_s: float, asked_s: float, *, answers_reads: bool) -> float:
        """Return the seconds from the sign of life at ``asked_s`` to the next one.

        Args:
            answers_reads: etcd is not away. If it is, more signs of life would only add to its requests.
        """
        is_slow = answers_reads and asked_s < self._slow_until_s
        return lease_s / (_SIGNS_TO_SLOW_STORE if is_slow else _SIGNS_PER_LEASE)

    def note_answer(self, lease_s: float, asked_s: float, *, took_s: float) -> None:
        """Note how long the answer to the sign of life at ``asked_s`` took."""
        if took_s > lease_s / 2:
            self._slow_until_s = asked_s + _SLOW_FOR_LEASES * lease_s


class StoreHealth:
    """What the requests of one agent have shown of its etcd.

    Args:
        where: names the etcd, for people.

    Attributes:
        answers_reads: set as long as the last read was answered.
        fails_writes: set as long as the last write was not done.
        went_back: how one sees that etcd has lost what it had, for people; stays once it is set.
    """

    def __init__(self, where: str) -> None:
        self.answers_reads = threading.Event()
        self.fails_writes = threading.Event()
        self.went_back: str | None = None
        self._where = where
        self._read_failure: _Failure | None = None
        self._write_failure: _Failure | None = None
        self._read_s = -math.inf
        self._newest_revision = 0
        self._lock = threading.Lock()

    @property
    def newest_revision(self) -> int:
        """The highest revision of the store that any answer had."""
        return self._newest_revision

    @property
    def trouble(self) -> Trouble | None:
        """Trouble that is not over, since its first sign; ``None`` if there is none."""
        reads, writes = self._read_failure, self._write_failure
        failures = [failure for failure in (reads, writes) if failure is not None]
        if not failures:
            return None
        # A write may be the first to find that etcd is away: a read that was made since has shown that it is not.
        takes_no_writes = reads is None and (
            isinstance(failures[0].error, StoreRefusalError) or self._read_s > failures[0].since_s
        )
        problem = str(failures[0].error)
        if takes_no_writes and not isinstance(failures[0].error, StoreRefusalError):
            problem = f"{self._where} answers reads, but no write in time; see whether its disk is slow or full"
        since_s = min(failure.since_s for failure in failures)
        return Trouble(since_s=since_s, problem=problem, takes_no_writes=takes_no_writes)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Note whether a read, made within this context, is answered."""
        began_s = time.monotonic()
        try:
            yield
        except MembershipStoreError as error:
            self._read_failure = _failed(self._read_failure, error, began_s)
            self.answers_reads.clear()
            raise
        self._read_failure, self._read_s = None, began_s
        self.answers_reads.set()

    @contextlib.contextmanager
    def writing(self, *, is_try: bool = False) -> Iterator[None]:
        """Note whether a write, made within this context, is done.

        Args:
            is_try: it is made to see whether writes work again.

        Raises:
            MembershipStoreError: reads or writes fail, which is known already: nothing was asked.
        """
        known, began_s = self._read_failure, time.monotonic()
        # One that has waited in vain, as for a slow disk, has paused enough, and the next one may be done in time.
        if known is None and not is_try and self._write_failure is not None:
            known = self._write_failure if self._write_failure.took_s < _LONGEST_PAUSE_S else None
        if self.went_back is not None:
            raise MembershipStoreError(self.went_back)
        if known is not None:
            raise type(known.error)(str(known.error))
        try:
            yield
        except MembershipStoreError as error:
            if is_lease_missing(error):
                # That is this node's trouble, and not etcd's.
                raise
            self._write_failure = _failed(self._write_failure, error, began_s)
            self.fails_writes.set()
            raise
        self._write_failure = None
        self.fails_writes.clear()

    def check_revision(self, revision: int, *, seen: int) -> None:
        """Check the revision of an answer against ``newest_revision`` as it was before the request was sent."""
        if revision < seen:
            self._note_rewind(f"its revision is {revision}, and was {seen} before")
        with self._lock:
            self._newest_revision = max(self._newest_revision, revision)

    def check_epoch(self, state: JobState, *, known: JobState) -> None:
        """Check the epoch of what was read against what was known before the request was sent.

        Of a job with another token nothing is known, and an epoch that cannot be read says nothing.
        """
        if known.epoch is None or state.token != known.token or "epoch" in state.unreadable:
            return
        number = 0 if state.epoch is None else state.epoch.number
        if number < known.epoch.number:
            self._note_rewind(f"it has epoch {number or 'none'}, and had epoch {known.epoch.number} before")
        elif number == known.epoch.number and state.epoch != known.epoch:
            self._note_rewind(f"it has another epoch {number} than before")

    def _note_rewind(self, sign: str) -> None:
        if self.went_back is None:
            self.went_back = (
                f"{self._where} went back to an earlier state: {sign}; most likely it was restored from a snapshot, or "
                "started on a copy of its data"
            )


def _failed(before: _Failure | None, error: MembershipStoreError, began_s: float) -> _Failure:
    now_s = time.monotonic()
    return _Failure(now_s if before is None else before.since_s, error, now_s - began_s)
