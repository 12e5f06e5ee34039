"""Brings updated weights from the ranks that own them to all that hold them, beside the next forward."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hetero.distributed.pace import Pace, Waitable
from hetero.runtime.buckets import LocalBucket


class WeightGather:
    """The weights of one rank after the update of a distributed optimizer.

    A gather is launched for every bucket, those of the embedding first. With ``overlap`` a module waits before its
    forward for the weights that are its own, and :meth:`finish` for the rest.

    Args:
        buckets: this rank's, in the global order of the backward.
        module: whose submodules hold the parameters.
        pace: when gathers happen.
    """

    def __init__(
        self, buckets: Sequence[LocalBucket], module: torch.nn.Module, *, overlap: bool, pace: Pace | None = None
    ) -> None:
        self._buckets = buckets
        self._pace = pace or Pace()
        self._overlap = overlap
        self._pending: dict[int, Sequence[Waitable]] = {}
        if overlap:
            buckets_of: dict[torch.nn.Parameter, list[int]] = {}
            for i, local in enumerate(buckets):
                for tensor in local.tensors():
                    buckets_of.setdefault(tensor, []).append(i)
            for submodule in module.modules():
                own = sorted({i for tensor in submodule.parameters(recurse=False) for i in buckets_of[tensor]})
                if own:
                    submodule.register_forward_pre_hook(self._waits_for(own))

    def start(self) -> None:
        """Launch all gathers, in the reverse of the global order: per bucket an all-gather over its holders, or in two
        levels the phases of :meth:`hetero.runtime.levels.Levels.gather`.
        """
        for i in reversed(range(len(self._buckets))):
            local = self._buckets[i]
            self._pending[i] = []
            if local.is_shared:
                self._pending[i] = self._pace.collective("all_gather", local.bucket, partial(_all_gather, local))
        if not self._overlap:
            self.finish()

    def finish(self) -> None:
        """Wait until every weight is there."""
        for i in list(self._pending):
            self._wait(i)

    def _wait(self, bucket: int) -> None:
        for work in self._pending.pop(bucket, ()):
            work.wait()
        for piece in self._buckets[bucket].pieces:
            piece.return_weight()

    def _waits_for(self, buckets: Sequence[int]) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            for i in buckets:
                if i in self._pending:
                    self._wait(i)

        return hook


def _all_gather(local: LocalBucket) -> Sequence[Waitable]:
    """Every rank's shard of the weights of ``local`` to all ranks."""
    if local.levels is not None:
        return local.levels.gather(local.weights)
    group = local.group
    assert group is not None
    if local.bucket.has_equal_shards:
        return [dist.all_gather_into_tensor(local.weights, local.weights[local.owned], group=group, async_op=True)]
    shards = ((rank, local.weights[local.bucket.shard_of(rank)]) for rank in local.bucket.ranks)
    return [dist.broadcast(shard, src=rank, group=group, async_op=True) for rank, shard in shards if shard.numel()]
