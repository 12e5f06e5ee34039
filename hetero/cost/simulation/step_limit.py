"""Says when a compute has to have ended for a step that is short enough, so that the replay of a longer one is left.

What a lane still has to compute follows one after the other, and behind its last backward the gradient goes back
through the stages before it:

    end of compute i  +  sum of all computes after i                             <=  end of the replay
    end of compute i  +  sum up to the last backward  +  sum_{j < s} way back_j  <=  end of the replay

A way back is a backward and the least transfer to it. Waiting comes on top, so that a replay which is left would have
ended later.
"""

import math
from collections.abc import Sequence, Set
from itertools import accumulate

from hetero.schedule.actions import BACKWARD, Action

ROUNDING = 1e-9
"""Relative: what is too long by less may be so by rounding alone."""


class StepTooLong(Exception):
    """A step takes longer than whoever asked is interested in; how long was not found out."""


def latest_ends(
    computes: Sequence[Action], seconds: Sequence[float], stages: Set[int], back_s: Sequence[float], within_s: float
) -> list[float]:
    """When each compute of a lane has to have ended, for a replay that ends ``within_s``.

    Args:
        computes: of the lane, in their order.
        seconds: of each.
        stages: of the lane.
        back_s: of each stage of the pipeline, its way back.
    """
    if within_s == math.inf:
        return [math.inf] * len(computes)
    end_s = within_s * (1 + ROUNDING)
    left = [*accumulate(reversed(seconds), initial=0.0)]
    found = [end_s - after for after in reversed(left[:-1])]
    last = next((i for i in range(len(computes) - 1, -1, -1) if computes[i].kind in BACKWARD), None)
    if len(stages) == 1 and last is not None:
        after_s = left[len(computes) - 1 - last]
        longer_s = sum(back_s[: computes[last].stage]) - after_s
        if longer_s > 0:
            found[: last + 1] = [each - longer_s for each in found[: last + 1]]
    return found
