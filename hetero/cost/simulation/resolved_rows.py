"""Resolves a row of actions to what its lanes do: the seconds of each compute, what it waits for, what is posted.

Nothing of it depends on how long anything takes, so that pipelines which differ in nothing but seconds have their rows
in common.
"""

from collections.abc import Container, Sequence
from itertools import chain
from typing import NamedTuple

from hetero.cost.network import TransferCost
from hetero.schedule.actions import RECEIVE, SEND, Action, ActionKind, Row, StageBoundary

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

    @property
    def nodes_of_lanes(self) -> tuple[object, ...]:
        """All of it that says which node is which slice between which lanes."""
        return self.kind, self.lane, self.receiving_lane, self.phase, self.step, self.first, self.num_slices


SliceNodes = dict[ActionKind, dict[int, dict[int, list[tuple[int, ...]]]]]
"""By what sends or receives them, stage and lane, the nodes of the transfers of each slice."""


def resolve_row(
    num_lanes: int,
    row: Row,
    stages: Container[int],
    edges: Sequence[StageBoundary],
    transfers: Sequence[TransferSeries],
) -> ResolvedRow:
    """What all lanes of ``row`` do.

    Args:
        stages: of the row.
        edges: of all stages of the pipeline.
        transfers: that the row sends and receives; others do not matter.
    """
    slice_nodes = _nodes_of_slices(stages, edges, transfers)
    return ResolvedRow(row, [_resolve(number, row, edges, slice_nodes) for number in range(num_lanes)])


def _nodes_of_slices(
    stages: Container[int], edges: Sequence[StageBoundary], transfers: Sequence[TransferSeries]
) -> SliceNodes:
    found: SliceNodes = {kind: {} for kind in SEND | RECEIVE}
    for series in transfers:
        received = ActionKind.RECV_F if series.kind == ActionKind.SEND_F else ActionKind.RECV_B
        for kind, stage, lane in (
            (series.kind, series.stage, series.lane),
            (received, series.receiver, series.receiving_lane),
        ):
            if stage not in stages:
                continue
            num_slices = edges[min(series.stage, series.receiver)].num_slices
            nodes = found[kind].setdefault(stage, {}).setdefault(lane, [()] * num_slices)
            own = slice(series.phase, num_slices, series.step)
            nodes[own] = [(*before, n) for before, n in zip(nodes[own], series.nodes, strict=True)]
    return found


def _resolve(number: int, row: Row, edges: Sequence[StageBoundary], slice_nodes: SliceNodes) -> ResolvedLane:
    """What the lane of this number computes, what each compute needs, and what the lane posts in between."""
    own = {
        kind: {stage: lanes[number] for stage, lanes in of_stages.items() if number in lanes}
        for kind, of_stages in slice_nodes.items()
    }
    inputs = {
        s: _by_microbatch(slices, edges[s - 1].microbatches_after) for s, slices in own[ActionKind.RECV_F].items()
    }
    gradients = {
        s: _by_microbatch(slices, edges[s].microbatches_before) for s, slices in own[ActionKind.RECV_B].items()
    }
    wanted = {ActionKind.F: inputs, ActionKind.B: gradients, ActionKind.I: gradients}
    first_of = {kind: k * (len(edges) + 1) for k, kind in enumerate(SECONDS_OF)}
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
    if len(slices) == count:
        return list(slices)
    every = iter(slices)
    return [tuple(chain(*each)) for each in zip(*[every] * (len(slices) // count), strict=True)]
