"""Handles the notice of a node, by whichever way it comes: a signal, a metadata server, ``hetero elastic leave``."""

import asyncio
from collections.abc import Callable

from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.ends import AgentEnd, End, end_of
from hetero.elastic.events import EventLog
from hetero.elastic.job_reports import stopped_everywhere
from hetero.elastic.job_store import JobState
from hetero.elastic.membership import Membership
from hetero.elastic.records import Notice


class Leaving:
    """The notice of this node, and what becomes of it.

    Args:
        show: prints a line.
        end_at_once: ends the agent, whatever it is doing.

    Attributes:
        notice: that this node has, ``None`` without one.
    """

    def __init__(
        self,
        options: AgentOptions,
        membership: Membership,
        *,
        events: EventLog,
        show: Callable[[str], None],
        end_at_once: Callable[[AgentEnd], None],
    ) -> None:
        self.notice: Notice | None = None
        self._options = options
        self._membership = membership
        self._events = events
        self._show = show
        self._end_at_once = end_at_once

    def begin(self, reason: str, seconds: float | None) -> bool:
        """Give this node a notice for the others to see; returns whether it had none.

        Args:
            seconds: until the node is gone in any case.
        """
        if self.notice is not None:
            return False
        self._take(Notice(node=self._options.name, reason=reason, seconds=seconds))
        return True

    def put(self) -> None:
        """Write the notice into etcd.

        Raises:
            MembershipStoreError: etcd takes no writes.
        """
        assert self.notice is not None, "begin first"
        self._membership.put_notice(self.notice)

    async def end_if_due(self, state: JobState, *, is_over_here: bool, saves: bool) -> AgentEnd | None:
        """Return the end of this agent once the others do not need it any more: its copies are theirs.

        Args:
            is_over_here: this node has no ranks of the newest epoch any more.
            saves: the job has a folder for checkpoints. If all nodes leave, its leader has the last step saved there
                before it ends the job.

        Raises:
            MembershipStoreError: etcd takes no writes.
        """
        name = self._options.name
        if self.notice is None:
            if (notice := state.notices.get(name)) is not None:
                self._take(notice)
            return None
        if not is_over_here:
            return None
        if state.goes_on_without(name):
            end = end_of(End.LEFT, f"node {name} has left: {self.notice.reason}")
        elif not state.stays_without(name) and stopped_everywhere(state) and not (saves and state.epoch is not None):
            end = end_of(End.LEFT_LAST, f"node {name} has left, and no node stays: {self.notice.reason}")
        else:
            return None
        await asyncio.to_thread(self._membership.withdraw_notice, name)
        return end

    def _take(self, notice: Notice) -> None:
        self.notice = notice
        epoch = self._membership.state.epoch
        self._events.note("notice", epoch=0 if epoch is None else epoch.number, detail=notice.reason)
        self._show(f"hetero: node {self._options.name} leaves: {notice.reason}")
        if notice.seconds is not None:
            asyncio.get_running_loop().call_later(notice.seconds, self._end_too_late)

    def _end_too_late(self) -> None:
        reason = f"node {self._options.name}: its time was over before the job had gone on without it"
        self._end_at_once(end_of(End.LEFT_TOO_LATE, reason))
