"""A state of the explored protocol: nodes, ranks, copies and the store of members, as tuples.

A state of training is the tuple of the epochs in which its steps were done, so that two histories are told apart, and a
step done twice or left out is seen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.records import NodeInfo
from hetero.elastic.recovery import Restore, choose_step
from tests.helpers.elastic_epochs import node_info

History = tuple[int, ...]
"""The epoch of each step that was done, first to last."""


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
    inbox: the result of an all-reduce that has not arrived yet: votes, and whether to stop.
    failed: its part of the pending step cannot become whole.
    """

    epoch: int
    step: int
    history: History
    protocol: tuple[Any, ...]
    inbox: tuple[float, bool] | None
    status: str
    failed: bool = False


class Node(NamedTuple):
    """A machine. ``fence``: the newest epoch of which it has no ranks and will start none."""

    up: bool
    leased: bool
    incarnation: int
    fence: int
    rank: Rank | None
    held: frozenset[Held]


class Proposal(NamedTuple):
    """What a leader has decided and not written yet."""

    leader: int
    after: int
    epoch: int


class Shared(NamedTuple):
    """The store of members, what may still happen, and what an onlooker knows: the newest committed step.

    epoch: index of the newest record.
    lost: failure domains lost or damaged since the newest commit; ``tolerated``: how many may be.
    """

    epoch: int
    broken: bool
    stop: bool
    leader: int
    proposals: tuple[Proposal, ...]
    failures: int
    returns: int
    committed_epoch: int
    committed: History
    lost: int
    tolerated: int
    end: str


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


def info(i: int, node: Node) -> NodeInfo:
    return node_info(str(i), str(node.incarnation))
