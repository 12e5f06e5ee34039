"""Divides layers among the stages of a replica, and samples among replicas, anew and all at once.

A changed pipeline, with a stage more for instance, is as a rule worse than before as long as everything else stays what
it was. So such a change is judged only when its replicas have been divided anew (large neighbourhoods; Ropke and
Pisinger 2006).

**Layers.** With t_s the seconds of a forward and a backward on stage s, w_s what of them a split backward leaves for
later, k_s its delay and M_s its microbatches, what is minimised is

    max over s of  M_s t_s + max(fill_s / 2, fill_s - min(M_s, k_s + 1) w_s),  with  fill_s = sum_{i < s} (t_i - w_i)

over all cuts at half layers: behind the last input gradient of stage s so many weights' gradients are left, which are
computed while that gradient goes back to the first stage. They save no more than the way back, half of the fill. Where
backwards are whole, w is 0. Recomputation is the least with which a stage fits at its depth. Delays are those that the
replica has, or those of ZB-H1 (arXiv 2401.10241), k_s = s: of both the one that is shorter by its estimate
(:mod:`.step_estimate`).

Whether T seconds can be reached is a shortest path over (stage, position): of two ways to a position the one with the
smaller fill is never worse. T is bisected. That is exact but for the bisection, and takes a millisecond or two, less
than CP-SAT takes to build such a problem.

**Samples.** A replica that takes n microbatches, of u samples each on its coarsest stage, has a step of

    fill + (n - 1) period

and the longest step is minimised over all n >= 1 with sum u n = batch. T is bisected; whether the shares can add up to
the batch is a subset sum over whole microbatches, with a bit for each number of samples. Exact by that formula, too.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hetero.cost.simulation.recent import Recent
from hetero.plan.ir import Plan, Replica
from hetero.plan.offload import NOTHING_ON_HOST
from hetero.planner.improve.division_costs import DivisionCosts, Matrix, StageKind, StageTable
from hetero.planner.improve.gradient_sync import with_domains_of_working
from hetero.planner.improve.replica_changes import deep_enough, depths_of
from hetero.planner.improve.step_estimate import StepEstimates
from hetero.planner.improve.transfer_costs import TransferCosts
from hetero.planner.problem import Problem

Found = TypeVar("Found")

BISECTIONS = 8
"""Of the seconds of a replica, between its longest stage alone and with the fill: they leave 0.4 % of the fill. A
heuristic."""

ROUNDING = 1e-9
"""Relative: what is reached but for rounding is reached."""

SHARE_BISECTIONS = 24
"""Of the longest step of all replicas. A heuristic: the rest is far below a microbatch."""

MOST_SHARED = 1 << 16
"""Larger batches are not shared out anew: a bit for each sample. A heuristic."""

DIVIDING_S = 3e-3
"""Seconds of dividing a plan anew, about, for the count of work; an estimate."""

MOST_KNOWN = 256
"""Divisions that are kept. A heuristic: of replicas that are alike one is divided."""


class _Division(NamedTuple):
    """By stage: where it begins and ends, layers that it computes again, depth, delay of its weights' gradients."""

    edges: tuple[tuple[float, float], ...]
    recomputed: tuple[int, ...]
    depths: tuple[int, ...]
    delays: tuple[int | None, ...]


class StageSeconds(NamedTuple):
    """Seconds of a stage by where it ends and where it begins, the other way round than those of a
    :class:`StageTable`: the least is looked for among all places where it may begin, which then lie side by side.

    passes: what it takes until a microbatch and its gradient have passed.
    computes: of all microbatches.
    waits: of the weights' gradients that may wait until all others are done.
    """

    passes: Matrix
    computes: Matrix
    waits: Matrix

    @classmethod
    def of(cls, table: StageTable, count: int, delay: int | None) -> "StageSeconds":
        """Of so many microbatches; ``delay`` is that of the weights' gradients."""
        seconds, weight_s = np.ascontiguousarray(table.seconds.T), np.ascontiguousarray(table.weight_s.T)
        waiting = 0 if delay is None else min(count, delay + 1)
        return cls(seconds - weight_s, count * seconds, waiting * weight_s)


class ReplicaSteps(NamedTuple):
    """What a number of microbatches takes on replicas that are alike.

    unit: samples of one microbatch on all of them.
    """

    unit: int
    fill_s: float
    period_s: float

    def most(self, step_s: float) -> int:
        """Microbatches that end within ``step_s``."""
        return int((step_s - self.fill_s) / self.period_s) + 1 if step_s >= self.fill_s else 0


class Divider:
    """Divides replicas of plans for ``problem``.

    costs, transfers, estimates: of these plans, with what is remembered of them, also for others.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.costs = DivisionCosts(problem)
        self._known: Recent[_Division | None] = Recent(MOST_KNOWN)
        self.transfers = TransferCosts(problem)
        self.estimates = StepEstimates(problem, self.transfers)

    def settled(self, plan: Plan, replicas: Iterable[int], *, per_stage: int) -> Plan | None:
        """``plan`` with the layers of these replicas divided anew, and the samples of all.

        per_stage: microbatches more that are in flight than on the stage behind; two hide a transfer.

        Returns:
            ``None`` where that is impossible.

        Raises:
            ConfigError: a device has no profile, or two that talk to one another no link.
        """
        touched = list(replicas)
        ways = (True, False) if self._problem.delays_weight_gradients else (False,)
        every = [self._settled(plan, touched, per_stage, splits) for splits in ways]
        found = list(dict.fromkeys(with_domains_of_working(each, self._problem) for each in every if each is not None))
        # Weights' gradients that wait are summed later, which the division does not know.
        return min(found, key=self.estimates.step_s) if len(found) > 1 else next(iter(found), None)

    def _settled(self, plan: Plan, replicas: Sequence[int], per_stage: int, splits: bool) -> Plan | None:
        divided: dict[int, Replica] = {}
        for r in replicas:
            replica = self.divided(plan.replicas[r], plan, per_stage=per_stage, splits=splits)
            if replica is None:
                return None
            divided[r] = replica
        return self.shared(plan.with_replicas(divided))

    def divided(self, replica: Replica, plan: Plan, *, per_stage: int, splits: bool = False) -> Replica | None:
        """``replica`` with other layers, recomputation and depths; ``None`` if nothing fits.

        splits: with the delays of ZB-H1, where its devices may split backwards; otherwise with those that it has.
        """
        if replica.is_interleaved or not self.costs.can_divide:
            return None
        if any(stage.offload != NOTHING_ON_HOST for stage in replica.stages):
            return None
        ways = sum(each.stages[0].dp for each in plan.replicas)
        kinds = tuple(self.costs.kind(replica, s, ways) for s in range(len(replica.stages)))
        key = kinds, replica.microbatch_counts, tuple(stage.dp for stage in replica.stages), per_stage, splits
        found = self._known.of(key, lambda: self._divided(replica, kinds, per_stage, splits))
        return None if found is None else _with(replica, found)

    def _divided(self, replica: Replica, kinds: Sequence[StageKind], per_stage: int, splits: bool) -> _Division | None:
        counts = replica.microbatch_counts
        if not all(counts):
            return None
        depths = depths_of(replica.stages, counts, per_stage)
        delays = [kind.wgrad_delay for kind in kinds]
        if splits and len(kinds) > 1 and all(map(self.costs.can_split, kinds)):
            delays = list(range(len(kinds)))
        tables = [
            self.costs.table(kind._replace(wgrad_delay=delay), depth)
            for kind, delay, depth in zip(kinds, delays, depths, strict=True)
        ]
        cuts = least_cuts([StageSeconds.of(*each) for each in zip(tables, counts, delays, strict=True)], counts)
        if cuts is None:
            return None
        positions = [float(each) for each in self.costs.positions]
        return _Division(
            tuple((positions[i], positions[k]) for i, k in cuts),
            tuple(int(table.recomputed[cut]) for table, cut in zip(tables, cuts, strict=True)),
            tuple(depths),
            tuple(delays),
        )

    def shared(self, plan: Plan) -> Plan | None:
        """``plan`` with its samples shared out among its replicas; ``None`` if they do not add up."""
        if len(plan.replicas) == 1:
            replica = dataclasses.replace(plan.replicas[0], num_samples=plan.global_batch_size)
            return plan.with_replicas({0: deep_enough(replica)})
        if plan.global_batch_size > MOST_SHARED:
            return None
        groups = plan.alike()
        shares = self._shares(plan, groups)
        if shares is None:
            groups = [[r] for r in range(len(plan.replicas))]
            shares = self._shares(plan, groups)
        if shares is None:
            return None
        changed = {}
        for members, samples in zip(groups, shares, strict=True):
            for r in members:
                if plan.replicas[r].num_samples != samples:
                    changed[r] = deep_enough(dataclasses.replace(plan.replicas[r], num_samples=samples))
        return plan.with_replicas(changed)

    def _shares(self, plan: Plan, groups: Sequence[Sequence[int]]) -> list[int] | None:
        """Samples of a replica of each group."""
        every = [self._share(plan.replicas[members[0]], len(members)) for members in groups]
        counts = shared_out(every, plan.global_batch_size)
        if counts is None:
            return None
        return [count * share.unit // len(members) for count, share, members in zip(counts, every, groups, strict=True)]

    def _share(self, replica: Replica, members: int) -> ReplicaSteps:
        stages = replica.stages
        seconds = [self._problem.costs.of(stage).microbatch_s for stage in stages]
        unit = math.lcm(*(stage.samples_per_microbatch for stage in stages))
        of_unit = [s * unit / stage.samples_per_microbatch for s, stage in zip(seconds, stages, strict=True)]
        if replica.is_interleaved:
            of_unit = [sum(of_unit[s] for s in group) for group in replica.device_groups]
        transfer_s = sum(self.transfers.between(a, b).seconds for a, b in itertools.pairwise(stages))
        return ReplicaSteps(unit * members, sum(seconds) + 2 * transfer_s, max(of_unit))


def _with(replica: Replica, division: _Division) -> Replica:
    stages = []
    for stage, edges, count, depth, delay in zip(replica.stages, *division, strict=True):
        moved = dataclasses.replace(stage.with_layers(*edges), wgrad_delay=delay)
        again: dict[str, Any] = {"recompute": "none", "recompute_num_layers": None}
        if count:
            some = count if count < len(moved.layer_numbers) else None
            again = {"recompute": "full", "recompute_num_layers": some, "wgrad_delay": None}
        stages.append(dataclasses.replace(moved, in_flight=depth, **again))
    return deep_enough(replica.with_stages(stages))


def least_cuts(stages: Sequence[StageSeconds], counts: Sequence[int]) -> list[tuple[int, int]] | None:
    """The cuts with the least step by the formula above, as indices of positions; ``None`` if no cuts fit.

    counts: M_s of every stage.
    """
    longest = np.full(len(stages[0].passes), np.inf)
    longest[0] = 0.0
    for stage in stages:
        longest = np.maximum(longest, stage.computes).min(axis=1)
    low = float(longest[-1])
    if not math.isfinite(low):
        return None
    # Where no stage takes more than ``low`` in all, those before one take no more than this.
    high = low * (1 + sum(1 / count for count in counts)) * (1 + ROUNDING)
    return _shortest(lambda step_s: _cuts_within(stages, step_s), low, high, BISECTIONS)


def _shortest(within: Callable[[float], Found | None], low: float, high: float, bisections: int) -> Found | None:
    """What ``within`` finds for about the least seconds between ``low`` and ``high``; ``None`` if nothing for
    ``high``."""
    found = within(high)
    for _ in range(bisections if found is not None else 0):
        middle = (low + high) / 2
        better = within(middle)
        if better is None:
            low = middle
        else:
            high, found = middle, better
    return found


def _cuts_within(stages: Sequence[StageSeconds], step_s: float) -> list[tuple[int, int]] | None:
    """Cuts with which no stage ends later than ``step_s``, of those with the least fill."""
    filled = np.full(len(stages[0].passes), np.inf)
    filled[0] = 0.0
    positions = np.arange(len(filled))
    before = []
    for stage in stages:
        ends = stage.computes + np.maximum(filled / 2, filled - stage.waits)
        way = np.where(ends > step_s, np.inf, filled + stage.passes)
        before.append(way.argmin(axis=1))
        filled = way[positions, before[-1]]
    if not math.isfinite(filled[-1]):
        return None
    cuts, end = [], len(filled) - 1
    for starts in reversed(before):
        start = int(starts[end])
        cuts.append((start, end))
        end = start
    return cuts[::-1]


def shared_out(shares: Sequence[ReplicaSteps], batch: int) -> list[int] | None:
    """Microbatches of each, at least one, that add up to ``batch`` samples, with the least longest step; ``None`` if
    nothing adds up."""
    if sum(share.unit for share in shares) > batch:
        return None
    low = max(share.fill_s for share in shares)
    high = max(share.fill_s + share.period_s * (batch // share.unit) for share in shares)
    return _shortest(lambda step_s: _within(shares, batch, step_s), low, high, SHARE_BISECTIONS)


def _within(shares: Sequence[ReplicaSteps], batch: int, step_s: float) -> list[int] | None:
    most = [min(share.most(step_s), batch // share.unit) for share in shares]
    if min(most) < 1 or sum(share.unit * count for share, count in zip(shares, most, strict=True)) < batch:
        return None
    everything = (1 << (batch + 1)) - 1
    sums = [1]
    for share, count in zip(shares, most, strict=True):
        reached, covered = sums[-1], 1
        while covered < count:
            more = min(covered, count - covered)
            reached |= reached << (more * share.unit)
            covered += more
        sums.append((reached << share.unit) & everything)
    if not sums[-1] >> batch & 1:
        return None
    counts, left = [], batch
    for share, count, before in zip(reversed(shares), reversed(most), reversed(sums[:-1]), strict=True):
        # The most that leaves a sum for the others.
        taken = next(n for n in range(count, 0, -1) if left >= n * share.unit and before >> (left - n * share.unit) & 1)
        counts.append(taken)
        left -= taken * share.unit
    return counts[::-1]
