"""Sums gradients and gathers weights hierarchically, for a bucket whose holders lie in several domains.

Gradients are summed in three phases. Here rail 0 is ranks 0 and 4, rail 1 is ranks 1 and 5; rank 2 has no rail,
because domain B has no third rank:

          domain A, fast links              slow links           domain B, fast links
     rank 0      rank 1      rank 2                              rank 4      rank 5
    [a0 a1]     [b0 b1]     [c0 c1]                             [d0 d1]     [e0 e1]    one part per rail
       |           |           |                                   |           |
       +-----------+-----------+      1. inside: a reduce          +-----------+
       |           |                     per rail                  |           |
    [A0 . ]     [ . A1]     [ .  . ]                            [B0 . ]     [ . B1]    A0 = a0 + b0 + c0
       |           |                                               |           |
       |           +============ 2. across: an all-reduce =========|===========+
       +========================    per rail =====================+            |
       |           |                                               |           |
    [S0 . ]     [ . S1]     [ .  . ]                            [S0 . ]     [ . S1]    S0 = A0 + B0
       |           |           |                                   |           |
       +-----------+-----------+      3. back: a broadcast         +-----------+
       |           |           |         per rail                  |           |
    [S0 S1]     [S0 S1]     [S0 S1]                             [S0 S1]     [S0 S1]

With a distributed optimizer a part is the shard of one owner, travels on one of the rails, and goes to its owner alone;
gathering weights runs the three phases the other way round.

With d domains, every element leaves a domain 2 (d - 1) / d times where all ranks need its sum, and half as often where
only its owner does; with one collective over n holders it is 2 (n - 1) / n and half of that. The scheme is that of
hierarchical all-reduces such as arXiv 1807.11205, with rails that need not be as many as holders.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from hetero.distributed.timing import Collective, Waitable
from hetero.plan.gradient_groups import ALIGNMENT, Bucket
from hetero.plan.ir import Ranks
from hetero.plan.sync_domains import rails_of
from hetero.runtime.collective_sequencer import CollectiveSequencer, Phase


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of the buffer that one rank owns; it crosses the slow links on ``rail``.

    domain: the owner's.
    """

    place: slice
    owner: int
    domain: int
    rail: int

    def root(self, domains: Sequence[Ranks], domain: int) -> int:
        """The rank that has it in ``domain`` between the phases."""
        return domains[domain][self.rail]

    def is_moved_at_home(self, domains: Sequence[Ranks]) -> bool:
        """Its owner is in no rail, and gets and gives it through a neighbour."""
        return self.owner != self.root(domains, self.domain)


class HierarchicalCollectives:
    """Runs the phases of a bucket's sums and gathers in which one rank takes part.

    Args:
        groups: by the ranks of the holders in a domain and of a rail, where those are two or more.
        sequencer: run the phases; the same for all buckets of this rank.
    """

    def __init__(
        self, bucket: Bucket, rank: int, groups: Mapping[Ranks, dist.ProcessGroup], sequencer: CollectiveSequencer
    ) -> None:
        self._bucket = bucket
        self._domains = bucket.domains
        self._home = next(d for d, ranks in enumerate(bucket.domains) if rank in ranks)
        self._neighbours = bucket.domains[self._home]
        self._place = self._neighbours.index(rank)
        self._rails = rails_of(bucket.domains)
        self._groups = groups
        self._sequencer = sequencer

    def sum_all(self, values: torch.Tensor) -> Sequence[Waitable]:
        """Every rank ends with the sum of ``values``, each element summed in one place, so with the same bits.

        Inside: a reduce per rail over the domain, or one reduce-scatter where every holder of it has a rail of equal
        size. Across: one all-reduce over the rail. Back: a broadcast per rail, or an all-gather.
        """
        parts = self._cut(values)
        scatters = len(self._neighbours) == len(parts) and len({part.numel() for part in parts}) == 1

        def inside() -> list[dist.Work | None]:
            if scatters:
                return [dist.reduce_scatter_tensor(parts[self._place], values, group=self._inside, async_op=True)]
            return [
                dist.reduce(part, dst=root, group=self._inside, async_op=True)
                for part, root in zip(parts, self._neighbours, strict=False)
                if part.numel()
            ]

        def across() -> list[dist.Work | None]:
            part = parts[self._place]
            return [dist.all_reduce(part, group=self._across, async_op=True)] if part.numel() else []

        def back() -> list[dist.Work | None]:
            if scatters:
                return [dist.all_gather_into_tensor(values, parts[self._place], group=self._inside, async_op=True)]
            return [
                dist.broadcast(part, src=root, group=self._inside, async_op=True)
                for part, root in zip(parts, self._neighbours, strict=False)
                if part.numel()
            ]

        return self._start(inside, across, back)

    def sum_owned(self, values: torch.Tensor) -> Sequence[Waitable]:
        """Every rank ends with the sum of its own shard of ``values``; the rest is left in any state.

        Inside: a reduce per shard over the domain. Across: a reduce over the rail per shard that it carries, to the
        domain of its owner. Back: a broadcast in the owner's domain of each shard whose owner has no rail.
        """
        domains = self._domains

        def inside() -> list[dist.Work | None]:
            return [
                dist.reduce(values[s.place], dst=s.root(domains, self._home), group=self._inside, async_op=True)
                for s in self._shards()
            ]

        def across() -> list[dist.Work | None]:
            return [
                dist.reduce(values[s.place], dst=s.root(domains, s.domain), group=self._across, async_op=True)
                for s in self._shards()
                if s.rail == self._place
            ]

        def back() -> list[dist.Work | None]:
            return [
                dist.broadcast(values[s.place], src=s.root(domains, s.domain), group=self._inside, async_op=True)
                for s in self._shards()
                if s.domain == self._home and s.is_moved_at_home(domains)
            ]

        return self._start(inside, across, back)

    def gather(self, values: torch.Tensor) -> Sequence[Waitable]:
        """Every rank ends with all shards of ``values``, of which it had its own.

        Inside: a broadcast in each domain per shard of its ranks. Across: a broadcast over the rail per shard that it
        carries, from the domain of its owner. Back: a broadcast in each domain per shard of the other domains.
        """
        domains = self._domains

        def inside() -> list[dist.Work | None]:
            return [
                dist.broadcast(values[s.place], src=s.owner, group=self._inside, async_op=True)
                for s in self._shards()
                if s.domain == self._home
            ]

        def across() -> list[dist.Work | None]:
            return [
                dist.broadcast(values[s.place], src=s.root(domains, s.domain), group=self._across, async_op=True)
                for s in self._shards()
                if s.rail == self._place
            ]

        def back() -> list[dist.Work | None]:
            return [
                dist.broadcast(values[s.place], src=s.root(domains, self._home), group=self._inside, async_op=True)
                for s in self._shards()
                if s.domain != self._home
            ]

        return self._start(inside, across, back)

    def _start(self, inside: Phase, across: Phase, back: Phase) -> Sequence[Waitable]:
        """Run those in which this rank takes part."""
        has_neighbours, has_rail = len(self._neighbours) > 1, self._place < len(self._rails)
        taking_part = ((inside, has_neighbours), (across, has_rail), (back, has_neighbours))
        return [self._sequencer.start([phase for phase, takes_part in taking_part if takes_part])]

    @property
    def _inside(self) -> dist.ProcessGroup:
        return self._groups[self._neighbours]

    @property
    def _across(self) -> dist.ProcessGroup:
        return self._groups[self._rails[self._place]]

    def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        """``values`` in one part per rail, at aligned positions."""
        count, unit = len(self._rails), ALIGNMENT
        edges = [values.numel() * i // count // unit * unit for i in range(count)] + [values.numel()]
        return [values[start:end] for start, end in pairwise(edges)]

    def _shards(self) -> Iterator[_Shard]:
        """All that are not empty, in the order of their owners in the bucket's domains."""
        for d, ranks in enumerate(self._domains):
            for i, rank in enumerate(ranks):
                place = self._bucket.shard_of(rank)
                if place.start < place.stop:
                    yield _Shard(place, rank, d, i % len(self._rails))


@dataclass(frozen=True, slots=True)
class HierarchicalAllReduce:
    """All-reduces hierarchically: every holder has all sums and updates all weights, so that nothing is gathered."""

    summed: slice
    hierarchical: HierarchicalCollectives
    summing: Collective = "all_reduce"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        return self.hierarchical.sum_all(gradients)

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        return []


@dataclass(frozen=True, slots=True)
class HierarchicalShards:
    """Reduces each shard hierarchically to the holder that updates it, and gathers the updated ones."""

    summed: slice
    hierarchical: HierarchicalCollectives
    summing: Collective = "reduce_scatter"

    def sum(self, gradients: torch.Tensor) -> Sequence[Waitable]:
        return self.hierarchical.sum_owned(gradients)

    def gather(self, weights: torch.Tensor) -> Sequence[Waitable]:
        return self.hierarchical.gather(weights)
