"""A rank's parameters and gradients as flat buffers, one pair per bucket of :mod:`hetero.plan.holders`.

A parameter whose pieces lie behind one another in one bucket is a view of the buffers, and so is its ``.grad``:
gradients add up there, and updated weights appear there, without a copy. A parameter that another holder's shard edges
cut into pieces of several buckets keeps tensors of its own, and its pieces are copied in and out.

Half-precision weights have float32 gradients: microbatches and ranks are summed in full precision.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from hetero.distributed.process_groups import ParallelContext
from hetero.plan.boxes import boxes_of
from hetero.plan.holders import Bucket, Piece, gradient_buckets, gradient_scale
from hetero.plan.ir import Placement, Stage
from hetero.runtime.chains import Chains
from hetero.runtime.collectives import BucketCollectives, bucket_collectives
from hetero.runtime.state import TensorSlice
from hetero.spec.parameters import Interval, Parameter, shard_intervals

NamedParameters = Mapping[str, tuple[Parameter, torch.nn.Parameter]]


@dataclass(slots=True)
class LocalPiece:
    """A piece in this rank's parameter and in its bucket's buffers.

    index: where it lies in the parameter.
    scale: what this rank multiplies its gradient by before the sum.
    is_view: the parameter lies in the buffers itself.
    """

    tensor: torch.nn.Parameter
    index: tuple[slice, ...]
    gradient: torch.Tensor
    weight: torch.Tensor
    scale: float
    is_view: bool = False

    def collect_gradient(self) -> None:
        if not self.is_view:
            assert self.tensor.grad is not None
            self.gradient.copy_(self.tensor.grad[self.index])
        if self.scale != 1.0:
            self.gradient.mul_(self.scale)

    def return_gradient(self) -> None:
        if not self.is_view:
            assert self.tensor.grad is not None
            self.tensor.grad[self.index].copy_(self.gradient)

    @torch.no_grad()
    def return_weight(self) -> None:
        if not self.is_view:
            self.tensor[self.index].copy_(self.weight)


@dataclass(slots=True)
class LocalBucket:
    """This rank's buffers of a bucket.

    number: by which the collectives of a program name it, ``None`` if no other rank holds its pieces.
    owned: the shard that this rank answers for.
    collectives: how it is summed and gathered.
    """

    bucket: Bucket
    number: int | None
    owned: slice
    collectives: BucketCollectives
    gradients: torch.Tensor
    weights: torch.Tensor
    pieces: list[LocalPiece] = field(default_factory=list)

    @property
    def whole(self) -> slice:
        return slice(0, self.bucket.length)

    @property
    def summed(self) -> slice:
        """The part that has the sums of the gradients, and that this rank updates."""
        return self.collectives.summed

    def collect_gradients(self) -> None:
        """Bring this rank's gradients into the buffer, as what it adds to the sum."""
        for piece in self.pieces:
            piece.collect_gradient()

    def return_gradients(self) -> None:
        """Bring the sums from the buffer into every ``.grad``, if all are here."""
        if self.summed == self.whole:
            for piece in self.pieces:
                piece.return_gradient()

    def return_weights(self) -> None:
        """Bring updated weights from the buffer into the parameters."""
        for piece in self.pieces:
            piece.return_weight()

    def tensors(self) -> set[torch.nn.Parameter]:
        """The parameters that have a piece here."""
        return {piece.tensor for piece in self.pieces}

    def slices(self, kind: str, values: torch.Tensor, *, first: int, within: slice) -> Iterator[TensorSlice]:
        """The part of ``values`` that lies in ``within``, named by where it lies in the parameters.

        ``values`` are the elements of the buffer from ``first`` on; padding between pieces has no name.
        """
        for piece, offset in zip(self.bucket.pieces, self.bucket.offsets, strict=False):
            start = max(within.start, first, offset)
            end = min(within.stop, first + values.numel(), offset + piece.numel)
            for box in boxes_of(piece, start=start - offset, end=end - offset):
                at = offset + box.start - first
                yield TensorSlice(
                    name=f"{kind}/{piece.parameter.name}",
                    shape=piece.parameter.shape,
                    offsets=box.offsets,
                    tensor=values[at : at + box.numel].view(box.shape),
                )


def local_buckets(
    context: ParallelContext,
    parameters: NamedParameters,
    *,
    bucket_numel: int,
    gradient_dtype: torch.dtype,
) -> list[LocalBucket]:
    """Move this rank's parameters and gradients into buffers: its buckets, in the order of ``gradient_buckets``.

    Args:
        parameters: of all its stages.
    """
    chains = Chains(context.device)
    numbers = itertools.count()
    numbered = [
        (next(numbers) if len(bucket.ranks) > 1 else None, bucket)
        for bucket in gradient_buckets(context.plan, bucket_numel=bucket_numel)
    ]
    buckets = [
        _local_bucket(bucket, number, context, parameters, gradient_dtype, chains)
        for number, bucket in numbered
        if context.rank in bucket.ranks
    ]
    for _, tensor in parameters.values():
        if tensor.dtype != gradient_dtype:
            tensor.grad_dtype = gradient_dtype
        _move_into_buffers(tensor, [(local, p) for local in buckets for p in local.pieces if p.tensor is tensor])
    return buckets


def _local_bucket(
    bucket: Bucket,
    number: int | None,
    context: ParallelContext,
    parameters: NamedParameters,
    gradient_dtype: torch.dtype,
    chains: Chains,
) -> LocalBucket:
    work = context.work
    assert work is not None, "an idle rank holds no bucket"
    _, any_tensor = parameters[bucket.pieces[0].parameter.name]
    local = LocalBucket(
        bucket,
        number,
        bucket.shard_of(context.rank),
        bucket_collectives(bucket, context, chains),
        gradients=torch.zeros(bucket.length, dtype=gradient_dtype, device=any_tensor.device),
        weights=torch.zeros(bucket.length, dtype=any_tensor.dtype, device=any_tensor.device),
    )
    for piece, offset in zip(bucket.pieces, bucket.offsets, strict=False):
        parameter, tensor = parameters[piece.parameter.name]
        # All stages of a rank cut their parameters alike.
        index = _local_index(piece, work.stage, work.placement)
        shape, place = tensor[index].shape, slice(offset, offset + piece.numel)
        local.pieces.append(
            LocalPiece(
                tensor,
                index,
                gradient=local.gradients[place].view(shape),
                weight=local.weights[place].view(shape),
                scale=gradient_scale(parameter, work.stage),
            )
        )
    return local


@torch.no_grad()
def _move_into_buffers(tensor: torch.nn.Parameter, places: list[tuple[LocalBucket, LocalPiece]]) -> None:
    pieces = [piece for _, piece in places]
    for piece in pieces:
        piece.weight.copy_(tensor[piece.index])
    local, first = places[0]
    if all(other is local for other, _ in places) and _lie_in_order(tensor, pieces):
        start = first.weight.storage_offset()
        place = slice(start, start + tensor.numel())
        tensor.data = local.weights[place].view(tensor.shape)
        tensor.grad = local.gradients[place].view(tensor.shape)
        for piece in pieces:
            piece.is_view = True
    else:
        tensor.grad = torch.zeros(tensor.shape, dtype=first.gradient.dtype, device=tensor.device)


def _lie_in_order(tensor: torch.nn.Parameter, pieces: list[LocalPiece]) -> bool:
    """The pieces lie in the buffer as they lie in the tensor: each contiguous, all equally far from there."""
    parts = [tensor[piece.index] for piece in pieces]
    distances = {
        piece.weight.storage_offset() - part.storage_offset() for piece, part in zip(pieces, parts, strict=True)
    }
    covers_all = sum(part.numel() for part in parts) == tensor.numel()
    return covers_all and len(distances) == 1 and all(part.is_contiguous() for part in parts)


def _local_index(piece: Piece, stage: Stage, place: Placement) -> tuple[slice, ...]:
    """Where a piece lies in this rank's shard of its parameter."""
    parameter = piece.parameter
    if parameter.shard_dim is None:
        return (slice(None),)
    held = shard_intervals(parameter, tp=stage.tp, tp_rank=place.tp_rank)
    interval = next(i for i in held if _contains(i, piece))
    start = interval.local_start + piece.start - interval.global_start
    return (slice(None),) * parameter.shard_dim + (slice(start, start + piece.end - piece.start),)


def _contains(interval: Interval, piece: Piece) -> bool:
    return interval.global_start <= piece.start and piece.end <= interval.global_start + interval.length
