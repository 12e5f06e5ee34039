"""Which ranks sum how many gradient bytes: the buckets of :mod:`hetero.plan.holders`, layer by layer.

All cut parameters of a layer have the same holders, and so have all replicated ones; where a stage ends between its
attention and its MLP, those of each half. So a layer is two sizes, or two per half, and the buckets of a plan of
thousands of ranks follow without a look at each parameter.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.cost.parts import Part
from hetero.cost.sizes import LayerSizes
from hetero.plan.domains import Domains, lanes_of
from hetero.plan.ir import Plan, Stage
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import HALF

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncBucket:
    """Gradients that are summed together.

    ranks: in ascending order; more than one.
    position: the lowest layer in it; -1 is the embedding, half a layer more than a layer its MLP, the number of layers
        the head.
    domains: the ranks by domain, where they sum in two levels; otherwise empty.
    """

    ranks: Ranks
    numel: int
    position: float
    domains: tuple[Ranks, ...] = ()


def sync_buckets(plan: Plan, *, bucket_numel: int) -> tuple[SyncBucket, ...]:
    """The buckets that more than one rank holds, in the order in which all ranks launch them."""
    domains = Domains(plan.gradient_sync.domains)
    open_buckets: dict[Ranks, int] = defaultdict(int)
    closed = []
    last_position: dict[Ranks, float] = {}
    for position, numel, ranks in _shares(plan):
        if len(ranks) < 2:
            continue
        open_buckets[ranks] += numel
        last_position[ranks] = position
        if open_buckets[ranks] >= bucket_numel:
            closed.append(SyncBucket(ranks, open_buckets.pop(ranks), position, domains.parts(ranks)))
    closed += [
        SyncBucket(ranks, numel, last_position[ranks], domains.parts(ranks)) for ranks, numel in open_buckets.items()
    ]
    return tuple(sorted(closed, key=lambda bucket: (-bucket.position, not domains.spans(bucket.ranks), bucket.ranks)))


def communicators(plan: Plan) -> set[Ranks]:
    """The sets of ranks that have a communicator to sum gradients with: holders, or their domains and lanes."""
    domains = Domains(plan.gradient_sync.domains)
    found = set()
    for ranks in {ranks for _, _, ranks in _shares(plan) if len(ranks) > 1}:
        parts = domains.parts(ranks)
        found |= {part for part in (*parts, *lanes_of(parts)) if len(part) > 1} if parts else {ranks}
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
    for position, numel, ranks in _shares(plan):
        per_share = numel / sum(weight[rank] for rank in ranks)
        for rank in ranks:
            stages = places[rank]
            # What none of its stages reaches is the tied embedding's other copy, on the last of them.
            held_by = next((s for s, first, end in stages[:-1] if first <= position < end), stages[-1][0])
            owned[rank][held_by] += per_share * weight[rank]
    return owned


def cut_parameters(plan: Plan) -> dict[tuple[int, int], int]:
    """By replica and stage, the elements on one rank that the shard edges of other holders cut.

    Their pieces go to several buckets, so that the runtime holds weight and gradient a second time in its own order.
    """
    model, sizes = plan.model, LayerSizes(plan.model)
    found = {(r, s): 0 for r, s, _ in plan.stages()}
    keys, stages = zip(*(((r, s), stage) for r, s, stage in plan.stages()), strict=True)
    reaches = [_reach(stage, model) for stage in stages]
    for position, part in _positions(plan):
        holders = [i for i, (first, end) in enumerate(reaches) if first <= position < end]
        if position == -1:
            holders += [i for i, stage in enumerate(stages) if _holds_tied_embedding(stage, model)]
        cells = math.lcm(*(stages[i].tp for i in holders))
        for i in holders:
            if stages[i].tp < cells:
                found[keys[i]] += sizes.cut(part) // stages[i].tp
    return found


def _positions(plan: Plan) -> Iterator[tuple[float, Part]]:
    """Where the parameters are and what they are part of, from the head to the embedding."""
    model = plan.model
    cut = {stage.end_layer for _, _, stage in plan.stages() if stage.ends_with_attention}
    yield model.num_layers, "head"
    for layer in reversed(range(model.num_layers)):
        if layer in cut:
            yield layer + HALF, "mlp"
            yield layer, "attention"
        else:
            yield layer, "block"
    yield -1, "embedding"


def _shares(plan: Plan) -> Iterator[tuple[float, int, Ranks]]:
    """(position, elements, ranks that hold them), from the head to the embedding."""
    model = plan.model
    stages = [stage for _, _, stage in plan.stages()]
    reaches = [_reach(stage, model) for stage in stages]
    sizes = LayerSizes(model)
    for position, part in _positions(plan):
        holders = [stage for stage, (first, end) in zip(stages, reaches, strict=True) if first <= position < end]
        tied = [stage for stage in stages if _holds_tied_embedding(stage, model)] if position == -1 else []
        yield from _cut(position, sizes.cut(part), holders + tied)
        yield from _whole(position, sizes.whole(part), holders)


def _cut(position: float, numel: int, holders: Sequence[Stage]) -> Iterator[tuple[float, int, Ranks]]:
    """Cut parameters: one share per cell between the shard edges of all holders."""
    if not numel:
        return
    cells = math.lcm(*(stage.tp for stage in holders))
    for cell in range(cells):
        ranks = sorted(
            stage.ranks[d * stage.tp + cell * stage.tp // cells] for stage in holders for d in range(stage.dp)
        )
        yield position, numel // cells, tuple(ranks)


def _whole(position: float, numel: int, holders: Sequence[Stage]) -> Iterator[tuple[float, int, Ranks]]:
    if numel:
        yield position, numel, tuple(sorted(rank for stage in holders for rank in stage.ranks))


def _reach(stage: Stage, model: ModelSpec) -> tuple[float, float]:
    """The positions ``[first, end)`` that the stage holds, embedding and head included."""
    first, end = stage.start, stage.end
    return -1 if first == 0 else first, end + 1 if end == model.num_layers else end


def _holds_tied_embedding(stage: Stage, model: ModelSpec) -> bool:
    """The head of a tied model multiplies by the embedding, of which the first stage has the other copy."""
    return model.tied_embeddings and stage.start > 0 and stage.end == model.num_layers
