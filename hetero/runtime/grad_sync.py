"""Sums the gradients of every piece over the ranks that hold it, beside the rest of the backward."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from hetero.distributed.pace import Collective, Pace, Waitable
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.state import TensorSlice


class GradientSync:
    """The gradient sums of one rank.

    A step is: :meth:`zero`, backwards, :meth:`expect_last_backward`, the last backward, :meth:`finish`. Between the
    last two, every bucket is reduced as soon as its gradients are complete, but never before an earlier bucket of the
    global order: all ranks launch the collectives that they share in the same order.
    Autograd tells which gradients are there, and whoever adds to a ``.grad`` past it calls :meth:`arrived`.

    Args:
        buckets: this rank's, in the global order.
        overlap: reduce them beside the last backward instead of after it.
        pace: when they happen.
        scatter: leave a rank with the sums of its own shards only, in ``.gradients[owned]`` of each bucket.
    """

    def __init__(
        self, buckets: Sequence[LocalBucket], *, overlap: bool, scatter: bool = False, pace: Pace | None = None
    ) -> None:
        self.buckets = buckets
        self._pace = pace or Pace()
        self._overlap = overlap
        self._scatter = scatter
        self._launched = 0
        self._listening = False
        self._pending: list[Waitable] = []
        self._missing: list[set[torch.nn.Parameter]] = [set() for _ in buckets]
        self._buckets_of: dict[torch.nn.Parameter, list[int]] = {}
        for i, local in enumerate(buckets):
            for tensor in local.tensors():
                self._buckets_of.setdefault(tensor, []).append(i)
        for tensor in self._buckets_of:
            tensor.register_post_accumulate_grad_hook(self.arrived)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for local in self.buckets:
            local.gradients.zero_()
            for piece in local.pieces:
                if not piece.is_view and piece.tensor.grad is not None:
                    piece.tensor.grad.zero_()

    def expect_last_backward(self) -> None:
        """From now on what arrives of a parameter's gradient is the last of this step."""
        self._launched = 0
        self._listening = self._overlap
        self._missing = [local.tensors() for local in self.buckets]

    def arrived(self, tensor: torch.Tensor) -> None:
        """The gradient of ``tensor`` is complete, once the last backward is expected."""
        if not self._listening:
            return
        for i in self._buckets_of[tensor]:
            self._missing[i].discard(tensor)
        while self._launched < len(self.buckets) and not self._missing[self._launched]:
            self._launch_next()

    def finish(self) -> None:
        """Reduce what is left and wait for everything.

        Afterwards the buffers hold the sums, and so does every ``.grad``; with ``scatter``, only the owned shards do.
        Per bucket an all-reduce (sum) over its holders, or a reduce-scatter, in the order of ``gradient_buckets``; in
        two levels the phases of :class:`hetero.runtime.levels.Levels`, bucket after bucket in the same order.
        """
        self._listening = False
        while self._launched < len(self.buckets):
            self._launch_next()
        for work in self._pending:
            work.wait()
        self._pending.clear()
        if not self._scatter:
            for local in self.buckets:
                for piece in local.pieces:
                    piece.return_gradient()

    def summed(self) -> Iterator[TensorSlice]:
        """The gradients that this rank has the sums of, after :meth:`finish`."""
        for local in self.buckets:
            within = local.owned if self._scatter else local.whole
            yield from local.slices("gradients", local.gradients, first=0, within=within)

    def _launch_next(self) -> None:
        local = self.buckets[self._launched]
        self._launched += 1
        for piece in local.pieces:
            piece.collect_gradient()
        if not local.is_shared:
            return
        operation: Collective = "reduce_scatter" if self._scatter else "all_reduce"
        start = _reduce_scatter if self._scatter else _all_reduce
        self._pending += self._pace.collective(operation, local.bucket, partial(start, local))


def _all_reduce(local: LocalBucket) -> Sequence[Waitable]:
    """Sum the gradients of ``local`` on all its ranks."""
    if local.levels is not None:
        return local.levels.sum_all(local.gradients)
    assert local.group is not None
    return [dist.all_reduce(local.gradients, group=local.group, async_op=True)]


def _reduce_scatter(local: LocalBucket) -> Sequence[Waitable]:
    """Sum the gradients of ``local``, each rank's shard on that rank."""
    if local.levels is not None:
        return local.levels.sum_owned(local.gradients)
    group = local.group
    assert group is not None
    if local.bucket.has_equal_shards:
        own = local.gradients[local.owned]
        return [dist.reduce_scatter_tensor(own, local.gradients, group=group, async_op=True)]
    # Neither NCCL nor gloo scatters unequal shards in one collective.
    shards = ((rank, local.gradients[local.bucket.shard_of(rank)]) for rank in local.bucket.ranks)
    return [dist.reduce(shard, dst=rank, group=group, async_op=True) for rank, shard in shards if shard.numel()]
