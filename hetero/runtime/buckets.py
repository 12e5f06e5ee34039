"""Keeps a rank's parameters and gradients in flat buffers, one pair per bucket of :mod:`.gradient_groups`.

Each rank that holds a bucket has both buffers whole, and owns one shard of them. Here is a bucket of ranks 0, 1
and 4, whose shares of the optimizer are 1 : 2 : 1. Positions count elements; segments and shards begin at multiples of
64, and the dots are padding up to the next one:

               0               128             256             384     448     512
               |  segments that decay                          |  that do not  |
    weights    [ mlp.linear_fc1.weight    ....][ proj.weight  ][norm .][bias  ]     the layers' precision
    gradients  [ mlp.linear_fc1.weight    ....][ proj.weight  ][norm .][bias  ]     full precision
    shards     |<--- rank 0 -->|<----------- rank 1 ---------->|<-- rank 4 --->|

A parameter whose segments lie behind one another in one bucket is a view of the buffers, and so is its ``main_grad``
(:mod:`.main_grad`): gradients add up there, and updated weights appear there, without a copy. A parameter that another
holder's shard edges cut into segments of several buckets keeps tensors of its own, and its segments are copied in and
out.

Half-precision weights have float32 gradients: microbatches and ranks are summed in full precision.

Where a plan leaves gradients or weights to the host, these buffers are in its memory (:mod:`.host_gradients`,
:mod:`.host_weights`).
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.timing import wait_for_all
from hetero.plan.gradient_groups import Bucket, ShardSegment, by_number, gradient_buckets, gradient_scale
from hetero.plan.ir import Placement, Stage
from hetero.plan.sub_blocks import sub_blocks_of
from hetero.runtime.bucket_collectives import BucketCollectives, bucket_collectives
from hetero.runtime.collective_sequencer import CollectiveSequencer
from hetero.runtime.host_copies import host_copies
from hetero.runtime.main_grad import attach_main_grad, main_grad
from hetero.runtime.sharded_state import TensorSlice
from hetero.spec.parameters import Parameter, ShardInterval, shard_intervals

NamedParameters = Mapping[str, tuple[Parameter, torch.nn.Parameter]]
"""By canonical name, what the model says of a parameter, and its shard on this rank."""


@dataclass(slots=True)
class LocalSegment:
    """Where a segment lies in this rank's parameter and in its bucket's buffers.

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
            self.gradient.copy_(main_grad(self.tensor)[self.index])
        if self.scale != 1.0:
            self.gradient.mul_(self.scale)

    def return_gradient(self) -> None:
        if not self.is_view:
            main_grad(self.tensor)[self.index].copy_(self.gradient)

    @torch.no_grad()
    def return_weight(self) -> None:
        if not self.is_view:
            self.tensor[self.index].copy_(self.weight)


@dataclass(slots=True)
class LocalBucket:
    """The two buffers of a bucket on this rank, and how it takes part in summing and gathering them.

    number: by which a program names it.
    owned: the shard that this rank owns.
    collectives: how it is summed and gathered.
    device: where it is.
    adds_on_host: the gradients are in the host's memory (:mod:`.host_gradients`).
    weights_on_host: the weights are (:mod:`.host_weights`).
    """

    bucket: Bucket
    number: int
    owned: slice
    collectives: BucketCollectives
    device: torch.device
    gradients: torch.Tensor
    weights: torch.Tensor
    segments: list[LocalSegment] = field(default_factory=list)
    adds_on_host: bool = False
    weights_on_host: bool = False

    @property
    def is_shared(self) -> bool:
        """Other ranks hold its segments as well."""
        return len(self.bucket.ranks) > 1

    @property
    def whole(self) -> slice:
        return slice(0, self.bucket.length)

    @property
    def summed(self) -> slice:
        """The part that has the sums of the gradients, and that this rank updates."""
        return self.collectives.summed

    def updated_of(self, owner: int) -> slice:
        """The part of the shard of ``owner`` that this rank updates; empty if ``owner`` does not hold the bucket."""
        if owner not in self.bucket.ranks:
            return slice(0, 0)
        shard, summed = self.bucket.shard_of(owner), self.summed
        start = max(shard.start, summed.start)
        return slice(start, max(start, min(shard.stop, summed.stop)))

    def collect_gradients(self) -> None:
        """Bring this rank's gradients into the buffer, as what it adds to the sum."""
        for segment in self.segments:
            segment.collect_gradient()

    def return_gradients(self) -> None:
        """Bring the sums from the buffer into every ``main_grad``, if all are here."""
        if self.summed == self.whole:
            for segment in self.segments:
                segment.return_gradient()

    def return_weights(self) -> None:
        """Bring updated weights from the buffer into the parameters; those on the host, each compute fetches."""
        for segment in () if self.weights_on_host else self.segments:
            segment.return_weight()

    def tensors(self) -> set[torch.nn.Parameter]:
        """The parameters that have a segment here."""
        return {segment.tensor for segment in self.segments}

    def cut_tensors(self) -> set[torch.nn.Parameter]:
        """Those of them that other holders' shard edges cut, and that have tensors of their own therefore."""
        return {segment.tensor for segment in self.segments if not segment.is_view}

    def names(self) -> dict[torch.nn.Parameter, str]:
        """The canonical names of the parameters that have a segment here."""
        return {
            local.tensor: segment.parameter.name
            for local, segment in zip(self.segments, self.bucket.segments, strict=True)
        }

    def slices(self, kind: str, values: torch.Tensor, *, first: int, within: slice) -> Iterator[TensorSlice]:
        """The part of ``values`` that lies in ``within``, named by where it lies in the parameters.

        ``values`` are the elements of the buffer from ``first`` on; padding between segments has no name.
        """
        for segment, offset in zip(self.bucket.segments, self.bucket.offsets, strict=False):
            start = max(within.start, first, offset)
            end = min(within.stop, first + values.numel(), offset + segment.numel)
            for block in sub_blocks_of(segment, start=start - offset, end=end - offset):
                at = offset + block.start - first
                yield TensorSlice(
                    name=f"{kind}/{segment.parameter.name}",
                    shape=segment.parameter.shape,
                    offsets=block.offsets,
                    tensor=values[at : at + block.numel].view(block.shape),
                )


def local_buckets(
    context: ParallelContext,
    parameters: NamedParameters,
    *,
    bucket_numel: int,
    gradient_dtype: torch.dtype,
) -> list[LocalBucket]:
    """Move this rank's parameters into buffers: its buckets, in the order of ``gradient_buckets``.

    Weights are there twice while they move, but for those that come from the host. Only then gradients are made: the
    start needs no more memory than a step.

    Args:
        parameters: of all its stages.
    """
    sequencer = CollectiveSequencer(context.device)
    of_plan = gradient_buckets(context.plan, bucket_numel=bucket_numel)
    numbers = {id(bucket): number for number, bucket in enumerate(by_number(of_plan))}
    held = [(numbers[id(bucket)], bucket) for bucket in of_plan if context.rank in bucket.ranks]
    moved = [_weight_buffer(bucket, context, parameters) for _, bucket in held]
    placed_of: dict[torch.nn.Parameter, list[_PlacedSegment]] = {tensor: [] for _, tensor in parameters.values()}
    for each in itertools.chain.from_iterable(placed for _, placed in moved):
        placed_of[each.tensor].append(each)
    views = {tensor for tensor, placed in placed_of.items() if _move_into_buffer(tensor, placed, context.device)}
    # What the weights lay in before is free, but torch keeps it.
    torch.cuda.empty_cache()
    copies = host_copies(context.device)
    buckets = []
    for (number, bucket), (weights, _) in zip(held, moved, strict=True):
        adds_on_host = context.rank in bucket.gradients_on_host
        buckets.append(
            LocalBucket(
                bucket,
                number,
                bucket.shard_of(context.rank),
                bucket_collectives(bucket, context, sequencer),
                context.device,
                gradients=(
                    copies.to_keep(weights, dtype=gradient_dtype).zero_()
                    if adds_on_host
                    else torch.zeros(bucket.length, dtype=gradient_dtype, device=context.device)
                ),
                weights=weights,
                adds_on_host=adds_on_host,
                weights_on_host=context.rank in bucket.weights_on_host,
            )
        )
    for local, (_, placed) in zip(buckets, moved, strict=True):
        local.segments += [
            LocalSegment(
                each.tensor,
                each.index,
                gradient=local.gradients[each.place].view(each.weight.shape),
                weight=each.weight,
                scale=each.scale,
                is_view=each.tensor in views,
            )
            for each in placed
        ]
    _attach_main_grads(buckets, gradient_dtype)
    return buckets


def connect_buckets(buckets: Sequence[LocalBucket]) -> None:
    """Sum and gather every bucket once, while gradients are zero and all holders have the same weights.

    Collective over the holders of each bucket, in the order of a step. A communicator that is connected still connects
    the ranks of its group anew for each algorithm that NCCL chooses by operation and size, and holds their hosts up
    (``ncclCollPreconnect`` in its group.cc). In a step, ranks may come to their sums between other collectives in which
    they wait for one another.
    """
    shared = [local for local in buckets if local.is_shared]
    for local in shared:
        wait_for_all(local.collectives.sum(local.gradients.to(local.device)))
    for local in reversed(shared):
        wait_for_all(local.collectives.gather(local.weights.to(local.device)))


@dataclass(frozen=True, slots=True)
class _PlacedSegment:
    """Where a segment lies in this rank's parameter and in the weights of its bucket, before it has gradients.

    index: where it lies in the parameter.
    shape: its own, also when the parameter has no memory any more.
    scale: that of :class:`LocalSegment`.
    on_host: the buffer is in the host's memory.
    """

    tensor: torch.nn.Parameter
    index: tuple[slice, ...]
    shape: torch.Size
    buffer: torch.Tensor
    place: slice
    scale: float
    on_host: bool

    @property
    def weight(self) -> torch.Tensor:
        return self.buffer[self.place].view(self.shape)


def _weight_buffer(
    bucket: Bucket, context: ParallelContext, parameters: NamedParameters
) -> tuple[torch.Tensor, list[_PlacedSegment]]:
    work = context.work
    assert work is not None, "an idle rank holds no bucket"
    _, any_tensor = parameters[bucket.segments[0].parameter.name]
    on_host = context.rank in bucket.weights_on_host
    if on_host:
        like = torch.empty(bucket.length, dtype=any_tensor.dtype)
        buffer = host_copies(context.device).to_keep(like, dtype=like.dtype).zero_()
    else:
        buffer = torch.zeros(bucket.length, dtype=any_tensor.dtype, device=context.device)
    placed = []
    for segment, offset in zip(bucket.segments, bucket.offsets, strict=False):
        parameter, tensor = parameters[segment.parameter.name]
        # All stages of a rank cut their parameters alike.
        index = _local_index(segment, work.stage, work.placement)
        place = slice(offset, offset + segment.numel)
        shape, scale = tensor[index].shape, gradient_scale(parameter, work.stage)
        placed.append(_PlacedSegment(tensor, index, shape, buffer, place, scale, on_host))
    return buffer, placed


@torch.no_grad()
def _move_into_buffer(tensor: torch.nn.Parameter, placed: list[_PlacedSegment], device: torch.device) -> bool:
    """Copy the weights of ``tensor``, which becomes a view of the buffer if it lies there whole; whether it does.

    Otherwise it is on the device then, and of one whose weights live on the host without memory there.
    """
    for each in placed:
        each.weight.copy_(tensor[each.index])
    first = placed[0]
    lies_there = all(each.buffer is first.buffer for each in placed) and _lie_in_order(tensor, placed)
    if first.on_host:
        if tensor.device != device:
            tensor.data = torch.empty_like(tensor, device=device)
        tensor.untyped_storage().resize_(0)
    elif lies_there:
        tensor.data = first.buffer[_place_of(tensor, first.weight)].view(tensor.shape)
    else:
        tensor.data = tensor.data.to(device)
    return lies_there


def _place_of(tensor: torch.nn.Parameter, first: torch.Tensor) -> slice:
    """Where all of ``tensor`` lies in a buffer, in which ``first`` is its first segment."""
    return slice(first.storage_offset(), first.storage_offset() + tensor.numel())


def _attach_main_grads(buckets: list[LocalBucket], gradient_dtype: torch.dtype) -> None:
    """Give each parameter the sum of its gradients: a view of its bucket where it is one itself, else a tensor."""
    attached = set()
    for local in buckets:
        for segment in local.segments:
            tensor = segment.tensor
            if tensor in attached:
                continue
            attached.add(tensor)
            if segment.is_view:
                gradient = local.gradients[_place_of(tensor, segment.weight)].view(tensor.shape)
            else:
                device = local.gradients.device
                gradient = torch.zeros(tensor.shape, dtype=gradient_dtype, device=device)
            attach_main_grad(tensor, gradient)


def _lie_in_order(tensor: torch.nn.Parameter, placed: list[_PlacedSegment]) -> bool:
    """Whether the segments lie in the buffer as they do in the tensor: each contiguous, all equally far from there."""
    held = [tensor[each.index] for each in placed]
    distances = {
        each.weight.storage_offset() - values.storage_offset() for each, values in zip(placed, held, strict=True)
    }
    covers_all = sum(values.numel() for values in held) == tensor.numel()
    return covers_all and len(distances) == 1 and all(values.is_contiguous() for values in held)


def _local_index(segment: ShardSegment, stage: Stage, place: Placement) -> tuple[slice, ...]:
    """Where a segment lies in this rank's shard of its parameter."""
    parameter = segment.parameter
    if parameter.shard_dim is None:
        return (slice(None),)
    held = shard_intervals(parameter, tp=stage.tp, tp_rank=place.tp_rank)
    interval = next(i for i in held if _contains(i, segment))
    start = interval.local_start + segment.start - interval.global_start
    return (slice(None),) * parameter.shard_dim + (slice(start, start + segment.end - segment.start),)


def _contains(interval: ShardInterval, segment: ShardSegment) -> bool:
    return interval.global_start <= segment.start and segment.end <= interval.global_start + interval.length
