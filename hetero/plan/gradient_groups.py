"""Who must agree on which gradient.

Every parameter has a name, a global shape, and in each stage that holds it a set of ranks with slices of it. Cut
it at the union of all the slices' edges: each segment then has one group of ranks that hold exactly that segment, and
their gradients have to be summed. This one rule serves replicas with other layer cuts, other tensor parallelism,
data parallelism inside a stage, and tied embeddings, which are two stages that hold one name.

A replicated parameter is one segment on all ranks of its holders. Where each of the tp ranks has the whole gradient,
each contributes 1 / tp of it; where each has a part (sequence parallelism), each contributes what it has.

Segments with the same holders lie behind one another in a flat buffer, the bucket. Each of its ranks answers for one
shard of the buffer, so that every element of the model has exactly one owner: who counts it in the norm, saves it,
and, with a distributed optimizer (ZeRO-1, arXiv 1910.02054), updates it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hetero.plan.ir import Plan, Stage
from hetero.plan.sync_domains import Domains
from hetero.spec.parameters import Parameter, shard_intervals, stage_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSegment:
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


ALIGNMENT = 64
"""Elements. Segments and shards begin at multiples of it, 128 bytes in half precision, as matrix kernels want."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Segments that the same ranks hold and reduce with one collective.

    ranks: in ascending order.
    segments: those that decay first.
    position: the lowest one of the segments: once its backward is done, the bucket is ready.
    shares: by rank, the weight of its shard of the buffer.
    domains: the ranks by domain, where they sum in two levels (:mod:`.sync_domains`); otherwise empty.
    """

    ranks: tuple[int, ...]
    segments: tuple[ShardSegment, ...]
    position: float
    shares: tuple[int, ...]
    domains: tuple[tuple[int, ...], ...] = ()

    @property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    @property
    def has_equal_shards(self) -> bool:
        return len(set(self.shares)) == 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment begins in the buffer, and where the last one's place ends."""
        return tuple(accumulate((_aligned(segment.numel) for segment in self.segments), initial=0))

    @cached_property
    def end_of_decayed(self) -> int:
        """Where the first segment that does not decay begins."""
        return self.offsets[sum(segment.parameter.decays for segment in self.segments)]

    @cached_property
    def shard_edges(self) -> tuple[int, ...]:
        """Where the shard of each rank begins in the buffer, and the buffer's end.

        Equal shares make shards of equal length, which may leave some padding at the end. Otherwise shard i ends at
        the aligned position next to (share_0 + ... + share_i) / (sum of shares) of the buffer.
        """
        used = self.offsets[-1]
        if self.has_equal_shards:
            shard = _aligned(math.ceil(used / len(self.ranks)))
            return tuple(shard * i for i in range(len(self.ranks) + 1))
        total = sum(self.shares)
        return tuple(_aligned(used * taken // total) for taken in accumulate(self.shares, initial=0))

    @property
    def length(self) -> int:
        """Elements of the buffer."""
        return self.shard_edges[-1]

    def shard_of(self, rank: int) -> slice:
        """The part of the buffer that ``rank`` answers for."""
        i = self.ranks.index(rank)
        return slice(self.shard_edges[i], self.shard_edges[i + 1])


def _aligned(numel: int) -> int:
    return math.ceil(numel / ALIGNMENT) * ALIGNMENT


def gradient_buckets(plan: Plan, *, bucket_numel: int) -> tuple[Bucket, ...]:
    """All buckets of ``plan`` in the one order in which every rank launches its own: head first, embedding last.

    Of one layer's, those that leave a domain go first. ``bucket_numel`` elements close a bucket; a larger parameter is
    a bucket alone.
    """
    domains = Domains(plan.gradient_sync.domains)
    shares = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
    open_buckets: dict[tuple[int, ...], list[ShardSegment]] = {}
    closed: list[Bucket] = []

    def close(ranks: tuple[int, ...]) -> None:
        segments = sorted(open_buckets.pop(ranks), key=lambda segment: not segment.parameter.decays)
        position = min(segment.parameter.position for segment in segments)
        taken = tuple(shares[rank] for rank in ranks)
        parts = domains.parts(ranks)
        closed.append(Bucket(ranks=ranks, segments=tuple(segments), position=position, shares=taken, domains=parts))

    for segments in _segments_backward(plan):
        for segment, ranks in segments:
            open_buckets.setdefault(ranks, []).append(segment)
        # Not between two segments of a parameter: side by side in one buffer they need not be copied there.
        for ranks in dict.fromkeys(ranks for _, ranks in segments):
            if sum(segment.numel for segment in open_buckets[ranks]) >= bucket_numel:
                close(ranks)
    for ranks in list(open_buckets):
        close(ranks)
    return tuple(sorted(closed, key=lambda bucket: (-bucket.position, not domains.spans(bucket.ranks), bucket.ranks)))


def gradient_scale(parameter: Parameter, stage: Stage) -> float:
    """What a rank of ``stage`` multiplies its gradient of ``parameter`` by, so that the group's sum is the gradient."""
    if parameter.shard_dim is not None or parameter.partial_gradient == "always":
        return 1.0
    if parameter.partial_gradient == "sequence_parallel" and stage.splits_sequence:
        return 1.0
    return 1.0 / stage.tp


def _segments_backward(plan: Plan) -> Iterator[list[tuple[ShardSegment, tuple[int, ...]]]]:
    """The segments of every parameter with their ranks, in the order in which the backward finishes the parameters."""
    holders: dict[str, tuple[Parameter, list[Stage]]] = {}
    for _, _, stage in plan.stages():
        for parameter in stage_parameters(plan.model, first_layer=stage.start, end_layer=stage.end):
            holders.setdefault(parameter.name, (parameter, []))[1].append(stage)
    for parameter, stages in sorted(holders.values(), key=lambda held: -held[0].position):
        yield list(_segments_of(parameter, stages))


def _segments_of(parameter: Parameter, stages: Sequence[Stage]) -> Iterator[tuple[ShardSegment, tuple[int, ...]]]:
    if parameter.shard_dim is None:
        ranks = tuple(sorted(rank for stage in stages for rank in stage.ranks))
        yield ShardSegment(parameter=parameter, start=0, end=1), ranks
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
        yield ShardSegment(parameter=parameter, start=start, end=end), tuple(holding)
