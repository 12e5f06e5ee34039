"""Searches for the cover with the shortest step, and proves a bound on all of them.

A step is seconds of compute plus seconds of gradient sums. Regions of the second number are searched best first:

    region [a, b]: gradient sums of a to b seconds.   bound = least compute with sums <= b, found by bisection,  + a

The master problem answers each question of the bisection with a cover or with a proof that there is none. A region
whose bound is above the best cover's step is done; others are halved. The least bound of the regions that are left,
and of those that were given up within the tolerance, is the bound of the whole template space.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hetero.planner.cover.cover import Copies, Cover, CoverScore, score_cover, sync_s
from hetero.planner.cover.master_problem import Answer, columns_within, find_cover
from hetero.planner.cover.relaxation import worth_using
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.cover.variables import Column
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.replica.templates import Template, milli_price

TOLERANCE = 0.01
"""Relative: covers that are better by less are not looked for."""

FIRST_TOLERANCE = 0.025
"""Of a first round: proofs near the shortest step take longest, so a coarser bound comes first. A heuristic."""

FIRST_STEP = 0.004
"""Relative: by how much compute is raised above the linear program's bound at first. A heuristic."""

COMPUTE_SHARE, RELAXED_SHARE = 0.5, 0.25
"""Of the tolerance: to so much of it goes the bisection of compute that asks the master problem, and before it the one
by the linear program alone. Heuristics."""

LONGEST_S = 1e7
"""Nobody waits longer for a step."""

MOST_COVERS = 12
"""Covers that are kept, the best first. A heuristic."""


@dataclass(frozen=True, slots=True)
class SearchProgress:
    """What the search knows by now: the seconds of the best cover, and a bound on all of them."""

    elapsed_s: float
    bound_s: float
    best_s: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best covers, at most ``MOST_COVERS``, the best first, and the bound on every cover of the template space."""

    covers: tuple[tuple[Cover, CoverScore], ...]
    bound_s: float
    finished: bool


@dataclass(order=True, slots=True)
class _Region:
    """Covers whose gradient sums take from ``low_s`` to ``high_s``; none of them has a shorter step than ``bound_s``,
    or less compute than ``compute_s``."""

    bound_s: float
    number: int
    low_s: float = field(compare=False)
    high_s: float = field(compare=False)
    compute_s: float = field(compare=False)


class Search:
    """Searches the covers by ``templates``.

    Args:
        known: covers of an earlier search, with fewer templates or less time: only better ones are looked for.
    """

    def __init__(
        self,
        problem: Problem,
        sync_tiers: SyncTiers,
        templates: Sequence[Template],
        deadline: Deadline,
        *,
        known: Iterable[tuple[Cover, CoverScore]] = (),
        tolerance: float = TOLERANCE,
        report: Callable[[SearchProgress], None] | None = None,
    ) -> None:
        self._problem = problem
        self._sync_tiers = sync_tiers
        self._templates = templates
        self._deadline = deadline
        self._tolerance = tolerance
        self._report = report
        self._covers: dict[Cover, CoverScore] = dict(known)
        self._numbers = itertools.count()
        self._given_up_s = float("inf")
        self._own_sync: dict[Template, tuple[float, float]] = {}

    def run(self) -> SearchResult:
        """Search until the gap is within the tolerance or the time is over."""
        if not self._templates:
            return SearchResult((), float("inf"), True)
        self._try_each_alone()
        finest, found = self._tolerance, SearchResult((), 0.0, True)
        for tolerance in (FIRST_TOLERANCE, finest) if finest < FIRST_TOLERANCE else (finest,):
            self._tolerance = tolerance
            again = self._round()
            found = replace(again, bound_s=max(found.bound_s, again.bound_s))
            if found.bound_s >= self._best_s * (1 - finest) or self._deadline.is_over():
                break
        return found

    def _round(self) -> SearchResult:
        """Search all regions once, to the current tolerance."""
        self._given_up_s = float("inf")
        regions = [_Region(0.0, next(self._numbers), 0.0, float("inf"), 0.0)]
        while regions and not self._deadline.is_over():
            region = heapq.heappop(regions)
            if region.bound_s >= self._target_s:
                self._give_up(region.bound_s)
                continue
            for child in self._explore(region):
                heapq.heappush(regions, child)
            if self._report is not None and self._covers:
                bound_s = min([self._given_up_s, *(each.bound_s for each in regions)])
                self._report(SearchProgress(self._deadline.elapsed_s, min(bound_s, self._best_s), self._best_s))
        bound_s = min([self._given_up_s, self._best_s, *(region.bound_s for region in regions)])
        ordered = sorted(self._covers.items(), key=lambda item: item[1].step_s)
        finished = not any(region.bound_s < self._target_s for region in regions)
        return SearchResult(tuple(ordered[:MOST_COVERS]), bound_s, finished)

    @property
    def _best_s(self) -> float:
        return min((each.step_s for each in self._covers.values()), default=float("inf"))

    @property
    def _target_s(self) -> float:
        """Only steps shorter than this are of interest."""
        return self._best_s * (1 - self._tolerance)

    def _give_up(self, bound_s: float) -> None:
        """Leave a region out of the search: what is below its bound stays possible."""
        self._given_up_s = min(self._given_up_s, bound_s)

    def _explore(self, region: _Region) -> list[_Region]:
        """Find the least compute of the region's covers, and halve what is left."""
        high_s = min(region.high_s, self._best_s - region.compute_s)
        answer, low_s, found = self._least_compute(region, high_s)
        bound_s = low_s + region.low_s
        is_wide = high_s - region.low_s > self._tolerance * self._best_s
        if answer.verdict == "unknown" and is_wide and bound_s < self._target_s and not self._deadline.is_over():
            # A narrower range of gradient sums is an easier question.
            return self._halves(region, (region.low_s + high_s) / 2, high_s, low_s)
        if answer.verdict == "unknown" or found is None or bound_s >= self._target_s:
            self._give_up(max(bound_s, region.bound_s))
            return []
        reached_s = min(found.sync_s, self._best_s - low_s)
        middle_s = (region.low_s + min(reached_s, high_s)) / 2
        if reached_s - region.low_s <= self._tolerance * self._best_s:
            # Within the tolerance the sums cannot get shorter; more compute does not pay.
            self._give_up(bound_s)
            return []
        return self._halves(region, middle_s, high_s, low_s)

    def _halves(self, region: _Region, middle_s: float, high_s: float, compute_s: float) -> list[_Region]:
        """Divide a region at ``middle_s`` seconds of gradient sums."""
        return [
            _Region(max(region.bound_s, compute_s + low), next(self._numbers), low, high, compute_s)
            for low, high in ((region.low_s, middle_s), (middle_s, high_s))
        ]

    def _least_compute(self, region: _Region, sync_s: float) -> tuple[Answer, float, CoverScore | None]:
        """The least seconds of compute at which the gradient sums stay within ``sync_s``.

        The linear program alone says where to begin; from there on the steps grow until there is a cover, and then
        they are halved.

        Returns:
            the last answer that matters, the seconds below which there is no cover, and the best cover's score.
        """
        limit_s = self._target_s - region.low_s
        proven_s = self._relaxed_compute_s(region.compute_s, limit_s, sync_s)
        low_s = high_s = proven_s
        growth, found = FIRST_STEP, None
        while found is None:
            if low_s >= min(limit_s, LONGEST_S) or self._deadline.is_over():
                return Answer("none" if proven_s >= min(limit_s, LONGEST_S) else "unknown"), proven_s, None
            high_s = min(limit_s, low_s * (1 + growth))
            growth *= 2
            answer = self._ask(high_s, sync_s)
            if answer.verdict == "found":
                found = self._remember(answer.cover)
            else:
                # Without a proof the search goes on as if there were none, but the bound stays.
                proven_s = high_s if answer.verdict == "none" else proven_s
                low_s = high_s
        high_s = min(high_s, found.compute_s)
        while high_s - low_s > COMPUTE_SHARE * self._tolerance * high_s and not self._deadline.is_over():
            middle_s = (low_s + high_s) / 2
            answer = self._ask(middle_s, sync_s)
            if answer.verdict == "found":
                found = self._remember(answer.cover)
                high_s = min(middle_s, found.compute_s)
            else:
                proven_s = middle_s if answer.verdict == "none" else proven_s
                low_s = middle_s
        return Answer("found"), proven_s, found

    def _relaxed_compute_s(self, low_s: float, high_s: float, sync_s: float) -> float:
        """Seconds of compute below which not even the linear program has a cover, up to ``high_s``."""
        low_s = max(low_s, min((template.seconds(1) for template in self._templates), default=0.0))
        if low_s >= high_s or self._columns(low_s, sync_s):
            return low_s
        if high_s == float("inf"):
            high_s = 2 * low_s
            while not self._columns(high_s, sync_s) and high_s < LONGEST_S:
                low_s, high_s = high_s, 2 * high_s
        elif not self._columns(high_s, sync_s):
            return high_s
        while high_s - low_s > RELAXED_SHARE * self._tolerance * high_s:
            middle_s = (low_s + high_s) / 2
            if self._columns(middle_s, sync_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _columns(self, compute_s: float, sync_s: float) -> list[Column]:
        """The templates that a cover within both limits may use."""
        columns = columns_within(self._templates, self._problem, compute_s=compute_s)
        return worth_using(self._within_sync(columns, sync_s), self._problem)

    def _ask(self, compute_s: float, sync_s: float) -> Answer:
        """Ask the master problem for a cover within both limits."""
        return find_cover(
            self._columns(compute_s, sync_s),
            self._problem,
            self._sync_tiers,
            sync_s=None if sync_s == float("inf") else sync_s,
            deadline=self._deadline,
        )

    def _within_sync(self, columns: Sequence[Column], sync_s: float) -> list[Column]:
        """Drop templates whose gradients take longer beside any other replica; leave one copy where two take longer."""
        kept = []
        for column in columns:
            accompanied_s, twice_s = self._own_sync_s(column.template)
            if accompanied_s <= sync_s:
                kept.append(replace(column, most_replicas=1) if twice_s > sync_s else column)
        return kept

    def _own_sync_s(self, template: Template) -> tuple[float, float]:
        """The least seconds of a template's gradient sums, if there is another replica, and if that is a copy of the
        template.

        Every replica holds all layers. A node that one replica fills shares each of its layers with another node.
        """
        if template not in self._own_sync:
            twice_s = sync_s((Copies(template, 2, 2),), self._problem, self._sync_tiers)
            last = self._problem.model.num_layers
            accompanied_s = max(
                0.0,
                *(
                    sum(self._sync_tiers.bytes_of(max(0, first), min(end, last)) for first, end in node_layers.runs)
                    * self._sync_tiers.fastest_s_per_byte(node_layers.node_type)
                    - node_layers.hidden_s
                    for node_layers in template.node_layers
                    if node_layers.whole
                ),
                0.0,
            )
            self._own_sync[template] = min(accompanied_s, twice_s), twice_s
        return self._own_sync[template]

    def _try_each_alone(self) -> None:
        """Score the covers by one template: one copy of it, which the search itself leaves out, and as many as there is
        room for.

        They are cheap to price, and the best of them is a good cover to begin with.
        """
        problem = self._problem
        for template in self._templates:
            total, rest = divmod(problem.global_batch_size, template.samples)
            if rest:
                continue
            for copies in {1, min(template.most_copies(problem.node_types), total)}:
                sums_s = self._own_sync_s(template)[1] if copies > 1 else 0.0
                step_s = template.seconds(-(-total // copies)) + sums_s
                if copies * milli_price(template, problem) <= problem.milli_budget and step_s < self._best_s:
                    self._remember((Copies(template, copies, total),))

    def _remember(self, cover: Cover) -> CoverScore:
        """Score a cover that was found, and keep it."""
        self._covers[cover] = found = score_cover(cover, self._problem, self._sync_tiers)
        return found
