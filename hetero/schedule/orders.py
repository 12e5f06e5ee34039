"""Orders the forwards and backwards of a pipeline: 1F1B, interleaved 1F1B, GPipe, and evaluation.

1F1B is PipeDream-Flush (arXiv 2104.04473, figure 4), here with any depth per stage:

    stage 0:  F0 F1 F2 | B0 F3 B1 F4 B2 F5 | B3 B4 B5       in_flight = 3
    stage 1:  F0 F1 | B0 F2 B1 F3 B2 F4 B3 F5 | B4 B5       in_flight = 2
    stage 2:  F0 | B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 | B5       in_flight = 1
              warm-up         steady           cool-down

``in_flight[s]`` is how many microbatches stage ``s`` may hold between forward and backward. Equal stages use
``num_stages - s``. A stage that is short of memory gets less; a stage before a slow link gets more, which hides
the link. Too little of it deadlocks: :func:`hetero.schedule.dry_run.check_no_deadlock` tells. Backwards are whole
here; :func:`hetero.schedule.passes.split_backward` parts them.

Ranks that hold several stages of a pipeline interleave them (section 2.2 of the same paper): with p device groups, p
microbatches go through the first stage of each, then the same p through the second, and so on; backwards likewise from
the last stage on. The fill of the pipeline is as many times shorter as a group has stages. The depths of a group's
stages add up: that many forwards, of whichever of its stages the order has, come before its first backward. Two groups
of two stages and the depths 3 2 and 2 1:

    stages 0 2:  0F0 0F1 2F0 2F1 0F2 | 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 ...
    stages 1 3:  1F0 1F1 3F0 | 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 ...
"""

from collections.abc import Callable, Mapping, Sequence

from hetero.errors import ScheduleError
from hetero.schedule.actions import ActionKind, Row, Schedule, actions_of

Groups = Sequence[Sequence[int]]
"""The stages of each device group, in ascending order; groups in the order of their first stages."""


def one_f_one_b(*, num_microbatches: Sequence[int], in_flight: Sequence[int], groups: Groups | None = None) -> Schedule:
    """1F1B with any depth per stage, interleaved where a device group has several stages; without communication.

    ``num_microbatches[s]`` and ``in_flight[s]`` are counted in stage ``s``'s own microbatches. Without ``groups`` every
    stage is one of its own.

    Raises:
        ScheduleError: the counts differ in length, or one is below 1.
    """
    groups = _checked(num_microbatches, in_flight, groups)
    fewest = min(num_microbatches)
    rows = []
    for stages in groups:
        count = num_microbatches[stages[0]]
        # A round has as many samples as p of the largest microbatches.
        in_round = max(1, len(groups) * count // fewest) if len(stages) > 1 else count
        forwards = _in_rounds(ActionKind.F, stages, count, in_round)
        backwards = _in_rounds(ActionKind.B, stages[::-1], count, in_round)
        rows.append(_alternating(forwards, backwards, warm_up=sum(in_flight[s] for s in stages)))
    return rows


def gpipe(
    *, num_microbatches: Sequence[int], in_flight: Sequence[int] | None = None, groups: Groups | None = None
) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965): the least idle time, and every activation kept.

    Raises:
        ScheduleError: as :func:`one_f_one_b`.
    """
    return one_f_one_b(num_microbatches=num_microbatches, in_flight=num_microbatches, groups=groups)


BY_DEPTHS = "1f1b"
"""The default order of a plan, and the only one in which stages hold as many microbatches as ``in_flight`` says."""

ORDERS: Mapping[str, Callable[..., Schedule]] = {BY_DEPTHS: one_f_one_b, "gpipe": gpipe}
"""The orders that a replica of a plan may name as its ``schedule``. Each takes what :func:`one_f_one_b` takes."""


def forward_only(*, num_microbatches: Sequence[int], groups: Groups | None = None) -> Schedule:
    """The order of an evaluation: every forward as in :func:`one_f_one_b`, and no backward."""
    whole = one_f_one_b(num_microbatches=num_microbatches, in_flight=num_microbatches, groups=groups)
    return [[action for action in row if action.kind == ActionKind.F] for row in whole]


def _checked(num_microbatches: Sequence[int], in_flight: Sequence[int], groups: Groups | None) -> Groups:
    if len(num_microbatches) != len(in_flight):
        raise ScheduleError(f"{len(num_microbatches)} stages, but in_flight has {len(in_flight)} entries")
    for name, counts in (("num_microbatches", num_microbatches), ("in_flight", in_flight)):
        if min(counts) < 1:
            raise ScheduleError(f"{name} must be at least 1 at every stage, got {list(counts)}")
    for stages in groups or ():
        if len(unlike := {num_microbatches[s] for s in stages}) > 1:
            raise ScheduleError(f"stages {list(stages)} of one device group count {sorted(unlike)} microbatches")
    return groups or [[s] for s in range(len(num_microbatches))]


def _in_rounds(kind: ActionKind, stages: Sequence[int], num_microbatches: int, in_round: int) -> Row:
    """``in_round`` microbatches through one stage after the other, then the next ones."""
    return [
        action
        for first in range(0, num_microbatches, in_round)
        for stage in stages
        for action in actions_of(stage, kind, range(first, min(first + in_round, num_microbatches)))
    ]


def _alternating(forwards: Row, backwards: Row, *, warm_up: int) -> Row:
    """``warm_up`` forwards, then a backward and a forward in turn, then the rest of the backwards."""
    warm_up = min(warm_up, len(forwards))
    steady = len(forwards) - warm_up
    order = forwards[:warm_up]
    for backward, forward in zip(backwards[:steady], forwards[warm_up:], strict=True):
        order += [backward, forward]
    return order + backwards[steady:]
