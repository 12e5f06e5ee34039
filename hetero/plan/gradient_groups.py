"""Cuts every parameter into segments that the same ranks hold, and packs them into buckets that those ranks sum.

Every parameter has a name, a global shape, and in each stage that holds it a set of ranks with shards of it. It is cut
at the union of all shards' edges: each segment then has one *gradient group*, the ranks that hold exactly that segment,
and their gradients have to be summed. A weight of 12 rows that one replica holds with tp 2 and another with tp 3:

    replica 0   |    rank 0: 0-5    |    rank 1: 6-11   |
    replica 1   | rank 2: 0-3 | rank 3: 4-7 | rank 4: 8-11|
    segments    | 0-3         | 4-5 | 6-7   | 8-11        |
    groups      | {0, 2}      |{0, 3}|{1, 3}| {1, 4}      |

This one rule serves replicas with other layer cuts, other tensor parallelism, data parallelism inside a stage, and tied
embeddings, which are two stages that hold one name.

A replicated parameter is one segment on all ranks of its stages. Where each of the tp ranks has the whole gradient,
each contributes 1 / tp of it; where each has a part (sequence parallelism), each contributes what it has.

Segments of one gradient group lie behind one another in a flat buffer, the bucket, and are summed by one collective.
Each of its ranks owns one shard of the buffer, so that every element of the model has exactly one owner: who counts it
in the norm, saves it, and, with a distributed optimizer (ZeRO-1, arXiv 1910.02054, section 5.1), updates it.

    bucket of {0, 2}   | segment of layer 1 | segment of layer 0 | padding |
    owners             |        rank 0         |        rank 2             |
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from hetero.plan.ir import Plan, Stage
from hetero.plan.offload import (
    gradients_on_host,
    hosts_update,
    stages_of_ranks,
    updates_on_host,
    weights_on_host,
)
from hetero.plan.sync_domains import Domains
from hetero.spec.parameters import Parameter, shard_intervals, stage_parameters

ALIGNMENT = 64
"""Elements of a bucket at whose multiples segments and shards begin: 128 bytes in half precision, as kernels want."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSegment:
    """A part of a parameter that one gradient group holds: indices ``[start, end)`` of its shard dimension.

    ``[0, 1)`` stands for a parameter that tensor parallelism does not cut.
    """

    parameter: Parameter
    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        dim = self.parameter.shard_dim
        if dim is None:
            return self.parameter.numel
        return self.parameter.numel // self.parameter.shape[dim] * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Segments of one gradient group, in a flat buffer that one collective sums.

    ranks: the gradient group, in ascending order.
    segments: in the order of the buffer, those with weight decay first.
    position: the lowest one of the segments; once the backward has passed it, all gradients are there.
    shares: for each of ``ranks``, the relative size of its shard of the buffer.
    domains: the ranks by domain, where they sum hierarchically (:mod:`.sync_domains`); otherwise empty.
    on_host: those of ``ranks`` that have the optimizer's state of their shard on their host (:mod:`.offload`).
    gradients_on_host: those of them that add up their gradients there.
    weights_on_host: those of these that have their weights there.
    """

    ranks: tuple[int, ...]
    segments: tuple[ShardSegment, ...]
    position: float
    shares: tuple[int, ...]
    domains: tuple[tuple[int, ...], ...] = ()
    on_host: frozenset[int] = frozenset()
    gradients_on_host: frozenset[int] = frozenset()
    weights_on_host: frozenset[int] = frozenset()

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return sum(segment.numel for segment in self.segments)

    @property
    def has_equal_shards(self) -> bool:
        """All shards have one length, as torch's ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` need it."""
        return len(set(self.shares)) == 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment begins in the buffer, and where the last one ends, padding included."""
        return tuple(accumulate((_aligned(segment.numel) for segment in self.segments), initial=0))

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
        """Number of elements of the buffer, padding included."""
        return self.shard_edges[-1]

    def shard_of(self, rank: int) -> slice:
        """The part of the buffer that ``rank`` owns."""
        i = self.ranks.index(rank)
        return slice(self.shard_edges[i], self.shard_edges[i + 1])


def _aligned(numel: int) -> int:
    return math.ceil(numel / ALIGNMENT) * ALIGNMENT


def gradient_buckets(plan: Plan, *, bucket_numel: int) -> tuple[Bucket, ...]:
    """All buckets of ``plan``, in the global order in which every rank launches its own: head first, embedding last.

    Of the buckets of one layer, those that cross domains come first. A bucket is closed once it has ``bucket_numel``
    elements, about; a larger parameter is a bucket by itself. And it is closed where some rank of it leaves to its host
    what comes next, or no longer does.
    """
    domains = Domains(plan.gradient_sync.domains)
    held_by = stages_of_ranks([(stage.ranks, stage) for _, _, stage in plan.stages()])
    asks_hosts = hosts_update(stage for _, _, stage in plan.stages())
    shares = {rank: stage.optimizer_share for _, _, stage in plan.stages() for rank in stage.ranks}
    open_buckets: dict[tuple[int, ...], list[ShardSegment]] = {}
    closed: list[Bucket] = []

    def close(ranks: tuple[int, ...]) -> None:
        segments = sorted(open_buckets.pop(ranks), key=lambda segment: not segment.parameter.decays)
        position = min(segment.parameter.position for segment in segments)
        updating, adding, keeping = on_host(ranks, position)
        closed.append(
            Bucket(
                ranks=ranks,
                segments=tuple(segments),
                position=position,
                shares=tuple(shares[rank] for rank in ranks),
                domains=domains.parts(ranks),
                on_host=updating,
                gradients_on_host=adding,
                weights_on_host=keeping,
            )
        )

    def on_host(ranks: tuple[int, ...], position: float) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        """Those of ``ranks`` whose hosts have the optimizer's state, whose hosts have gradients, and weights."""
        updating = frozenset(rank for rank in ranks if asks_hosts and updates_on_host(position, held_by[rank]))
        adding = frozenset(rank for rank in updating if gradients_on_host(position, held_by[rank]))
        return updating, adding, frozenset(rank for rank in adding if weights_on_host(position, held_by[rank]))

    for segments in _segments_backward(plan):
        for segment, ranks in segments:
            position = segment.parameter.position
            others = open_buckets.get(ranks, [])
            if others and on_host(ranks, position) != on_host(ranks, others[-1].parameter.position):
                close(ranks)
            open_buckets.setdefault(ranks, []).append(segment)
        # Not between two segments of a parameter: side by side in one buffer they need not be copied there.
        for ranks in dict.fromkeys(ranks for _, ranks in segments):
            if sum(segment.numel for segment in open_buckets[ranks]) >= bucket_numel:
                close(ranks)
    for ranks in list(open_buckets):
        close(ranks)
    return tuple(sorted(closed, key=lambda bucket: (-bucket.position, not domains.spans(bucket.ranks), bucket.ranks)))


def by_number(buckets: Sequence[Bucket]) -> list[Bucket]:
    """All ``buckets`` of a plan in the order of the numbers by which programs name them: first those of several ranks,
    which collectives sum, and then those of one."""
    return sorted(buckets, key=lambda bucket: len(bucket.ranks) == 1)


def gradient_scale(parameter: Parameter, stage: Stage) -> float:
    """The factor of a rank's own gradient of ``parameter``, with which the sum over its group is the whole gradient.

    1 where the tensor-parallel ranks of ``stage`` hold different parts of it, 1 / tp where each holds the same.
    """
    if parameter.shard_dim is not None or parameter.partial_gradient == "always":
        return 1.0
    if parameter.partial_gradient == "sequence_parallel" and stage.splits_sequence:
        return 1.0
    return 1.0 / stage.tp


def _segments_backward(plan: Plan) -> Iterator[list[tuple[ShardSegment, tuple[int, ...]]]]:
    """The segments of each parameter with their gradient groups, in the order in which the backward finishes them."""
    stages_with: dict[str, tuple[Parameter, list[Stage]]] = {}
    for _, _, stage in plan.stages():
        for parameter in stage_parameters(plan.model, first_layer=stage.start, end_layer=stage.end):
            stages_with.setdefault(parameter.name, (parameter, []))[1].append(stage)
    for parameter, stages in sorted(stages_with.values(), key=lambda found: -found[0].position):
        yield list(_segments_of(parameter, stages))


def _segments_of(parameter: Parameter, stages: Sequence[Stage]) -> Iterator[tuple[ShardSegment, tuple[int, ...]]]:
    if parameter.shard_dim is None:
        ranks = tuple(sorted(rank for stage in stages for rank in stage.ranks))
        yield ShardSegment(parameter=parameter, start=0, end=1), ranks
        return
    size = parameter.shape[parameter.shard_dim]
    # All shard edges are multiples of block / lcm(tp), whatever the tp: no shard cuts the cells between them.
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
