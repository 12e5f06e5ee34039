"""Finds in-flight depths with which a replica's schedule does not deadlock, by dry runs: of interleaved stages, and of
orders that have no formula.
"""

import dataclasses
from collections.abc import Sequence
from functools import lru_cache

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.plan.lowering import step_rows
from hetero.plan.offload import NOTHING_ON_HOST
from hetero.schedule.dry_run import check_no_deadlock


def enough_in_flight(replica: Replica) -> list[int] | None:
    """The depths of ``replica``'s stages, raised until its schedule does not deadlock; ``None`` if no depths suffice.

    Heuristic: all depths are raised together, one by one, and each is tried by a dry run. Plain 1F1B has
    :func:`hetero.plan.validate.least_in_flight` instead.
    """
    counts = replica.microbatch_counts
    depths = [stage.in_flight for stage in replica.stages]
    while not _ends(replica, depths):
        if all(depth >= count for depth, count in zip(depths, counts, strict=True)):
            return None
        depths = [max(depth, min(depth + 1, count)) for depth, count in zip(depths, counts, strict=True)]
    return depths


def deadlocks(replica: Replica) -> bool:
    """Whether a replica with interleaved stages, or in another order than 1F1B's, stands still at its depths."""
    return not _ends(replica, [stage.in_flight for stage in replica.stages])


def _ends(replica: Replica, in_flight: Sequence[int]) -> bool:
    """Whether the replica's schedule comes to an end at these depths. What its layers are, whether they are computed
    again and whether backwards are split does not matter."""
    return _comes_to_an_end(
        replica.with_stages(
            dataclasses.replace(
                stage.with_layers(s, s + 1),
                in_flight=depth,
                wgrad_delay=None,
                recompute="none",
                recompute_num_layers=None,
                offload=NOTHING_ON_HOST,
            )
            for s, (stage, depth) in enumerate(zip(replica.stages, in_flight, strict=True))
        )
    )


@lru_cache(maxsize=1024)
def _comes_to_an_end(replica: Replica) -> bool:
    """Remembered, since a planner tries the same depths again and again."""
    try:
        check_no_deadlock(step_rows(replica), num_microbatches=replica.microbatch_counts)
    except ScheduleError:
        return False
    return True
