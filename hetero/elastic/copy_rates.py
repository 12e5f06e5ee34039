"""Measures what steps and copies take, of which all ranks make one interval between copies."""

import statistics
import time
from collections.abc import Mapping, Sequence

from hetero.elastic.placement import CopyInterval, CopyTraffic, copy_interval

_LEAST_S = 1e-6
"""Nothing takes less: what is divided by."""

_NEWS = 1.5
"""By what factor the interval has to change before it is told again; a heuristic."""


class CopyRates:
    """Chooses the interval between copies. All ranks have the same sums, so they choose the same.

    Args:
        traffic: what each node moves per copied step.
        link_bytes_per_s: of each node's network interface; what is measured may be less.
        world_size: number of ranks.
        time_share: see :func:`hetero.elastic.placement.copy_interval`.
        every: what a person asked for, ``None`` to choose.

    Attributes:
        interval: as it is now; before the first copy is over, after every step.
    """

    def __init__(
        self,
        traffic: Mapping[str, CopyTraffic],
        link_bytes_per_s: Mapping[str, float],
        *,
        world_size: int,
        time_share: float,
        every: int | None,
    ) -> None:
        self._traffic = traffic
        self._link_bytes_per_s = link_bytes_per_s
        self._world_size = world_size
        self._time_share = time_share
        self._asked = every
        self._last_vote_s: float | None = None
        self._step_s: list[float] = []
        self._told = 0
        self.interval = CopyInterval(every=every or 1, steps_at_risk=0, reason="nothing is measured yet")

    def measured(self, *, write_s: float, fetch_s: float) -> Sequence[float]:
        """What this rank adds to the sums: seconds since the last step's vote, and those of its last copy."""
        now_s = time.monotonic()
        step_s = 0.0 if self._last_vote_s is None else now_s - self._last_vote_s
        self._last_vote_s = now_s
        return step_s, write_s, fetch_s

    def agreed(self, sums: Sequence[float], *, of_copy: bool) -> str:
        """Take the sums of all ranks; returns what is new for people, empty for nothing.

        Args:
            of_copy: a copy has just been committed, so that the sums are of all ranks' parts of it.
        """
        step_s, write_s, fetch_s = (each / self._world_size for each in sums)
        if step_s:
            self._step_s.append(step_s)
        if not of_copy or not self._step_s:
            return ""
        num_nodes = len(self._traffic)
        written = sum(each.written for each in self._traffic.values()) / num_nodes
        fetched = sum(each.fetched for each in self._traffic.values()) / num_nodes
        measured = fetched / max(fetch_s, _LEAST_S) if fetched else float("inf")
        self.interval = copy_interval(
            self._traffic,
            step_s=max(statistics.median(self._step_s), _LEAST_S),
            link_bytes_per_s={node: min(rate, measured) for node, rate in self._link_bytes_per_s.items()},
            copy_bytes_per_s=max(written, 1) / max(write_s, _LEAST_S),
            time_share=self._time_share,
            every=self._asked,
        )
        self._step_s.clear()
        every = self.interval.every
        if self._told and self._told / _NEWS <= every <= self._told * _NEWS:
            return ""
        self._told = every
        return f"copies after every {every} steps, {self.interval.steps_at_risk} steps at risk: {self.interval.reason}"
