"""Compute orders of a pipeline: GPipe and 1F1B.

1F1B is PipeDream-Flush (arXiv 2104.04473, figure 4), here with any depth per stage:

    stage 0:  F0 F1 F2 | B0 F3 B1 F4 B2 F5 | B3 B4 B5       in_flight = 3
    stage 1:  F0 F1 | B0 F2 B1 F3 B2 F4 B3 F5 | B4 B5       in_flight = 2
    stage 2:  F0 | B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 | B5       in_flight = 1
              warm-up         steady           cool-down

``in_flight[s]`` is how many microbatches stage ``s`` may hold between forward and backward. Equal stages use
``num_stages - s``. A stage that is short of memory gets less; a stage before a slow link gets more, which hides
the link. Too little of it deadlocks: :func:`hetero.schedule.passes.check_no_deadlock` tells. Backwards are whole
here; :func:`hetero.schedule.passes.split_backward` parts them.
"""

from collections.abc import Sequence

from hetero.errors import ScheduleError
from hetero.schedule.actions import Action, Kind, Row, Schedule


def gpipe(*, num_microbatches: Sequence[int]) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965): the least idle time, and every activation kept."""
    return one_f_one_b(num_microbatches=num_microbatches, in_flight=num_microbatches)


def forward_only(*, num_microbatches: Sequence[int]) -> Schedule:
    """Evaluation: every forward and no backward."""
    return [[Action(s, Kind.F, m) for m in range(count)] for s, count in enumerate(num_microbatches)]


def one_f_one_b(*, num_microbatches: Sequence[int], in_flight: Sequence[int]) -> Schedule:
    """Forward and backward actions of every stage, without communication.

    ``num_microbatches[s]`` and ``in_flight[s]`` are counted in stage ``s``'s own microbatches.

    Raises:
        ScheduleError: the two differ in length, or a count is below 1.
    """
    if len(num_microbatches) != len(in_flight):
        raise ScheduleError(f"{len(num_microbatches)} stages, but in_flight has {len(in_flight)} entries")
    for name, counts in (("num_microbatches", num_microbatches), ("in_flight", in_flight)):
        if min(counts) < 1:
            raise ScheduleError(f"{name} must be at least 1 at every stage, got {list(counts)}")
    return [
        _stage_order(stage, count, depth)
        for stage, (count, depth) in enumerate(zip(num_microbatches, in_flight, strict=True))
    ]


def _stage_order(stage: int, num_microbatches: int, in_flight: int) -> Row:
    warm_up = min(in_flight, num_microbatches)
    forwards = [Action(stage, Kind.F, m) for m in range(num_microbatches)]
    backwards = [Action(stage, Kind.B, m) for m in range(num_microbatches)]
    steady = num_microbatches - warm_up

    order = forwards[:warm_up]
    for backward, forward in zip(backwards[:steady], forwards[warm_up:], strict=True):
        order += [backward, forward]
    return order + backwards[steady:]
