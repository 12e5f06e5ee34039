"""Who must agree on which gradient.

Every parameter has a name, a global shape, and in each stage that holds it a set of ranks with slices of it. Cut
it at the union of all the slices' edges: each piece then has one group of ranks that hold exactly that piece, and
their gradients have to be summed. This one rule serves replicas with other layer cuts, other tensor parallelism,
data parallelism inside a stage, and tied embeddings, which are two stages that hold one name.

A replicated parameter is one piece on all ranks of its holders. Where each of the tp ranks has the whole gradient,
each contributes 1 / tp of it; where each has a part (sequence parallelism), each contributes what it has.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero.plan.ir import Plan, Stage
from hetero.spec.parameters import Parameter, shard_intervals, stage_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Indices ``[start, end)`` of a parameter's shard dimension; ``[0, 1)`` stands for a parameter that is not cut."""

    parameter: Parameter
    start: int
    end: int

    @property
    def numel(self) -> int:
        dim = self.parameter.shard_dim
        if dim is None:
            return self.parameter.numel
        return self.parameter.numel // self.parameter.shape[dim] * (self.end - self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Pieces that the same ranks hold and reduce with one collective.

    ranks: in ascending order.
    position: the lowest layer position among the pieces: once its backward is done, the bucket is ready.
    """

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]
    position: int

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)


def gradient_buckets(plan: Plan, *, bucket_numel: int) -> tuple[Bucket, ...]:
    """All buckets of ``plan`` in the one order in which every rank launches its own: head first, embedding last.

    ``bucket_numel`` elements close a bucket; a larger piece is a bucket alone.
    """
    open_buckets: dict[tuple[int, ...], list[Piece]] = {}
    closed: list[Bucket] = []

    def close(ranks: tuple[int, ...]) -> None:
        pieces = open_buckets.pop(ranks)
        position = min(piece.parameter.position for piece in pieces)
        closed.append(Bucket(ranks=ranks, pieces=tuple(pieces), position=position))

    for piece, ranks in _pieces_backward(plan):
        held = open_buckets.setdefault(ranks, [])
        held.append(piece)
        if sum(p.numel for p in held) >= bucket_numel:
            close(ranks)
    for ranks in list(open_buckets):
        close(ranks)
    return tuple(sorted(closed, key=lambda bucket: (-bucket.position, bucket.ranks)))


def gradient_scale(parameter: Parameter, stage: Stage) -> float:
    """What a rank of ``stage`` multiplies its gradient of ``parameter`` by, so that the group's sum is the gradient."""
    if parameter.shard_dim is not None or parameter.partial_gradient == "always":
        return 1.0
    if parameter.partial_gradient == "sequence_parallel" and stage.splits_sequence:
        return 1.0
    return 1.0 / stage.tp


def _pieces_backward(plan: Plan) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    """Every piece of every parameter with its ranks, in the order in which the backward finishes them."""
    holders: dict[str, tuple[Parameter, list[Stage]]] = {}
    for _, _, stage in plan.stages():
        for parameter in stage_parameters(plan.model, first_layer=stage.first_layer, end_layer=stage.end_layer):
            holders.setdefault(parameter.name, (parameter, []))[1].append(stage)
    for parameter, stages in sorted(holders.values(), key=lambda held: -held[0].position):
        yield from _pieces_of(parameter, stages)


def _pieces_of(parameter: Parameter, stages: Sequence[Stage]) -> Iterator[tuple[Piece, tuple[int, ...]]]:
    if parameter.shard_dim is None:
        ranks = tuple(sorted(rank for stage in stages for rank in stage.ranks))
        yield Piece(parameter=parameter, start=0, end=1), ranks
        return
    size = parameter.shape[parameter.shard_dim]
    # Shard edges are multiples of block / lcm(tp): the cells between them are what any holder can have.
    cells = math.lcm(*(stage.tp for stage in stages))
    cell = size // parameter.blocks // cells
    edges = {0, size}
    for tp in {stage.tp for stage in stages}:
        for t in range(tp):
            for interval in shard_intervals(parameter, tp=tp, tp_rank=t):
                edges |= {interval.global_start, interval.global_start + interval.length}
    for start, end in pairwise(sorted(edges)):
        shard = start // cell % cells
        holding = sorted(group[shard * stage.tp // cells] for stage in stages for group in stage.tp_groups)
        yield Piece(parameter=parameter, start=start, end=end), tuple(holding)
