"""Transforms schedules, pass by pass: splits backwards, adds communication, posts receives early."""

from collections import defaultdict
from collections.abc import Sequence

from hetero.errors import ScheduleError
from hetero.schedule.actions import (
    BACKWARD,
    COMPUTE,
    RECEIVE,
    ActionKind,
    Row,
    Schedule,
    action_of,
    boundaries,
    received_by,
    sent_by,
)

COMMUNICATING = BACKWARD | {ActionKind.F}
"""Computes that receive from a neighbouring stage or send to one; the others, R and W, do neither."""


def split_backward(schedule: Schedule, *, wgrad_delay: Sequence[int | None]) -> Schedule:
    """Splits the backward of stages with a weight-gradient delay into I, the input's gradient, and W, the weights'.

    This is zero bubble (arXiv 2401.10241, section 2).

    ``wgrad_delay[s]`` is ``None`` where stage ``s`` keeps its backward whole. With delay k, W of microbatch m stands
    behind I of microbatch m + k, so that up to k microbatches wait for their W. Four equal stages with the delays
    0 1 2 3, the paper's ZB-H1, where each action takes one unit of time:

        stage 0:  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        stage 1:  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        stage 2:  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        stage 3:  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    A later stage, whose last I ends earlier, has more W left to do after it, and all end together. 1F1B idles three
    times as long. When the forwards are over, each I is still followed by one W, though the forward's place is free:
    a second one could hold up the next I, for which the stages before wait, and moves the end only where the delays
    could have been better.

    Raises:
        ScheduleError: there is not one delay per stage, or a delay is negative.
    """
    if len(wgrad_delay) != (num_stages := 1 + max(action.stage for row in schedule for action in row)):
        raise ScheduleError(f"{num_stages} stages, but wgrad_delay has {len(wgrad_delay)} entries")
    for delay in wgrad_delay:
        if delay is not None and delay < 0:
            raise ScheduleError(
                f"wgrad_delay is {delay}, must be at least 0: weights' gradients come after the backward"
            )
    return [_with_weights(row, wgrad_delay) for row in schedule]


def _with_weights(row: Row, wgrad_delay: Sequence[int | None]) -> Row:
    out: Row = []
    waiting: Row = []
    for action in row:
        stage, kind, m = action
        delay = wgrad_delay[stage]
        if kind != ActionKind.B or delay is None:
            out.append(action)
            continue
        out.append(action_of(stage, ActionKind.I, m))
        waiting.append(action_of(stage, ActionKind.W, m))
        own = [later for later in waiting if later.stage == action.stage]
        if len(own) > delay:
            out.append(own[0])
            waiting.remove(own[0])
    return out + waiting


def add_communication(schedule: Schedule, *, num_microbatches: Sequence[int]) -> Schedule:
    """Puts the RECV of each slice right before the compute that needs it, and its SEND right behind its producer."""
    edges = boundaries(num_microbatches)
    return [
        [each for action in row for each in (*received_by(action, edges), action, *sent_by(action, edges))]
        for row in schedule
    ]


def post_receives_early(schedule: Schedule, *, computes_ahead: int) -> Schedule:
    """Moves every RECV up past ``computes_ahead`` forwards and backwards, so that the transfer overlaps with them.

    Each posted receive holds a buffer of one slice. The order of the receives of one direction stays as it is:
    a transport without tags matches them by order.

    Raises:
        ScheduleError: ``computes_ahead`` is negative: a receive may not be posted after the compute that needs it.
    """
    if computes_ahead < 0:
        raise ScheduleError(f"computes_ahead is {computes_ahead}, must be at least 0")
    return [_hoist_receives(row, computes_ahead) for row in schedule]


def _hoist_receives(row: Row, computes_ahead: int) -> Row:
    receives_before: defaultdict[int, Row] = defaultdict(list)
    position = 0
    for action in row:
        if action.kind in RECEIVE:
            receives_before[max(0, position - computes_ahead)].append(action)
        elif action.kind in COMMUNICATING:
            position += 1

    out: Row = []
    position = 0
    for action in row:
        kind = action.kind
        if kind in RECEIVE:
            continue
        if kind in COMPUTE:
            # A W in between does not hold them up.
            out += receives_before.pop(position, ())
            position += kind in COMMUNICATING
        out.append(action)
    return out
