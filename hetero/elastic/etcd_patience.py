"""Bounds how long an agent waits for its etcd, and says what is wrong with etcd once, and once that it is over.

While its ranks train, an agent waits without limit: training needs nothing of etcd. An agent that needs etcd, since it
starts, joins, has no ranks or has ranks that are over, ends when the trouble has lasted for ``--wait-for-etcd`` seconds
since the later of two moments: when the trouble began, and when etcd was needed.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from hetero.elastic.ends import End, EndError
from hetero.elastic.events import EventLog
from hetero.elastic.membership import Membership
from hetero.errors import MembershipStoreError

T = TypeVar("T")

_RETRY_S = 0.3
"""Between two tries. The membership asks etcd nothing while it knows that etcd is in trouble."""


class EtcdPatience:
    """What an agent thinks of its etcd.

    Args:
        limit_s: how long it waits for an etcd that it needs.
        show: prints a line.
    """

    def __init__(
        self, membership: Membership, *, limit_s: float, events: EventLog, show: Callable[[str], None]
    ) -> None:
        self._membership = membership
        self._limit_s = self._waits_s = limit_s
        self._events = events
        self._show = show
        self._needed_since_s: float | None = time.monotonic()
        self._has_said_trouble = self._has_said_limit = False

    def need(self, is_needed: bool, *, at_most_s: float = math.inf) -> None:
        """Take note whether the agent needs etcd from now on.

        Args:
            at_most_s: it waits no longer than this, whatever its limit is.
        """
        self._waits_s = min(self._limit_s, at_most_s)
        if not is_needed:
            self._needed_since_s = None
        elif self._needed_since_s is None:
            self._needed_since_s = time.monotonic()

    @property
    def deadline_s(self) -> float | None:
        """When the agent gives up, by ``time.monotonic``; ``None`` while nothing is wrong or etcd is not needed."""
        trouble = self._membership.trouble
        if trouble is None or self._needed_since_s is None:
            return None
        return max(trouble.since_s, self._needed_since_s) + self._waits_s

    def check(self, *, epoch: int = 0) -> None:
        """Say what is wrong with etcd if that is new, and end the wait when it has lasted long enough.

        Raises:
            MembershipStoreError: it has.
            EndError: etcd has older data than it had; waiting does not change that.
            BaseException: what has ended a thread of the membership, which sees nothing any more.
        """
        if self._membership.failure is not None:
            raise self._membership.failure
        if self._membership.went_back is not None:
            raise EndError(End.WENT_BACK, self._membership.went_back)
        trouble, is_needed = self._membership.trouble, self._needed_since_s is not None
        if trouble is None:
            if self._has_said_trouble:
                self._has_said_trouble = self._has_said_limit = False
                self._events.note("etcd_back", epoch=epoch)
                self._show("hetero: etcd is back")
            return
        limit = f"it is asked again for {self._waits_s:g} s (--wait-for-etcd)"
        if not self._has_said_trouble:
            self._events.note("etcd_away", epoch=epoch, detail=trouble.problem)
            consequence = limit if is_needed else "training goes on, but nothing can be changed"
            self._show(f"hetero: {trouble.problem}; {consequence}")
        elif is_needed and not self._has_said_limit:
            self._show(f"hetero: etcd is needed now; {limit}")
        self._has_said_trouble, self._has_said_limit = True, self._has_said_limit or is_needed
        if (deadline_s := self.deadline_s) is not None and time.monotonic() >= deadline_s:
            raise self._gave_up(trouble.problem)

    async def insist(self, request: Callable[[], T]) -> T:
        """Make a request in a thread, again and again while it fails.

        An etcd that does some requests and fails this one, as with a disk that is too slow, is no better than one that
        fails all of them.

        Raises:
            MembershipStoreError: etcd was needed, and the wait for it is over.
            EndError: etcd has older data than it had.
        """
        failed_s = math.inf
        while True:
            try:
                return await asyncio.to_thread(request)
            except MembershipStoreError as error:
                self.check()
                failed_s = min(failed_s, time.monotonic())
                needed_s = math.inf if self._needed_since_s is None else self._needed_since_s
                if time.monotonic() >= max(failed_s, needed_s) + self._waits_s:
                    raise self._gave_up(str(error)) from None
                await asyncio.sleep(_RETRY_S)

    def _gave_up(self, problem: str) -> MembershipStoreError:
        return MembershipStoreError(f"{problem}; waited for {self._waits_s:g} s (--wait-for-etcd)")
