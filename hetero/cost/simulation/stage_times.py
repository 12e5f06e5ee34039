"""Where the seconds of a step go on the ranks of one stage: computing, bubble, exposed sums, update, waiting."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hetero.plan.ir import StageKey


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a step of the ranks of one stage. Busy, bubble, sync, update and rest add up to the step.

    They are means over the ranks. Ranks that hold several stages share their times among all of them, so each of these
    stages shows the same.

    busy_s: forwards and backwards.
    bubble_s: waiting before the end of the last backward, for neighbours, for their transfers or for weights.
    sync_s: from there until its last gradient is summed and the update may start.
    update_s: the update.
    rest_s: waiting for others after that.
    exposed_s: the part of the bubble in which what was waited for was on the wire from a neighbour.
    """

    busy_s: float
    bubble_s: float
    sync_s: float
    update_s: float
    rest_s: float
    exposed_s: float


class LazyStageTimes(Mapping[StageKey, StageTimes]):
    """The times of all stages, counted when they are looked at: a planner asks most simulations for their step
    alone."""

    def __init__(self, count: Callable[[], Mapping[StageKey, StageTimes]]) -> None:
        self._count = count

    @cached_property
    def _every(self) -> Mapping[StageKey, StageTimes]:
        return self._count()

    def __getitem__(self, key: StageKey) -> StageTimes:
        return self._every[key]

    def __iter__(self) -> Iterator[StageKey]:
        return iter(self._every)

    def __len__(self) -> int:
        return len(self._every)


class RankTimes(NamedTuple):
    """Moments of one rank in a step, and how long it computed and waited for the wire, in seconds.

    begin_s: the end of the update before.
    computed_s: the end of its last backward.
    summed_s: when its next update may start.
    """

    begin_s: float
    computed_s: float
    summed_s: float
    busy_s: float
    update_s: float
    exposed_s: float


def mean_times(ranks: Sequence[tuple[float, RankTimes]], *, step_s: float) -> StageTimes:
    """The mean times of ranks that each stand for a share of a device group; the shares add up to 1."""
    ((_, mean), *others) = ranks
    if others:
        mean = RankTimes(*(sum(share * times[i] for share, times in ranks) for i in range(len(RankTimes._fields))))
    bubble_s = mean.computed_s - mean.begin_s - mean.busy_s
    sync_s = mean.summed_s - mean.computed_s
    return StageTimes(
        busy_s=mean.busy_s,
        bubble_s=bubble_s,
        sync_s=sync_s,
        update_s=mean.update_s,
        # Nothing but rounding where all update together.
        rest_s=max(0.0, step_s - mean.busy_s - bubble_s - sync_s - mean.update_s),
        exposed_s=mean.exposed_s,
    )
