"""The action lists of DeepSpeed's pipeline engine, to hold the model against runs of it that others measured.

Its ``TrainSchedule`` is 1F1B in lock step: in every slot a stage first exchanges with one neighbour and then computes.
A forward's output leaves only in the next slot of the same stage, and every exchange blocks both sides.
"""

from hetero.schedule.actions import Action, Kind, Row, Schedule


def lock_step(*, num_stages: int, num_microbatches: int) -> Schedule:
    """Rows of ``num_stages`` stages that all count ``num_microbatches``, with communication."""
    return [_row(stage, num_stages, num_microbatches) for stage in range(num_stages)]


def _row(stage: int, num_stages: int, num_microbatches: int) -> Row:
    row: Row = []
    previous = -1
    for slot in range(2 * (num_microbatches + num_stages - 1)):
        is_forward = slot % 2 == stage % 2
        number = _forward_number(slot, stage) if is_forward else _backward_number(slot, stage, num_stages)
        has_number, has_previous = 0 <= number < num_microbatches, 0 <= previous < num_microbatches
        if is_forward and stage > 0:
            row += [Action(stage, Kind.RECV_F, number)] * has_number
            row += [Action(stage, Kind.SEND_B, previous)] * has_previous
        if not is_forward and stage + 1 < num_stages:
            row += [Action(stage, Kind.SEND_F, previous)] * has_previous
            row += [Action(stage, Kind.RECV_B, number)] * has_number
        if has_number:
            row.append(Action(stage, Kind.F if is_forward else Kind.B, number))
        previous = number
    return row


def _forward_number(slot: int, stage: int) -> int:
    return (slot - stage) // 2


def _backward_number(slot: int, stage: int, num_stages: int) -> int:
    """The last stage turns round at once; each stage before it one slot later."""
    return (slot + stage + 1) // 2 - num_stages
