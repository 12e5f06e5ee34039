"""Passes over a schedule: each takes a schedule and returns a new one, or raises."""

from collections.abc import Sequence

from hetero.errors import ScheduleError
from hetero.schedule.actions import COMPUTE, RECEIVE, Action, Kind, Row, Schedule, boundaries, format_schedule

TALKING = COMPUTE - {Kind.W}
"""Computes with a neighbour before or behind them; a W takes and gives nothing."""


def split_backward(schedule: Schedule, *, weight_lag: Sequence[int | None]) -> Schedule:
    """Part the backward of stages with a lag: B computes the input's gradient and W the weights' (zero bubble,
    arXiv 2401.10241).

    ``weight_lag[s]`` is ``None`` where stage ``s`` keeps its backward whole. With lag k, W of microbatch m stands
    behind B of microbatch m + k, so that up to k microbatches wait for their W. Four equal stages with the lags
    0 1 2 3, the paper's ZB-H1, where each action takes one unit of time:

        stage 0:  F0 F1 F2 F3 .  .  .  B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
        stage 1:  .  F0 F1 F2 .  .  B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
        stage 2:  .  .  F0 F1 .  B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
        stage 3:  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

    A later stage, whose last B ends earlier, has more W left to do after it, and all end together. 1F1B idles three
    times as long. When the forwards are over, each B is still followed by one W, though the forward's place is free:
    a second one could hold up the next B, for which the stages before wait, and moves the end only where the lags
    could have been better.

    Raises:
        ScheduleError: there is not one lag per stage, or a lag is negative.
    """
    if len(weight_lag) != len(schedule):
        raise ScheduleError(f"{len(schedule)} stages, but weight_lag has {len(weight_lag)} entries")
    return [row if lag is None else _with_weights(row, lag) for row, lag in zip(schedule, weight_lag, strict=True)]


def _with_weights(row: Row, lag: int) -> Row:
    if lag < 0:
        raise ScheduleError(f"weight_lag is {lag}, must be at least 0: weights' gradients come after the backward")
    out: Row = []
    waiting: Row = []
    for action in row:
        out.append(action)
        if action.kind == Kind.B:
            waiting.append(action._replace(kind=Kind.W))
            if len(waiting) > lag:
                out.append(waiting.pop(0))
    return out + waiting


def add_communication(schedule: Schedule, *, num_microbatches: Sequence[int]) -> Schedule:
    """Post each slice's RECV right before the compute that needs it, start each SEND right after its producer."""
    edges = boundaries(num_microbatches)
    lowered: Schedule = []
    for s, row in enumerate(schedule):
        before = edges[s - 1] if s > 0 else None
        after = edges[s] if s < len(edges) else None
        out: Row = []
        for action in row:
            if action.kind == Kind.W:
                out.append(action)
                continue
            incoming, outgoing = (before, after) if action.kind == Kind.F else (after, before)
            receive, send = (Kind.RECV_F, Kind.SEND_F) if action.kind == Kind.F else (Kind.RECV_B, Kind.SEND_B)
            if incoming is not None:
                slices = incoming.slices_after if incoming is before else incoming.slices_before
                out += [Action(s, receive, i) for i in slices(action.number)]
            out.append(action)
            if outgoing is not None:
                slices = outgoing.slices_after if outgoing is before else outgoing.slices_before
                out += [Action(s, send, i) for i in slices(action.number)]
        lowered.append(out)
    return lowered


def post_receives_early(schedule: Schedule, *, computes_ahead: int) -> Schedule:
    """Move every RECV up past ``computes_ahead`` forwards and backwards, so that the transfer runs beside them.

    Each posted receive holds a buffer of one slice. The order of the receives of one direction stays as it is:
    a transport without tags matches them by order.

    Raises:
        ScheduleError: ``computes_ahead`` is negative: a receive may not be posted after the compute that needs it.
    """
    if computes_ahead < 0:
        raise ScheduleError(f"computes_ahead is {computes_ahead}, must be at least 0")
    return [_hoist_receives(row, computes_ahead) for row in schedule]


def _hoist_receives(row: Row, computes_ahead: int) -> Row:
    num_computes = sum(action.kind in TALKING for action in row)
    receives_before: list[Row] = [[] for _ in range(num_computes + 1)]
    position = 0
    for action in row:
        if action.kind in RECEIVE:
            receives_before[max(0, position - computes_ahead)].append(action)
        position += action.kind in TALKING

    out: Row = []
    position = 0
    for action in row:
        if action.kind in COMPUTE:
            # A W in between does not hold them up.
            out += receives_before[position]
            receives_before[position] = []
            position += action.kind in TALKING
        if action.kind not in RECEIVE:
            out.append(action)
    return out


def check_no_deadlock(schedule: Schedule, *, num_microbatches: Sequence[int]) -> None:
    """Dry-run all stages of a replica; raise with the full table if none can move.

    A SEND completes at once and a RECV only posts, as in the runtime; a compute waits for its slices. On NCCL two
    transfers of one communicator run in issue order, so the runtime gives each direction its own communicator.

    Raises:
        ScheduleError: a stage waits for ever, computes without having posted a receive, or sends what it has not
            computed.
    """
    edges = boundaries(num_microbatches)

    def needs(action: Action) -> set[Action]:
        """What must have run before ``action``: on its own stage, and on the neighbour that it hears from."""
        s, kind, m = action
        if kind == Kind.F and s > 0:
            slices = edges[s - 1].slices_after(m)
            return {Action(s, Kind.RECV_F, i) for i in slices} | {Action(s - 1, Kind.SEND_F, i) for i in slices}
        if kind == Kind.B:
            needed = {Action(s, Kind.F, m)}
            if s < len(edges):
                slices = edges[s].slices_before(m)
                needed |= {Action(s, Kind.RECV_B, i) for i in slices}
                needed |= {Action(s + 1, Kind.SEND_B, i) for i in slices}
            return needed
        if kind == Kind.W:
            return {Action(s, Kind.B, m)}
        if kind == Kind.SEND_F:
            return {Action(s, Kind.F, edges[s].microbatch_before(m))}
        if kind == Kind.SEND_B:
            return {Action(s, Kind.B, edges[s - 1].microbatch_after(m))}
        return set()

    position = [0] * len(schedule)
    done: set[Action] = set()
    while any(p < len(row) for p, row in zip(position, schedule, strict=True)):
        moved = False
        for s, row in enumerate(schedule):
            while position[s] < len(row) and needs(row[position[s]]) <= done:
                done.add(row[position[s]])
                position[s] += 1
                moved = True
        if not moved:
            stuck = [str(row[p]) for p, row in zip(position, schedule, strict=True) if p < len(row)]
            raise ScheduleError(f"deadlock: {', '.join(stuck)} all wait\n{format_schedule(schedule)}")
