"""Resolves a row of actions to what its lanes do: the seconds of each compute, what it waits for, what is posted.

Nothing of it depends on how long anything takes, so that pipelines which differ in nothing but seconds have their rows
in common.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from hetero.cost.network import TransferCost
from hetero.schedule.actions import Action, ActionKind, Row, StageBoundary

SECONDS_OF = (ActionKind.F, ActionKind.R, ActionKind.B, ActionKind.I, ActionKind.W)
"""The kinds of computes, in the order in which their seconds are listed."""


class ResolvedLane(NamedTuple):
    """What a lane does, see :class:`~.engine.Lane`.

    durations: per compute, which of the seconds of all stages it takes: kind by kind, as :data:`SECONDS_OF`.
    """

    computes: Sequence[Action]
    durations: Sequence[int]
    needs: Sequence[tuple[int, ...]]
    posts: Sequence[tuple[int, ...]]


class ResolvedRow(NamedTuple):
    """The lanes of a row, resolved, with the row that they come from."""

    row: Row
    lanes: Sequence[ResolvedLane]


class Takes(NamedTuple):
    """What a transfer takes.

    wires: which it waits for.
    uses: the same, with the seconds for which each is taken.
    seconds: of the transfer.
    """

    wires: tuple[int, ...]
    uses: tuple[tuple[int, float], ...]
    seconds: float

    @classmethod
    def of(cls, wires: Sequence[int], busy_s: Sequence[float], seconds: float) -> "Takes":
        return cls(tuple(wires), tuple(zip(wires, busy_s, strict=True)), seconds)


class TransferSeries(NamedTuple):
    """The transfers of one cost from one lane to another: every ``step``-th slice of a boundary, from ``phase`` on.

    lane, receiving_lane: the sender's and the receiver's.
    first: the node of the first of them, the others follow.
    takes: which wires, and for how long.
    """

    replica: int
    stage: int
    receiver: int
    kind: ActionKind
    lane: int
    receiving_lane: int
    phase: int
    step: int
    first: int
    num_slices: int
    cost: TransferCost
    takes: Takes

    @property
    def nodes(self) -> range:
        return range(self.first, self.first + self.num_slices)


SliceNodes = dict[int, list[tuple[int, ...]]]
"""By lane, the nodes of the transfers of each slice that it sends, or those that it receives."""


def nodes_of_slices(
    edges: Sequence[StageBoundary], transfers: Sequence[TransferSeries]
) -> Mapping[ActionKind, Mapping[int, SliceNodes]]:
    """The nodes of all transfers of a pipeline, by what sends or receives them and by stage."""
    slice_nodes: dict[ActionKind, dict[int, SliceNodes]] = {
        ActionKind.SEND_F: {},
        ActionKind.RECV_F: {},
        ActionKind.SEND_B: {},
        ActionKind.RECV_B: {},
    }
    for series in transfers:
        received = ActionKind.RECV_F if series.kind == ActionKind.SEND_F else ActionKind.RECV_B
        for kind, stage, lane in (
            (series.kind, series.stage, series.lane),
            (received, series.receiver, series.receiving_lane),
        ):
            num_slices = edges[min(series.stage, series.receiver)].num_slices
            nodes = slice_nodes[kind].setdefault(stage, {}).setdefault(lane, [()] * num_slices)
            for n, number in zip(series.nodes, range(series.phase, num_slices, series.step), strict=True):
                nodes[number] += (n,)
    return slice_nodes


def resolve_row(
    num_lanes: int,
    row: Row,
    counts: Sequence[int],
    slice_nodes: Callable[[], Mapping[ActionKind, Mapping[int, SliceNodes]]],
) -> ResolvedRow:
    """What all lanes of ``row`` do.

    Args:
        counts: microbatches of each stage.
        slice_nodes: asked once anything is missing, as :func:`nodes_of_slices` makes it.
    """
    return ResolvedRow(row, [_resolve(number, row, counts, slice_nodes()) for number in range(num_lanes)])


def _resolve(
    number: int, row: Row, counts: Sequence[int], slice_nodes: Mapping[ActionKind, Mapping[int, SliceNodes]]
) -> ResolvedLane:
    """What the lane of this number computes, what each compute needs, and what the lane posts in between."""
    own = {
        kind: {stage: lanes[number] for stage, lanes in of_stages.items() if number in lanes}
        for kind, of_stages in slice_nodes.items()
    }
    stages = {action.stage for action in row}
    inputs, gradients = (
        {s: _by_microbatch(slices, counts[s]) for s, slices in own[kind].items() if s in stages}
        for kind in (ActionKind.RECV_F, ActionKind.RECV_B)
    )
    wanted = {ActionKind.F: inputs, ActionKind.B: gradients, ActionKind.I: gradients}
    first_of = {kind: k * len(counts) for k, kind in enumerate(SECONDS_OF)}
    computes: list[Action] = []
    durations: list[int] = []
    needs: list[tuple[int, ...]] = []
    posts: list[tuple[int, ...]] = []
    between: list[int] = []
    for action in row:
        stage, kind, index = action
        if kind in own:
            of_stage = own[kind].get(stage)
            if of_stage is not None:
                between += of_stage[index]
            continue
        posts.append(tuple(between))
        between = []
        needed = wanted[kind].get(stage) if kind in wanted else None
        computes.append(action)
        durations.append(first_of[kind] + stage)
        needs.append(needed[index] if needed is not None else ())
    posts.append(tuple(between))
    return ResolvedLane(computes, durations, needs, posts)


def _by_microbatch(slices: Sequence[tuple[int, ...]], count: int) -> list[tuple[int, ...]]:
    """The transfers of each of ``count`` microbatches."""
    per = len(slices) // count
    return [tuple(chain.from_iterable(slices[m * per : (m + 1) * per])) for m in range(count)]
