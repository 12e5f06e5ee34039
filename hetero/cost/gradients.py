"""Which ranks sum how many gradient bytes: the buckets of :mod:`hetero.plan.holders`, layer by layer.

All cut parameters of a layer have the same holders, and so have all replicated ones. So a layer is two sizes, and the
buckets of a plan of thousands of ranks follow without a look at each parameter.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.cost.sizes import LayerSizes
from hetero.plan.domains import Domains, lanes_of
from hetero.plan.ir import Plan, Stage
from hetero.spec.model import ModelSpec

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncBucket:
    """Gradients that are summed together.

    ranks: in ascending order; more than one.
    position: the lowest layer in it; -1 is the embedding, the number of layers the head.
    domains: the ranks by domain, where they sum in two levels; otherwise empty.
    """

    ranks: Ranks
    numel: int
    position: int
    domains: tuple[Ranks, ...] = ()


def sync_buckets(plan: Plan, *, bucket_numel: int) -> tuple[SyncBucket, ...]:
    """The buckets that more than one rank holds, in the order in which all ranks launch them."""
    domains = Domains(plan.gradient_sync.domains)
    open_buckets: dict[Ranks, int] = defaultdict(int)
    closed = []
    last_position: dict[Ranks, int] = {}
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


def owned_parameters(plan: Plan) -> dict[int, float]:
    """By rank, the elements that it owns: of what it holds, its share among all that hold the same."""
    weight = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
    owned = dict.fromkeys(weight, 0.0)
    for _, numel, ranks in _shares(plan):
        per_share = numel / sum(weight[rank] for rank in ranks)
        for rank in ranks:
            owned[rank] += per_share * weight[rank]
    return owned


def cut_parameters(plan: Plan) -> dict[tuple[int, int], int]:
    """By replica and stage, the elements on one rank that the shard edges of other holders cut.

    Their pieces go to several buckets, so that the runtime holds weight and gradient a second time in its own order.
    """
    model, sizes = plan.model, LayerSizes(plan.model)
    found = {(r, s): 0 for r, s, _ in plan.stages()}
    for position in range(-1, model.num_layers + 1):
        holders = [(r, s, stage) for r, s, stage in plan.stages() if _holds(stage, position, model)]
        if position == -1:
            holders += [(r, s, stage) for r, s, stage in plan.stages() if _holds_tied_embedding(stage, model)]
        cells = math.lcm(*(stage.tp for _, _, stage in holders))
        for r, s, stage in holders:
            if stage.tp < cells:
                found[r, s] += sizes.cut(position) // stage.tp
    return found


def _shares(plan: Plan) -> Iterator[tuple[int, int, Ranks]]:
    """(position, elements, ranks that hold them), from the head to the embedding."""
    model = plan.model
    stages = [stage for _, _, stage in plan.stages()]
    sizes = LayerSizes(model)
    for position in range(model.num_layers, -2, -1):
        holders = [stage for stage in stages if _holds(stage, position, model)]
        tied = [stage for stage in stages if _holds_tied_embedding(stage, model)] if position == -1 else []
        yield from _cut(position, sizes.cut(position), holders + tied)
        yield from _whole(position, sizes.whole(position), holders)


def _cut(position: int, numel: int, holders: Sequence[Stage]) -> Iterator[tuple[int, int, Ranks]]:
    """Cut parameters: one share per cell between the shard edges of all holders."""
    if not numel:
        return
    cells = math.lcm(*(stage.tp for stage in holders))
    for cell in range(cells):
        ranks = sorted(
            stage.ranks[d * stage.tp + cell * stage.tp // cells] for stage in holders for d in range(stage.dp)
        )
        yield position, numel // cells, tuple(ranks)


def _whole(position: int, numel: int, holders: Sequence[Stage]) -> Iterator[tuple[int, int, Ranks]]:
    if numel:
        yield position, numel, tuple(sorted(rank for stage in holders for rank in stage.ranks))


def _holds(stage: Stage, position: int, model: ModelSpec) -> bool:
    if position == -1:
        return stage.first_layer == 0
    if position == model.num_layers:
        return stage.end_layer == model.num_layers
    return stage.first_layer <= position < stage.end_layer


def _holds_tied_embedding(stage: Stage, model: ModelSpec) -> bool:
    """The head of a tied model multiplies by the embedding, of which the first stage has the other copy."""
    return model.tied_embeddings and stage.first_layer > 0 and stage.end_layer == model.num_layers
