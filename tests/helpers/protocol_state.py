"""A state of the explored protocol: nodes, ranks, copies and the store of members, as tuples.

A state of training is the tuple of the epochs in which its steps were done, so that two histories are told apart, and a
step done twice or left out is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.records import NodeInfo
from hetero.elastic.recovery import Restore, choose_step
from tests.helpers.elastic_epochs import node_info

History = tuple[str, ...]
"""The id of the epoch of each step that was done, first to last."""


Stop = Literal["", "plain", "for good"]
"""No stop, one after which another epoch follows, or one after which the ranks save."""


class Held(NamedTuple):
    """A whole unit in a slot of a node. ``epoch`` is the index of its record."""

    epoch: int
    slot: int
    owner: int
    step: int
    history: History
    good: bool


class Rank(NamedTuple):
    """A rank that runs, or that has ended as it should.

    epoch: index of its epoch's record.
    protocol: what its ``CopyProtocol`` knows.
    inbox: the result of an all-reduce that has not arrived yet: votes, and which stop it decided on.
    status: ``run``; ``end`` (makes the last copy), ``save`` (the last step); ``stopped``, ``finished``.
    stop: the one that its ranks have decided on.
    failed: its part of the pending step cannot become whole.
    """

    epoch: int
    step: int
    history: History
    protocol: tuple[Any, ...]
    inbox: tuple[float, Stop] | None
    status: str
    failed: bool = False
    stop: Stop = ""


class Node(NamedTuple):
    """A machine.

    fence: the newest epoch of which it has no ranks and will start none.
    seen: index of the newest epoch that it remembers; ``knows``: that a step may have been committed.
    ended: its agent has ended with a code other than 0, and its user starts it again.
    leaves: it has a notice.
    """

    up: bool
    leased: bool
    incarnation: int
    fence: int
    rank: Rank | None
    held: frozenset[Held]
    seen: int = 0
    knows: bool = False
    ended: bool = False
    leaves: bool = False


class Proposal(NamedTuple):
    """What a leader has decided and not written yet.

    gives_up: the newest committed step, as more is missing than may be.
    """

    leader: int
    after: int
    epoch: int
    gives_up: bool = False


class Shared(NamedTuple):
    """The store of members, what may still happen, and what an onlooker knows: the newest committed step.

    epoch: index of the newest record.
    lost: failure domains lost or damaged since the newest commit; ``tolerated``: how many may be.
    noted: the store knows that a step was committed; ``noted_by``: the epochs that were made since.
    stop: which one the ranks of the newest epoch are asked for.
    saved: the step of the newest checkpoint, 0 for none.
    went_back: the store did, and the agents have not noticed yet.
    refuses: the store takes no writes.
    rewinds, refusals, reopens: how often the store may yet go back or refuse, and a job that was given up start again.
    leaves: how many nodes may yet get a notice.
    """

    epoch: int
    broken: bool
    stop: Stop
    leader: int
    proposals: tuple[Proposal, ...]
    failures: int
    returns: int
    committed_epoch: int
    committed: History
    lost: int
    tolerated: int
    end: str
    noted: bool = False
    noted_by: frozenset[str] = frozenset()
    saved: int = 0
    went_back: bool = False
    refuses: bool = False
    rewinds: int = 0
    refusals: int = 0
    reopens: int = 0
    leaves: int = 0


class State(NamedTuple):
    nodes: tuple[Node, ...]
    shared: Shared


GONE = Node(False, False, 0, 0, None, frozenset())


class Violation(Exception):
    """An invariant does not hold."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The functions that are explored, and what nodes do with them. Mutants change one of these."""

    protocol: type[CopyProtocol] = CopyProtocol
    choose: Callable[..., Restore | None] = choose_step
    compares: bool = True
    verifies: bool = True
    waits_for_keepers: bool = True
    keeps_old_epochs: bool = True
    fences: bool = True
    keeps_copies: bool = True
    saves_again: bool = True
    remembers: bool = True
    tells_apart: bool = True
    numbers_by_nodes: bool = True
    doubts_commits: bool = True
    saves_if_all_leave: bool = True
    stays_until_saved: bool = True


def info(i: int, node: Node) -> NodeInfo:
    return node_info(str(i), str(node.incarnation))
