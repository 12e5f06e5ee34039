"""Sums the gradients of every piece over the ranks that hold it, beside the rest of the backward.

Each rank keeps one flat buffer per bucket of :func:`hetero.plan.holders.gradient_buckets`. A parameter that is one
piece has its ``.grad`` inside that buffer, so accumulation writes there and nothing is copied; one that is cut by
another holder's edges is copied piece by piece before and after.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext, StageContext
from hetero.plan.holders import Bucket, Piece, gradient_buckets, gradient_scale
from hetero.spec.parameters import Interval, Parameter, shard_intervals

NamedParameters = Mapping[str, tuple[Parameter, torch.nn.Parameter]]


@dataclass(slots=True)
class _LocalPiece:
    """A piece in this rank's parameter and in its bucket's buffer.

    scale: what this rank multiplies its gradient by before the sum.
    is_view: the parameter's ``.grad`` is ``buffer`` itself.
    """

    tensor: torch.nn.Parameter
    index: tuple[slice, ...]
    buffer: torch.Tensor
    scale: float
    is_view: bool

    def collect(self) -> None:
        if not self.is_view:
            assert self.tensor.grad is not None
            self.buffer.copy_(self.tensor.grad[self.index])
        if self.scale != 1.0:
            self.buffer.mul_(self.scale)

    def return_sum(self) -> None:
        if not self.is_view:
            assert self.tensor.grad is not None
            self.tensor.grad[self.index].copy_(self.buffer)


@dataclass(slots=True)
class LocalBucket:
    """This rank's buffer of a bucket. ``group`` is ``None`` if no other rank holds its pieces."""

    bucket: Bucket
    flat: torch.Tensor
    group: dist.ProcessGroup | None
    pieces: list[_LocalPiece]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    work: dist.Work | None = None

    def owned_by(self, rank: int) -> torch.Tensor:
        """The share of the buffer that ``rank`` answers for: the shares of all holders are the whole, once."""
        holders = self.bucket.ranks
        i, n = holders.index(rank), len(holders)
        return self.flat[self.flat.numel() * i // n : self.flat.numel() * (i + 1) // n]


class GradientSync:
    """The gradient sums of one rank.

    A step is: :meth:`zero`, backwards, :meth:`expect_last_backward`, the last backward, :meth:`finish`. Between the
    last two, every bucket is reduced as soon as its gradients are complete, but never before an earlier bucket of
    the global order: all ranks launch the collectives that they share in the same order.
    """

    def __init__(
        self,
        context: ParallelContext,
        work: StageContext,
        parameters: NamedParameters,
        *,
        bucket_numel: int,
        overlap: bool,
    ) -> None:
        self._overlap = overlap
        self._launched = 0
        self._listening = False
        buckets = gradient_buckets(context.plan, bucket_numel=bucket_numel)
        self.buckets = [
            _local_bucket(bucket, context, work, parameters) for bucket in buckets if context.rank in bucket.ranks
        ]
        self._buckets_of: dict[torch.nn.Parameter, list[LocalBucket]] = {}
        for local in self.buckets:
            for tensor in {piece.tensor for piece in local.pieces}:
                self._buckets_of.setdefault(tensor, []).append(local)
        for tensor in self._buckets_of:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            tensor.register_post_accumulate_grad_hook(self._on_gradient)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        for local in self.buckets:
            local.flat.zero_()
            for piece in local.pieces:
                if not piece.is_view and piece.tensor.grad is not None:
                    piece.tensor.grad.zero_()

    def expect_last_backward(self) -> None:
        """From now on a parameter's next gradient is its last of this step."""
        self._launched = 0
        self._listening = self._overlap
        for local in self.buckets:
            local.missing = {piece.tensor for piece in local.pieces}

    def finish(self) -> None:
        """Reduce what is left and wait for everything; afterwards ``.grad`` holds the sums.

        All-reduce (sum) per bucket over its holders, in the order of ``gradient_buckets``.
        """
        self._listening = False
        while self._launched < len(self.buckets):
            self._launch_next()
        for local in self.buckets:
            if local.work is not None:
                local.work.wait()
                local.work = None
            for piece in local.pieces:
                piece.return_sum()

    def _on_gradient(self, tensor: torch.Tensor) -> None:
        if not self._listening:
            return
        for local in self._buckets_of[tensor]:
            local.missing.discard(tensor)
        while self._launched < len(self.buckets) and not self.buckets[self._launched].missing:
            self._launch_next()

    def _launch_next(self) -> None:
        local = self.buckets[self._launched]
        self._launched += 1
        for piece in local.pieces:
            piece.collect()
        if local.group is not None:
            local.work = dist.all_reduce(local.flat, group=local.group, async_op=True)


def _local_bucket(
    bucket: Bucket, context: ParallelContext, work: StageContext, parameters: NamedParameters
) -> LocalBucket:
    _, any_tensor = parameters[bucket.pieces[0].parameter.name]
    flat = torch.zeros(bucket.numel, dtype=any_tensor.dtype, device=any_tensor.device)
    pieces = []
    offset = 0
    for piece in bucket.pieces:
        parameter, tensor = parameters[piece.parameter.name]
        index = _local_index(piece, work)
        shape = tensor[index].shape
        buffer = flat[offset : offset + piece.numel].view(shape)
        offset += piece.numel
        is_view = shape == tensor.shape
        if is_view:
            tensor.grad = buffer
        pieces.append(_LocalPiece(tensor, index, buffer, gradient_scale(parameter, work.stage), is_view))
    return LocalBucket(bucket, flat, context.gradients.get(bucket.ranks), pieces)


def _local_index(piece: Piece, work: StageContext) -> tuple[slice, ...]:
    """Where a piece lies in this rank's shard of its parameter."""
    parameter = piece.parameter
    if parameter.shard_dim is None:
        return (slice(None),)
    held = shard_intervals(parameter, tp=work.stage.tp, tp_rank=work.placement.tp_rank)
    interval = next(i for i in held if _contains(i, piece))
    start = interval.local_start + piece.start - interval.global_start
    return (slice(None),) * parameter.shard_dim + (slice(start, start + piece.end - piece.start),)


def _contains(interval: Interval, piece: Piece) -> bool:
    return interval.global_start <= piece.start and piece.end <= interval.global_start + interval.length
