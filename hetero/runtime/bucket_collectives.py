"""Sums the gradients of a bucket over its holders and gathers its weights: one strategy per bucket, chosen once.

Nobody else asks how many holders a bucket has, how their shards are cut, or where they sit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext, require_started
from hetero.distributed.timing import Collective, Waitable
from hetero.plan.gradient_groups import Bucket
from hetero.runtime.collective_sequencer import CollectiveSequencer
from hetero.runtime.hierarchical_collectives import HierarchicalAllReduce, HierarchicalCollectives, HierarchicalShards


class BucketCollectives(Protocol):
    """Starts one rank's part in the collectives of a bucket. All its holders start them in the same order."""

    @property
    def summing(self) -> Collective:
        """The collective that the sum amounts to."""

    @property
    def summed(self) -> slice:
        """The part of the buffer that has the sums afterwards, and that this rank updates therefore."""

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        """Start to sum ``gradients`` over all holders; outside of :attr:`summed` they are left in any state."""

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        """Start to bring each part of ``weights`` from who has updated it to all holders."""


def bucket_collectives(bucket: Bucket, context: ParallelContext, sequencer: CollectiveSequencer) -> BucketCollectives:
    """The strategy for ``bucket`` under the plan of ``context``.

    Args:
        sequencer: run what is in several phases; the same for all buckets of this rank.
    """
    whole, owned = slice(0, bucket.length), bucket.shard_of(context.rank)
    if len(bucket.ranks) == 1:
        return SingleHolder(whole)
    if bucket.domains:
        hierarchical = HierarchicalCollectives(bucket, context.rank, context.hierarchical, sequencer)
        return (
            HierarchicalShards(owned, hierarchical)
            if context.plan.distributed_optimizer
            else HierarchicalAllReduce(whole, hierarchical)
        )
    group = context.gradients[bucket.ranks]
    if not context.plan.distributed_optimizer:
        return AllReduce(whole, group)
    return EqualShards(owned, group) if bucket.has_equal_shards else UnequalShards(owned, group, bucket)


@dataclass(frozen=True, slots=True)
class SingleHolder:
    """Does nothing: no other rank holds the bucket."""

    summed: slice
    summing: Collective = "all_reduce"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        return []

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        return []


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sums by one all-reduce: every holder has all sums and updates all weights, so that nothing is gathered."""

    summed: slice
    group: dist.ProcessGroup
    summing: Collective = "all_reduce"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        return [dist.all_reduce(gradients, group=self.group, async_op=True)]

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        return []


@dataclass(frozen=True, slots=True)
class EqualShards:
    """Sums by one reduce-scatter and gathers by one all-gather, where all shards are equally long."""

    summed: slice
    group: dist.ProcessGroup
    summing: Collective = "reduce_scatter"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        work = dist.reduce_scatter_tensor(gradients[self.summed], gradients, group=self.group, async_op=True)
        return require_started([work])

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        work = dist.all_gather_into_tensor(weights, weights[self.summed], group=self.group, async_op=True)
        return require_started([work])


@dataclass(frozen=True, slots=True)
class UnequalShards:
    """Sums by a reduce to every holder and gathers by a broadcast from each, in the order of the bucket's ranks.

    For shards of unequal length, which neither NCCL nor gloo scatter and gather in one collective.
    """

    summed: slice
    group: dist.ProcessGroup
    bucket: Bucket
    summing: Collective = "reduce_scatter"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        return require_started(
            dist.reduce(shard, dst=rank, group=self.group, async_op=True) for rank, shard in self._shards(gradients)
        )

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        return require_started(
            dist.broadcast(shard, src=rank, group=self.group, async_op=True) for rank, shard in self._shards(weights)
        )

    def _shards(self, values: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """All that are not empty, by their owners."""
        shards = [(rank, values[self.bucket.shard_of(rank)]) for rank in self.bucket.ranks]
        return [(rank, shard) for rank, shard in shards if shard.numel()]
