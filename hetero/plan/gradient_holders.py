"""Finds which stages hold which layers, and with that every gradient group, without a look at single parameters.

The stages of all replicas cut the model into *runs* of layers that the same stages hold. All parameters of a run that
tensor parallelism cuts have the same gradient groups, one between any two shard edges, and all others have one: all
ranks of these stages. :mod:`.gradient_groups` makes the same groups parameter by parameter, with what they sum.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from hetero.plan.ir import Plan, Ranks, Stage
from hetero.spec.model import ModelSpec

PlacedStage = tuple[int, int, Stage]
"""A stage with the indices of its replica and of itself."""


@dataclass(frozen=True, slots=True)
class HolderRun:
    """Consecutive layers that the same stages hold.

    holders: in the order of the plan.
    first, end: positions ``[first, end)``: -1 is the embedding, half a layer more than a layer its MLP, and the number
        of layers the head.
    is_tied_embedding: the run is the word embedding alone, held by first stages and again by last ones.
    """

    holders: tuple[PlacedStage, ...]
    first: float
    end: float
    is_tied_embedding: bool = False

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The holders without their places."""
        return tuple(stage for _, _, stage in self.holders)


def holder_runs(plan: Plan) -> Iterator[HolderRun]:
    """The runs of ``plan``, the tied embedding first and then upwards.

    Where a replica's last stage has a second copy of a tied word embedding, that is in no other run.
    """
    stages = list(plan.stages())
    tied = [placed for placed in stages if _holds_tied_embedding(placed[2], plan.model)]
    if tied:
        first = [placed for placed in stages if placed[2].start == 0]
        yield HolderRun((*first, *tied), -1, 0, is_tied_embedding=True)
    spans = [positions_of(stage, plan.model) for _, _, stage in stages]
    edges = sorted({edge for span in spans for edge in span})
    holders: list[list[PlacedStage]] = [[] for _ in edges[1:]]
    for placed, (start, end) in zip(stages, spans, strict=True):
        for held in holders[bisect_left(edges, start) : bisect_left(edges, end)]:
            held.append(placed)
    for held, (start, end) in zip(holders, pairwise(edges), strict=True):
        yield HolderRun(tuple(held), start, end)


def gradient_groups(plan: Plan) -> tuple[Ranks, ...]:
    """The distinct sets of two or more ranks that hold the same parameters, or the same shards of them.

    Each in ascending order; those of the embedding first.
    """
    found: dict[Ranks, None] = {}
    for run in holder_runs(plan):
        stages = run.stages
        if not run.is_tied_embedding or all(stage.tp == 1 for stage in stages):
            # Norms and biases; every run of half a layer has one.
            found[tuple(sorted(rank for stage in stages for rank in stage.ranks))] = None
        if any(stage.tp > 1 for stage in stages):
            found |= dict.fromkeys(ranks for _, ranks in groups_of_shards(stages))
    return tuple(ranks for ranks in found if len(ranks) > 1)


def groups_of_shards(stages: Sequence[Stage]) -> Iterator[tuple[tuple[int, int], Ranks]]:
    """The gradient groups of a sharded parameter with their shares of it: one between any two shard edges.

    A share is how many of how many equal parts.
    """
    degrees = {stage.tp for stage in stages}
    cells = math.lcm(*degrees)
    for shards, same in groupby(range(cells), key=lambda cell: {tp: cell * tp // cells for tp in degrees}):
        ranks = sorted(rank for stage in stages for rank in stage.ranks[shards[stage.tp] :: stage.tp])
        yield (len(list(same)), cells), tuple(ranks)


def positions_of(stage: Stage, model: ModelSpec) -> tuple[float, float]:
    """The positions ``[first, end)`` of what the stage holds, embedding and head included."""
    first, end = stage.start, stage.end
    return -1 if first == 0 else first, end + 1 if end == model.num_layers else end


def _holds_tied_embedding(stage: Stage, model: ModelSpec) -> bool:
    """Whether the stage has the tied model's second copy of the embedding, by which its head multiplies."""
    return model.tied_embeddings and stage.start > 0 and stage.end == model.num_layers
