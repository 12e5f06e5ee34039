"""Finds the shortest step of a small problem by looking at every plan, to hold the planner against.

Every replica is a sequence of stages, each with a node type, devices, tp, layers and a recomputation; every way to
divide the devices among replicas and the samples among them is tried, by the same formula as the solver's
(:mod:`hetero.planner.cover.cover`). Neither templates, nor the linear program, nor CP-SAT take part. Not looked at:
stages of one replica with different samples per microbatch, recomputation of a part of a stage's layers, and depths
other than the smallest ones for the shortest period that memory holds.

Plans of one replica come first, in the order of the least step that their shape allows
(:mod:`hetero.planner.reference.pipeline_shapes`), until that is no shorter than the best step. That step then limits
plans of several replicas, of which only such are left out as cannot be within the limit. W[d] samples are the most that
any replica on devices d finishes in time, by its shape or, once layers are divided, by its own seconds. All replicas on
devices D together finish at most

    V[D] = max( 0, max_{d <= D} W[d] + V[D - d] )

so a replica on d that finishes w is of use only if w + V[D - d] reaches the global batch. In time means: within the
limit without the sums of gradients that the replica cannot avoid. The work grows without mercy: up to 8 devices.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.planner.cover.cover import Copies, Cover, score_cover, sync_s
from hetero.planner.cover.search import LONGEST_S
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.problem import Problem
from hetero.planner.reference.pipeline_shapes import Devices, PipelineShape, divisions, every_shape, settlements
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.replica.templates import Template, TemplateFactory


@dataclass(frozen=True, slots=True)
class ExhaustiveResult:
    """The best cover and its seconds by the formula."""

    cover: Cover
    step_s: float


def exhaustive_best(problem: Problem, *, sizes: Sequence[int], samples: Sequence[int]) -> ExhaustiveResult:
    """The best of all covers by replicas whose stages have ``sizes`` devices and microbatches ``samples``."""
    return _Exhaustive(problem, every_shape(problem, sizes=sizes, samples=samples)).best()


_Able = tuple[Template, int, float]
"""A replica, the samples that it finishes in time, and the seconds of gradient sums that it has at least."""


class _Exhaustive:
    """One search over all plans."""

    def __init__(self, problem: Problem, shapes: Sequence[PipelineShape]) -> None:
        self._problem = problem
        self._sync_tiers = SyncTiers(problem)
        self._factory = TemplateFactory(problem, StageOptionTable(problem))
        self._shapes = shapes
        self._best_s = math.inf
        self._cover: Cover = ()

    def best(self) -> ExhaustiveResult:
        """The best of all plans; no cover and infinite seconds if none fits."""
        self._one_replica()
        self._best_s = min(self._best_s, LONGEST_S)
        self._several_replicas()
        return ExhaustiveResult(self._cover, self._best_s if self._cover else math.inf)

    def _one_replica(self) -> None:
        batch = self._problem.global_batch_size
        by_step = [
            (shape.least_seconds(batch // shape.samples) + self._tied_s(shape), i)
            for i, shape in enumerate(self._shapes)
            if batch % shape.samples == 0
        ]
        for least_s, i in sorted(by_step):
            if least_s >= self._best_s:
                return
            shape = self._shapes[i]
            microbatches = batch // shape.samples
            for template in self._replicas(shape, microbatches, self._tied_s(shape)):
                if template.seconds(microbatches) < self._best_s:
                    self._price((Copies(template, 1, microbatches),))

    def _several_replicas(self) -> None:
        batch = self._problem.global_batch_size
        able = [
            (shape, max(self._tied_s(shape), self._shared_embedding_s(shape)))
            for shape in self._shapes
            if shape.devices != _all_devices(self._problem)
        ]
        finished = [shape.samples * shape.most_microbatches(self._best_s - sums_s) for shape, sums_s in able]
        rest = _rest(_worth((shape.devices, n) for (shape, _), n in zip(able, finished, strict=True)), self._problem)
        found: list[tuple[Template, float]] = []
        for (shape, sums_s), most in zip(able, finished, strict=True):
            if most and most + rest[shape.devices] >= batch:
                needed = max(1, -(-(batch - rest[shape.devices]) // shape.samples))
                found += ((t, self._least_sums_s(t)) for t in self._replicas(shape, needed, sums_s))
        for chosen in self._sets(_undominated(found)):
            self._try(chosen)

    def _replicas(self, shape: PipelineShape, needed: int, sums_s: float) -> Iterator[Template]:
        """Every replica of ``shape`` that finishes ``needed`` microbatches before the best step's last ``sums_s``."""
        within_s = self._best_s - sums_s
        for layers in divisions(shape, self._problem.model.num_layers, shape.longest_stage_s(within_s, needed)):
            for balanced in settlements(shape, layers):
                if balanced.fill_s + (needed - 1) * balanced.period_s <= within_s:
                    yield self._factory.template(shape.placed_slots, balanced, shape.samples)

    def _sets(self, replicas: Sequence[tuple[Template, float]]) -> Iterator[tuple[Template, ...]]:
        """Every multiset of two replicas or more that fits the devices and can finish the batch within the limit."""
        batch = self._problem.global_batch_size
        able = [(t, t.samples * t.most_microbatches(self._best_s - sums_s), sums_s) for t, sums_s in replicas]
        together = _together(_worth((t.devices, samples) for t, samples, _ in able), self._problem)
        by_devices: dict[Devices, list[_Able]] = defaultdict(list)
        for each in able:
            by_devices[each[0].devices].append(each)
        groups = [(d, sorted(members, key=lambda each: -each[1])) for d, members in by_devices.items()]

        def extend(
            chosen: tuple[_Able, ...], first: tuple[int, int], left: Devices, lacking: int
        ) -> Iterator[tuple[Template, ...]]:
            if len(chosen) > 1 and lacking <= 0 and self._may_finish(chosen):
                yield tuple(each[0] for each in chosen)
            for g in range(first[0], len(groups)):
                devices, members = groups[g]
                if any(have < n for have, n in zip(left, devices, strict=True)):
                    continue
                rest = _minus(left, devices)
                for i in range(first[1] if g == first[0] else 0, len(members)):
                    samples = members[i][1]
                    if not samples or samples + together[rest] < lacking:
                        break
                    yield from extend((*chosen, members[i]), (g, i), rest, lacking - samples)

        yield from extend((), (0, 0), _all_devices(self._problem), batch)

    def _may_finish(self, chosen: Sequence[_Able]) -> bool:
        """Whether they finish the batch before the best step, less the gradient sums that one of them has at least."""
        within_s = self._best_s - max(sums_s for _, _, sums_s in chosen)
        finished = sum(t.samples * t.most_microbatches(within_s) for t, _, _ in chosen)
        return finished >= self._problem.global_batch_size

    def _tied_s(self, shape: PipelineShape) -> float:
        """Seconds at least of the sum of a tied embedding's two copies, if first and last stage are on two nodes.

        The first stage's backward is the last of all, so nothing of it is hidden.
        """
        first, last = shape.placed_slots[0].slot.node_type, shape.placed_slots[-1].slot.node_type
        if first == last or not self._problem.model.tied_embeddings:
            return 0.0
        tier = self._sync_tiers.tier_between(first, last)
        assert tier is not None, "different node types have a tier"
        return self._sync_tiers.word_embedding_bytes * self._sync_tiers.tiers[tier]

    def _shared_embedding_s(self, shape: PipelineShape) -> float:
        """Seconds at least in which the first node sums what it holds, embedding and a layer per stage, with others."""
        first = shape.placed_slots[0].slot.node_type
        node_type = self._problem.node_types[first]
        if shape.devices[first] < node_type.gpus_per_node:
            return 0.0
        return self._sync_tiers.bytes_of(-1, 1) * self._sync_tiers.fastest_s_per_byte(first)

    def _least_sums_s(self, template: Template) -> float:
        """Seconds of gradient sums at least, beside any other replica: its own, or those of the nodes it fills.

        The search for covers leaves out by the same bound. It is written twice so that a mistake in that one does not
        rule out here the plan that shows it.
        """
        last = self._problem.model.num_layers
        shared_s = (
            sum(self._sync_tiers.bytes_of(max(0, first), min(end, last)) for first, end in node_layers.runs)
            * self._sync_tiers.fastest_s_per_byte(node_layers.node_type)
            - node_layers.hidden_s
            for node_layers in template.node_layers
            if node_layers.whole
        )
        return max(sync_s([Copies(template, 1, 1)], self._problem, self._sync_tiers), *shared_s, 0.0)

    def _try(self, chosen: Sequence[Template]) -> None:
        """The best division of the samples among ``chosen``; sums of gradients do not depend on it."""
        sums_s = sync_s([Copies(template, 1, 1) for template in chosen], self._problem, self._sync_tiers)
        shares = _shortest_shares(chosen, self._problem.global_batch_size, self._best_s - sums_s)
        if shares is not None:
            self._price(tuple(Copies(template, 1, share) for template, share in zip(chosen, shares, strict=True)))

    def _price(self, cover: Cover) -> None:
        step_s = score_cover(cover, self._problem, self._sync_tiers).step_s
        if step_s < self._best_s:
            self._best_s, self._cover = step_s, cover


def _all_devices(problem: Problem) -> Devices:
    return tuple(node_type.num_devices for node_type in problem.node_types)


def _minus(a: Devices, b: Devices) -> Devices:
    return tuple(have - n for have, n in zip(a, b, strict=True))


def _worth(able: Iterable[tuple[Devices, int]]) -> dict[Devices, int]:
    """Find the most samples that a replica finishes in time, by its devices: W of the formula above."""
    most: dict[Devices, int] = defaultdict(int)
    for devices, samples in able:
        most[devices] = max(most[devices], samples)
    return most


def _together(worth: Mapping[Devices, int], problem: Problem) -> dict[Devices, int]:
    """Find the most samples that replicas finish together, for every part of the cluster's devices: V of the formula
    above."""
    found: dict[Devices, int] = {}
    for devices in itertools.product(*(range(n + 1) for n in _all_devices(problem))):
        rests = ((samples, _minus(devices, d)) for d, samples in worth.items())
        found[devices] = max((samples + found[rest] for samples, rest in rests if min(rest) >= 0), default=0)
    return found


def _rest(worth: Mapping[Devices, int], problem: Problem) -> dict[Devices, int]:
    """Find the most samples that replicas finish on what one leaves over, by its devices."""
    together, everything = _together(worth, problem), _all_devices(problem)
    return {devices: together[_minus(everything, devices)] for devices in worth}


def _undominated(replicas: Iterable[tuple[Template, float]]) -> list[tuple[Template, float]]:
    """Drop replicas that another one whose nodes hold the same layers beats in fill, period and update.

    What a slower stage hides of the gradient sums it loses in the fill.
    """
    groups: dict[object, list[tuple[Template, float]]] = defaultdict(list)
    for template, sums_s in replicas:
        node_layers = tuple(replace(each, hidden_s=0.0) for each in template.node_layers)
        kept = groups[template.devices, template.samples, node_layers]
        if not any(_is_no_worse(other, template) for other, _ in kept):
            kept[:] = [*(each for each in kept if not _is_no_worse(template, each[0])), (template, sums_s)]
    return [each for kept in groups.values() for each in kept]


def _is_no_worse(a: Template, b: Template) -> bool:
    """Whether ``a`` needs no more than ``b`` in period, in fill with update, and on each node until its sums begin."""
    return (
        a.period_s <= b.period_s
        and a.fill_s + a.update_s <= b.fill_s + b.update_s
        and all(
            a.fill_s - mine.hidden_s <= b.fill_s - theirs.hidden_s
            for mine, theirs in zip(a.node_layers, b.node_layers, strict=True)
        )
    )


def _shortest_shares(chosen: Sequence[Template], batch: int, limit_s: float) -> tuple[int, ...] | None:
    """Microbatches of each replica, at least one, that add up to ``batch`` with the least longest time."""
    best: tuple[float, tuple[int, ...]] | None = None
    after = [sum(t.samples * t.most_microbatches(limit_s) for t in chosen[i + 1 :]) for i in range(len(chosen))]

    def extend(shares: tuple[int, ...], left: int, longest_s: float) -> None:
        nonlocal best
        within_s = best[0] if best else limit_s
        if longest_s >= within_s:
            return
        template = chosen[len(shares)]
        if len(shares) + 1 == len(chosen):
            microbatches, rest = divmod(left, template.samples)
            if not rest and microbatches:
                seconds = max(longest_s, template.seconds(microbatches))
                if seconds < within_s:
                    best = seconds, (*shares, microbatches)
            return
        least = max(1, -(-(left - after[len(shares)]) // template.samples))
        for microbatches in range(least, min(template.most_microbatches(within_s), left // template.samples) + 1):
            seconds = max(longest_s, template.seconds(microbatches))
            extend((*shares, microbatches), left - microbatches * template.samples, seconds)

    extend((), batch, 0.0)
    return best[1] if best else None
