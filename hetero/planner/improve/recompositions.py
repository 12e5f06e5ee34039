"""Deals the nodes of the cluster anew among replicas of few kinds: plans that share nothing with those before.

A change of one replica among eight equal ones gains nothing, since the step is that of the longest, and a change of all
of them may lead through plans that are worse. So here all replicas are made at once: what they are made of is drawn at
random (:mod:`.compositions`), as is a first shape of each pipeline (:mod:`.replica_shapes`).

Whether that could be worth it is told by how fast its devices are at best: with layers and samples divided evenly by
speed, in the copies f,

    fill_f + n_f period_f  equal for all copies,  sum of n_f = batch.

Of those that could be the shortest the best shapes are looked for (:mod:`.shape_search`). They are divided by
:mod:`.division` and estimated (:mod:`.step_estimate`). By how much longer one of a composition then was tells what to
expect of its other pipelines.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import NamedTuple

from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.compositions import Composition, drawn_composition, placed
from hetero.planner.improve.division import DIVIDING_S, Divider, ReplicaSteps
from hetero.planner.improve.replica_shapes import ReplicaShape, ShapeDice, StageShape
from hetero.planner.improve.shape_estimates import ShapeTimes
from hetero.planner.improve.shape_search import SHAPING_S, EstimatedShape, FoundShapes, ShapeSearch
from hetero.planner.improve.step_estimate import ESTIMATING_S
from hetero.planner.problem import Problem

PER_STAGE = (1, 2, 2, 3)
"""Microbatches more in flight than on the stage behind, one of which is drawn. A heuristic."""

TRIES = 4
"""Pipelines that are drawn for each composition. A heuristic."""

MOST_ALIKE = 6
"""Pipelines of a composition that was tried before, among those that are tried at once, unless there are few
compositions. A heuristic."""

QUANTILE = 0.1
"""What is known of so many compositions is expected of others. A heuristic: expecting the best of those that nobody has
looked at would look at each once, and at none twice."""

AGAIN = 1.01
"""With each search of a composition the next one is expected to find so many times as long a pipeline. A heuristic: it
leaves time to others."""

MOST_SUMMED = 24
"""Copies that sums of gradients are estimated for, at most. A heuristic: a ring of more takes hardly longer."""

MOST_LONGER = 10.0
"""By how many times at most a step may be found to be longer than estimated."""

MOST_WAITING = 2000
"""That wait for their turn, the best ones. A heuristic."""

DRAWING_S = 1.5e-4
"""Seconds of drawing one, about, for the count of work; an estimate."""

UNFIT = 1.3
"""What does not fit as it was drawn is expected to be so many times as long as by speed alone. A heuristic."""

STAGE_S = 1e-4
"""Seconds of making a stage, about, for the count of work; an estimate."""


class Recomposition(NamedTuple):
    """A composition with its pipelines.

    step_s: estimated from them.
    samples: of each copy of each pipeline.
    per_stage: microbatches more in flight than on the stage behind.
    """

    step_s: float
    composition: Composition
    pipelines: tuple[ReplicaShape, ...]
    samples: tuple[float, ...]
    per_stage: int

    @property
    def making_s(self) -> float:
        """Seconds of making its plan and estimating it, about, for the count of work."""
        each = zip(self.composition, self.pipelines, strict=True)
        num_stages = sum(copies.number * len(pipeline.stages) for copies, pipeline in each)
        return DIVIDING_S + (STAGE_S + ESTIMATING_S) * num_stages


class Pool:
    """Recompositions that wait for their turn, none of which is there twice, nor again."""

    def __init__(self) -> None:
        self._waiting: list[Recomposition] = []
        self._seen: set[tuple[Composition, tuple[ReplicaShape, ...]]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def knows(self, composition: Composition, pipelines: tuple[ReplicaShape, ...]) -> bool:
        """Whether such a one was there."""
        return (composition, pipelines) in self._seen

    def add(self, each: Recomposition) -> bool:
        """Let it wait; ``False`` if it was there before."""
        key = each.composition, each.pipelines
        if key in self._seen:
            return False
        self._seen.add(key)
        self._waiting.append(each)
        return True

    def put_back(self, left: Sequence[Recomposition]) -> None:
        """Those of the ones that were taken for which there was no time."""
        self._waiting.extend(left)

    def taken(
        self, most: int, expected_s: Callable[[Recomposition], float], known: AbstractSet[Composition]
    ) -> list[Recomposition]:
        """Up to so many of which the shortest steps are expected: of different compositions, and several of one that is
        known."""
        found: list[Recomposition] = []
        taken: Counter[Composition] = Counter()
        left = []
        # Where there are few compositions, more of each.
        others = max(MOST_ALIKE, most // max(1, len({each.composition for each in self._waiting})))
        for each in sorted(self._waiting, key=expected_s):
            if len(found) < most and taken[each.composition] < (others if each.composition in known else 1):
                found.append(each)
                taken[each.composition] += 1
            else:
                left.append(each)
        self._waiting = left[:MOST_WAITING]
        return found


class Recomposer:
    """Draws compositions of the cluster of ``problem``, and makes plans of them.

    drawn: those whose shapes nobody has searched for yet.
    begun: those with the best shapes of a short search.
    """

    def __init__(self, problem: Problem, divider: Divider) -> None:
        self._problem, self._divider = problem, divider
        self.drawn, self.begun = Pool(), Pool()
        self._made = Pool()
        self._times = ShapeTimes(problem, divider)
        self._searches = cache(self._searches_of)
        # Of compositions whose shapes were searched for to the end: how often, with what best step, and by how many
        # times the plan then is longer.
        self._times_searched: Counter[Composition] = Counter()
        self._least_s: dict[Composition, float] = {}
        self._longer: dict[Composition, float] = {}

    @property
    def num_devices(self) -> int:
        return self._problem.cluster.num_devices

    def _searches_of(self, composition: Composition) -> list[ShapeSearch]:
        """Of each of its pipelines."""
        ranks = placed(composition, self._problem, most=MOST_SUMMED)
        return [ShapeSearch(self._times, *each) for each in zip(composition, ranks, strict=True)]

    def shaping_s(self, each: Recomposition, share: float) -> float:
        """Seconds of looking for its best shapes, about, for the count of work."""
        return SHAPING_S * share * sum(search.changes for search in self._searches(each.composition))

    def draw(self, dice: random.Random, more: int, deadline: Deadline, kept: AbstractSet[int] = frozenset()) -> None:
        """Draw so many more, as long as there is time.

        kept: as of :func:`.drawn_composition`.
        """
        for _ in range(more // TRIES):
            if deadline.is_over() or not deadline.has(TRIES * DRAWING_S):
                break
            composition = drawn_composition(self._problem, dice, kept)
            for _ in range(TRIES if composition else 0):
                pipelines = tuple(ShapeDice(self._problem, copies, dice).drawn() for copies in composition)
                evenly = [self._steps(each) for each in pipelines]
                step_s = self._step_s(composition, evenly)
                samples = tuple(max(1.0, (step_s - each.fill_s) / each.period_s) for each in evenly)
                drawn = Recomposition(step_s, composition, pipelines, samples, dice.choice(PER_STAGE))
                self.drawn.add(self._estimated(drawn) or drawn._replace(step_s=UNFIT * step_s))

    def _estimated(self, drawn: Recomposition) -> Recomposition | None:
        every = zip(self._searches(drawn.composition), drawn.pipelines, drawn.samples, strict=True)
        steps = [search.steps(shape, samples) for search, shape, samples in every]
        found = [each for each in steps if each is not None]
        return drawn._replace(step_s=self._step_s(drawn.composition, found)) if len(found) == len(steps) else None

    def taken(self, pool: Pool, most: int) -> list[Recomposition]:
        """Up to so many of ``pool`` that are likely to be the shortest."""
        known = sorted(self._longer.values())
        # What nothing is known of is expected to be as those that turned out to be rather good.
        unknown = known[int(QUANTILE * len(known))] if known else 1.0

        def expected_s(each: Recomposition) -> float:
            # From another start a search is likely to find as good a shape, and less and less likely a better one.
            again_s = self._least_s.get(each.composition, math.inf) * AGAIN ** self._times_searched[each.composition]
            return self._longer.get(each.composition, unknown) * min(each.step_s, again_s)

        return pool.taken(most, expected_s, self._longer.keys())

    def begin(self, drawn: Recomposition, dice: random.Random, share: float) -> None:
        """Look for better shapes of it with a share of a search."""
        found = self._shapes(drawn, dice, share)
        if found is not None:
            self.begun.add(self._of(drawn, [each.best for each in found]))

    def shaped(self, begun: Recomposition, dice: random.Random) -> Recomposition | None:
        """The same composition with the best shapes that are found from those of ``begun``; where a plan was made of
        these before, with the next best shape of one pipeline. ``None`` if nothing fits, or there was one of that."""
        found = self._shapes(begun, dice, 1.0)
        if found is None:
            return None
        chosen = [each.best for each in found]
        if self._made.knows(begun.composition, tuple(each.shape for each in chosen)):
            # Estimates are off by more than these differ.
            i = dice.randrange(len(found))
            chosen[i] = found[i].new or found[i].best
        for search, each in zip(self._searches(begun.composition), chosen, strict=True):
            search.made.add(each.shape)
        shaped = self._of(begun, chosen)
        least_s = self._least_s.get(shaped.composition, math.inf)
        self._least_s[shaped.composition] = min(least_s, shaped.step_s)
        self._times_searched[shaped.composition] += 1
        return shaped if self._made.add(shaped) else None

    def _shapes(self, drawn: Recomposition, dice: random.Random, share: float) -> list[FoundShapes] | None:
        """What a share of a search finds for each of its pipelines."""
        searches = zip(self._searches(drawn.composition), drawn.pipelines, drawn.samples, strict=True)
        found = [search.shortest(shape, samples, dice, share=share) for search, shape, samples in searches]
        fitting = [each for each in found if each is not None]
        return fitting if len(fitting) == len(found) else None

    def _of(self, drawn: Recomposition, shapes: Sequence[EstimatedShape]) -> Recomposition:
        step_s = self._step_s(drawn.composition, [each.steps for each in shapes])
        return drawn._replace(pipelines=tuple(each.shape for each in shapes), step_s=step_s)

    def tell(self, drawn: Recomposition, step_s: float) -> None:
        """Take notice of how long the step is when it is divided: another one of this composition is likely to be
        longer than estimated by as much."""
        longer = min(MOST_LONGER, step_s / drawn.step_s)
        self._longer[drawn.composition] = min(longer, self._longer.get(drawn.composition, MOST_LONGER))

    def _step_s(self, composition: Composition, steps: Sequence[ReplicaSteps]) -> float:
        """The step in which all copies are at work to its end."""
        numbers = [copies.number for copies in composition]
        rate = sum(number / each.period_s for number, each in zip(numbers, steps, strict=True))
        behind = sum(number * each.fill_s / each.period_s for number, each in zip(numbers, steps, strict=True))
        return (self._problem.global_batch_size + behind) / rate

    def _steps(self, pipeline: ReplicaShape) -> ReplicaSteps:
        """Seconds per sample and before the first one, with layers by speed and without a look at memory."""
        num_layers = self._problem.model.num_layers
        seconds = [self._layer_s(stage, pipeline.samples) for stage in pipeline.stages]
        together = 1 / sum(1 / each for each in seconds)
        period_s = num_layers * together / pipeline.samples
        return ReplicaSteps(1, (len(seconds) - 1) * period_s * pipeline.samples, period_s)

    def _layer_s(self, stage: StageShape, samples: int) -> float:
        """Forward and backward of a layer for so many samples."""
        microbatch_s = self._times.layer_s(stage.node_type, stage.tp, stage.micro_batch_size(samples))
        return microbatch_s * samples / stage.samples(samples)

    def plan(self, drawn: Recomposition) -> Plan | None:
        """The plan of these pipelines, with layers and samples divided; ``None`` if nothing fits.

        Raises:
            ConfigError: a device has no profile, or two that talk to one another no link.
        """
        plan = self._problem.plan_of(self._replicas(drawn))
        return self._divider.settled(plan, range(len(plan.replicas)), per_stage=drawn.per_stage)

    def _replicas(self, drawn: Recomposition) -> Iterator[Replica]:
        ranks = placed(drawn.composition, self._problem)
        for copies, pipeline, samples in zip(ranks, drawn.pipelines, drawn.samples, strict=True):
            share = max(1, round(samples / pipeline.samples)) * pipeline.samples
            behind = pipeline.firsts(copies.pieces)
            for firsts in copies.firsts:
                starts = [firsts[each.node_type] + more for each, more in zip(pipeline.stages, behind, strict=True)]
                yield self._replica(pipeline, starts, share)

    def _replica(self, pipeline: ReplicaShape, starts: Sequence[int], share: int) -> Replica:
        """The replica whose stages begin at these ranks, with about so many samples."""
        stages = [
            self._times.stage(shape, shape.micro_batch_size(pipeline.samples), start).with_layers(s, s + 1)
            for s, (shape, start) in enumerate(zip(pipeline.stages, starts, strict=True))
        ]
        unit = math.lcm(*(stage.samples_per_microbatch for stage in stages))
        return Replica(num_samples=-(-share // unit) * unit, stages=tuple(stages))
