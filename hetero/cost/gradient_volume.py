"""Which ranks sum how many gradient elements: the buckets of :mod:`.gradient_groups`, counted and not listed.

A set of ranks determines which stages hold what it holds, and these hold the same consecutive parameters. So a set's
buckets follow from these parameters' sizes, and sets with the same share of them have buckets of the same sizes. Layers
are alike: a bucket is looked for in running sums over one layer's parameters. A plan of thousands of ranks takes no
look at each parameter of each rank.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from hetero.cost.layers.parameter_counts import LayerSizes, Which
from hetero.cost.layers.stage_modules import Part
from hetero.plan.ir import Plan, Ranks, Stage
from hetero.plan.sync_domains import Domains, rails_of
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF

Sizes = tuple[tuple[float, tuple[int, ...]], ...]
"""(position, running sums of the elements of its parameters), from the head to the embedding."""

Holder = tuple[int, int, Stage]
"""A stage with the indices of its replica and of itself."""


class CountedBucket(NamedTuple):
    """Gradients that are summed together.

    ranks: in ascending order; more than one.
    numel: elements, without what the runtime adds to align segments and shards, at most
        :data:`~hetero.plan.gradient_groups.ALIGNMENT` for each of either.
    position: the lowest layer in it; -1 is the embedding, half a layer more than a layer its MLP, the number of layers
        the head.
    domains: the ranks by domain, where they sum in two levels; otherwise empty.
    """

    ranks: Ranks
    numel: int
    position: float
    domains: tuple[Ranks, ...] = ()


@dataclass(frozen=True, slots=True)
class _Holding:
    """Sets of ranks that hold alike.

    rank_sets: each in ascending order.
    share: in how many of how many equal parts each set holds every parameter.
    sizes: of the whole parameters.
    """

    rank_sets: tuple[Ranks, ...]
    share: tuple[int, int]
    sizes: Sizes

    @property
    def numel(self) -> int:
        return self.part(sum(sums[-1] for _, sums in self.sizes))

    def buckets(self, bucket_numel: int) -> Iterator[tuple[float, int]]:
        """(position, elements) of the buckets of each set: the parameter that makes ``bucket_numel`` full is the last.

        A parameter's segments of one set stay together.
        """
        parts, cells = self.share
        full = -(-bucket_numel * cells // parts)
        held, position = 0, 0.0
        for position, sums in self.sizes:
            # Running sums count from the start of this position, ``held`` from the last bucket's end.
            while (last := bisect_left(sums, full - held)) < len(sums):
                yield position, self.part(held + sums[last])
                held = -sums[last]
            held += sums[-1]
        if held:
            yield position, self.part(held)

    def part(self, numel: int) -> int:
        """What each set holds of ``numel`` elements."""
        parts, cells = self.share
        return numel * parts // cells


def sync_buckets(plan: Plan, *, bucket_numel: int) -> tuple[CountedBucket, ...]:
    """The buckets that more than one rank holds, in the order in which all ranks launch them.

    They are those of :func:`hetero.plan.gradient_groups.gradient_buckets`.
    """
    domains = Domains(plan.gradient_sync.domains)
    found = []
    for holding in _holdings(plan):
        buckets = list(holding.buckets(bucket_numel))
        found += [(not domains.spans(ranks), ranks, buckets) for ranks in holding.rank_sets if len(ranks) > 1]
    ordered = []
    for _, ranks, buckets in sorted(found, key=lambda each: each[:2]):
        parts = domains.parts(ranks)
        ordered += [CountedBucket(ranks, numel, position, parts) for position, numel in buckets]
    # Sets of ranks stay in order where positions are the same.
    return tuple(sorted(ordered, key=lambda bucket: -bucket.position))


def communicators(plan: Plan) -> set[Ranks]:
    """The sets of ranks that have a communicator to sum gradients with: holders, or their domains and lanes."""
    domains = Domains(plan.gradient_sync.domains)
    found = set()
    for ranks in (ranks for holding in _holdings(plan) for ranks in holding.rank_sets if len(ranks) > 1):
        parts = domains.parts(ranks)
        found |= {part for part in (*parts, *rails_of(parts)) if len(part) > 1} if parts else {ranks}
    return found


def owned_parameters(plan: Plan) -> dict[int, dict[int, float]]:
    """By rank and by the stages of its replica that it holds, the elements that it owns: of what it holds, its share
    among all that hold the same."""
    weight = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
    places: dict[int, list[tuple[int, float, float]]] = {rank: [] for rank in weight}
    for _, s, stage in plan.stages():
        for rank in stage.ranks:
            places[rank].append((s, *_reach(stage, plan.model)))
    owned = {rank: dict.fromkeys((s for s, _, _ in stages), 0.0) for rank, stages in places.items()}
    for holding in _holdings(plan):
        for ranks in holding.rank_sets:
            per_share = 1.0 / sum(weight[rank] for rank in ranks)
            for rank in ranks:
                for s, numel in _by_stage(holding, places[rank]):
                    owned[rank][s] += numel * per_share * weight[rank]
    return owned


def _by_stage(holding: _Holding, stages: Sequence[tuple[int, float, float]]) -> Iterator[tuple[int, int]]:
    """The elements of what a rank holds by the stage that holds them; ``stages`` are its own with their reach."""
    last = stages[-1][0]
    if len(stages) == 1:
        yield last, holding.numel
        return
    for position, sums in holding.sizes:
        # What none of its stages reaches is the tied embedding's other copy, on the last of them.
        yield next((s for s, first, end in stages[:-1] if first <= position < end), last), holding.part(sums[-1])


def cut_parameters(plan: Plan) -> dict[tuple[int, int], int]:
    """By replica and stage, the elements on one rank that the shard edges of other holders cut.

    Their segments go to several buckets, so that the runtime holds weight and gradient a second time in its own order.
    """
    found = {(r, s): 0 for r, s, _ in plan.stages()}
    for holders, sizes in _runs(plan):
        cells = math.lcm(*{stage.tp for _, _, stage in holders})
        numel = sum(sums[-1] for _, sums in sizes["cut"])
        for r, s, stage in holders:
            if stage.tp < cells:
                found[r, s] += numel // stage.tp
    return found


def _holdings(plan: Plan) -> Iterator[_Holding]:
    """Every set of ranks that hold the same segments, once."""
    for stages, sizes in _by_device_groups(plan):
        everyone = tuple(sorted(rank for stage in stages for rank in stage.ranks))
        if all(stage.tp == 1 for stage in stages):
            yield _Holding((everyone,), (1, 1), sizes["all"])
            continue
        if sizes["whole"]:
            yield _Holding((everyone,), (1, 1), sizes["whole"])
        by_share: dict[tuple[int, int], list[Ranks]] = defaultdict(list)
        for share, ranks in _cut(stages):
            by_share[share].append(ranks)
        if sizes["cut"]:
            yield from (_Holding(tuple(sets), share, sizes["cut"]) for share, sets in by_share.items())


def _by_device_groups(plan: Plan) -> Iterator[tuple[list[Stage], Mapping[Which, Sizes]]]:
    """As :func:`_runs`, with what the same ranks hold in several stages together."""
    found: dict[tuple[Ranks, ...], tuple[list[Stage], list[Mapping[Which, Sizes]]]] = {}
    for holders, sizes in _runs(plan):
        stages = [stage for _, _, stage in holders]
        found.setdefault(tuple(stage.ranks for stage in stages), (stages, []))[1].append(sizes)
    for stages, every in found.values():
        if len(every) == 1:
            yield stages, every[0]
            continue
        yield stages, {which: tuple(chain.from_iterable(s[which] for s in reversed(every))) for which in every[0]}


def _cut(stages: Sequence[Stage]) -> Iterator[tuple[tuple[int, int], Ranks]]:
    """Of a parameter that tensor parallelism cuts, who holds how much: one set between any two shard edges."""
    degrees = {stage.tp for stage in stages}
    cells = math.lcm(*degrees)
    for shards, same in groupby(range(cells), key=lambda cell: {tp: cell * tp // cells for tp in degrees}):
        ranks = sorted(rank for stage in stages for rank in stage.ranks[shards[stage.tp] :: stage.tp])
        yield (len(list(same)), cells), tuple(ranks)


def _runs(plan: Plan) -> Iterator[tuple[list[Holder], Mapping[Which, Sizes]]]:
    """All parameters by the stages that hold them: those that tensor parallelism cuts, the others, and all of them."""
    model, sizes = plan.model, LayerSizes(plan.model)
    stages = list(plan.stages())
    tied = [(r, s, stage) for r, s, stage in stages if _holds_tied_embedding(stage, model)]
    table = sizes.running_sums()
    if tied:
        first = [(r, s, stage) for r, s, stage in stages if stage.start == 0]
        word_embedding = ((-1, table["cut"]["embedding"]),)
        table["cut"]["embedding"], table["all"]["embedding"] = (), table["whole"]["embedding"]
        yield first + tied, {"cut": word_embedding, "whole": (), "all": word_embedding}
    reaches = [_reach(stage, model) for _, _, stage in stages]
    for first_position, end in pairwise(sorted({edge for reach in reaches for edge in reach})):
        holders = [
            holder
            for holder, reach in zip(stages, reaches, strict=True)
            if reach[0] <= first_position and end <= reach[1]
        ]
        places = [(position, part) for position, part in _positions(model) if first_position <= position < end]
        yield (
            holders,
            {
                which: tuple((position, sums[part]) for position, part in places if sums[part])
                for which, sums in table.items()
            },
        )


def _positions(model: ModelSpec) -> Iterator[tuple[float, Part]]:
    """Where the parameters are and what they are part of, from the head to the embedding."""
    yield model.num_layers, "head"
    for layer in reversed(range(model.num_layers)):
        yield layer + HALF, "mlp"
        yield layer, "attention"
    yield -1, "embedding"


def _reach(stage: Stage, model: ModelSpec) -> tuple[float, float]:
    """The positions ``[first, end)`` that the stage holds, embedding and head included."""
    first, end = stage.start, stage.end
    return -1 if first == 0 else first, end + 1 if end == model.num_layers else end


def _holds_tied_embedding(stage: Stage, model: ModelSpec) -> bool:
    """The head of a tied model multiplies by the embedding, of which the first stage has the other copy."""
    return model.tied_embeddings and stage.start > 0 and stage.end == model.num_layers
