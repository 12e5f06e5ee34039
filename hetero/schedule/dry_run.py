"""Runs a schedule without tensors or time, to check that it does not deadlock on the transport that it will meet."""

from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum

from hetero.errors import ScheduleError
from hetero.schedule.actions import (
    BACKWARD,
    RECEIVE,
    SEND,
    Action,
    ActionKind,
    Schedule,
    boundaries,
    format_schedule,
    received_by,
    sent_by,
)


class Transport(StrEnum):
    """How sends and receives of a communication library behave, as far as a deadlock depends on it.

    BUFFERED: a SEND is over at once and a RECV only posts; slices are told apart by number (gloo).
    IN_ORDER: as well, but one direction of a boundary matches the n-th SEND with the n-th RECV (NCCL's communicators).
    FIRST_CONTACT: as in order, and the first transfer of each direction holds its host up until the other side has come
        to it too (NCCL connects two peers inside their first call). Start-up connects them, so that no step has one:
        programs are made for IN_ORDER, and most of them stand still under this.
    ONE_QUEUE: as in order, and all that a device does goes through one queue, in which a transfer holds up what is
        behind it until the transfer before it of its direction is over (``CUDA_DEVICE_MAX_CONNECTIONS=1``).
    """

    BUFFERED = "buffered"
    IN_ORDER = "in order"
    FIRST_CONTACT = "first contact"
    ONE_QUEUE = "one queue"


def check_no_deadlock(
    schedule: Schedule, *, num_microbatches: Sequence[int], transport: Transport = Transport.IN_ORDER
) -> None:
    """Runs all device groups of a replica, and raises with the full schedule if none of them can go on.

    A compute waits for its slices, and a SEND follows the compute whose result it is.

    Raises:
        ScheduleError: a group waits for ever, computes without having posted a receive, sends what it has not computed,
            or the two sides of a boundary do not agree on the order of its slices.
    """
    run = _Run(schedule, num_microbatches, transport)
    while run.is_unfinished():
        if not run.moves():
            stuck = ", ".join(map(str, run.next_actions()))
            raise ScheduleError(f"deadlock ({transport} transfers): {stuck} all wait\n{format_schedule(schedule)}")


class _Run:
    def __init__(self, schedule: Schedule, num_microbatches: Sequence[int], transport: Transport) -> None:
        self._schedule = schedule
        self._edges = boundaries(num_microbatches)
        self._transport = transport
        self._position = [0] * len(schedule)
        self._done: set[Action] = set()
        self._recomputed = {(s, m) for row in schedule for s, kind, m in row if kind == ActionKind.R}
        self._producer = {send: action for row in schedule for action in row for send in sent_by(action, self._edges)}
        # By stage and kind of transfer: the place of each slice in the order in which they were issued.
        self._issue_order: dict[tuple[int, ActionKind], dict[int, int]] = defaultdict(dict)
        self._at_first_contact: set[Action] = set()

    def is_unfinished(self) -> bool:
        return any(p < len(row) for p, row in zip(self._position, self._schedule, strict=True))

    def next_actions(self) -> list[Action]:
        """What each group that is not done would run next."""
        return [row[p] for p, row in zip(self._position, self._schedule, strict=True) if p < len(row)]

    def moves(self) -> bool:
        """Let every group run as far as it can; whether one did."""
        moved = False
        for g, row in enumerate(self._schedule):
            while self._position[g] < len(row) and self._can_run(row[self._position[g]]):
                self._run(row[self._position[g]])
                self._position[g] += 1
                moved = True
        return moved

    def _run(self, action: Action) -> None:
        self._done.add(action)
        if action.kind in SEND | RECEIVE:
            issued = self._issue_order[action.stage, action.kind]
            issued[action.number] = len(issued)

    def _can_run(self, action: Action) -> bool:
        if not self._needed(action) <= self._done:
            return False
        if action.kind in SEND | RECEIVE:
            return self._may_begin(action)
        return all(self._has_arrived(each) for each in received_by(action, self._edges))

    def _needed(self, action: Action) -> set[Action]:
        """What the group itself must have run before."""
        s, kind, m = action
        if action in self._producer:
            return {self._producer[action]}
        if kind in BACKWARD:
            return {Action(s, ActionKind.F, m)} | (
                {Action(s, ActionKind.R, m)} if (s, m) in self._recomputed else set()
            )
        if kind == ActionKind.R:
            return {Action(s, ActionKind.F, m)}
        return {Action(s, ActionKind.I, m)} if kind == ActionKind.W else set()

    def _has_arrived(self, receive: Action) -> bool:
        send = _other_side(receive)
        if receive not in self._done or send not in self._done:
            return False
        if self._transport == Transport.BUFFERED:
            return True
        received, sent = self._issue_order[receive.stage, receive.kind], self._issue_order[send.stage, send.kind]
        if sent[send.number] != received[receive.number]:
            raise ScheduleError(f"{send} and {receive} are not the same transfer of their direction, counted from 0")
        return True

    def _may_begin(self, transfer: Action) -> bool:
        """Whether the transport lets the host, or the device's queue, go on behind ``transfer``."""
        if self._transport == Transport.FIRST_CONTACT:
            return self._meets(transfer)
        if self._transport == Transport.ONE_QUEUE:
            issued = self._issue_order[transfer.stage, transfer.kind]
            return not issued or _other_side(transfer._replace(number=next(reversed(issued)))) in self._done
        return True

    def _meets(self, action: Action) -> bool:
        """Whether a transfer need not wait for the other side to come to its first one."""
        if self._issue_order[action.stage, action.kind]:
            return True
        other = _other_side(action)
        self._at_first_contact.add(Action(action.stage, action.kind, 0))
        return Action(other.stage, other.kind, 0) in self._at_first_contact


_OTHER = {ActionKind.SEND_F: (1, ActionKind.RECV_F), ActionKind.RECV_F: (-1, ActionKind.SEND_F)}
_OTHER |= {ActionKind.SEND_B: (-1, ActionKind.RECV_B), ActionKind.RECV_B: (1, ActionKind.SEND_B)}


def _other_side(transfer: Action) -> Action:
    """The RECV of a SEND, and the SEND of a RECV."""
    distance, kind = _OTHER[transfer.kind]
    return Action(transfer.stage + distance, kind, transfer.number)
