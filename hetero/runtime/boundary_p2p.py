"""Sends activations and their gradients between two stages, slice by slice, as one rank takes part in it.

Tensor shapes: S sequence rows on this rank, B samples of a microbatch on this rank, H hidden size.

Nothing blocks but who takes what has not arrived: a receive is only posted, a send only started, and buffers live until
their transfers are done.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from hetero.distributed.p2p import Channel, Pending
from hetero.distributed.process_groups import BoundaryGroups, ParallelContext, StageContext
from hetero.distributed.timing import TransferDirection
from hetero.plan.ir import Stage
from hetero.schedule.actions import ActionKind


class BoundaryP2P:
    """Receives and sends whole microbatches over the boundary before or after this rank's stage, in slices.

    Args:
        new_tensor: makes the tensor of a microbatch, uninitialised.
    """

    def __init__(
        self,
        *,
        incoming: Channel,
        outgoing: Channel,
        slices_per_microbatch: int,
        new_tensor: Callable[[], torch.Tensor],
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._slices = slices_per_microbatch
        self.new_tensor = new_tensor
        self._arriving: dict[int, tuple[torch.Tensor, list[Pending]]] = {}
        self._departing: dict[int, torch.Tensor] = {}
        self._sending: list[Pending] = []

    def post_receive(self, number: int) -> None:
        """Post the receipt of a slice; the first of a microbatch allocates its tensor."""
        microbatch = number // self._slices
        if microbatch not in self._arriving:
            self._arriving[microbatch] = self.new_tensor(), []
        tensor_SBH, pending = self._arriving[microbatch]
        pending.append(self._incoming.receive(tensor_SBH, number=number))

    def take_received(self, microbatch: int) -> torch.Tensor:
        """The tensor of a microbatch; waits until all its slices are there."""
        tensor_SBH, pending = self._arriving.pop(microbatch)
        for transfer in pending:
            transfer.wait()
        return tensor_SBH

    def offer(self, microbatch: int, tensor_SBH: torch.Tensor) -> None:
        """Hand over a microbatch's tensor, whose slices are sent next."""
        self._departing[microbatch] = tensor_SBH

    def start_send(self, number: int, *, at_most: int | None = None) -> None:
        """Start sending a slice, and let go of those that have arrived.

        Args:
            at_most: microbatches under way; one more waits for the oldest. ``None`` where the schedule bounds them.
        """
        microbatch, index = divmod(number, self._slices)
        self._sending = [transfer for transfer in self._sending if not transfer.finish_if_done()]
        while at_most is not None and len(self._sending) >= at_most * self._slices:
            self._sending.pop(0).wait()
        self._sending.append(self._outgoing.send(self._departing[microbatch], number=number))
        if index == self._slices - 1:
            del self._departing[microbatch]

    def warm_up(self) -> None:
        """Copy what transfers copy on this rank, without a message."""
        tensor_SBH = self.new_tensor().zero_()
        for channel in (self._incoming, self._outgoing):
            channel.warm_up(tensor_SBH)

    def finish_sends(self) -> None:
        """Wait for everything that is still being sent."""
        for transfer in self._sending:
            transfer.wait()
        self._sending = []


def boundary_before(context: ParallelContext, work: StageContext, dtype: torch.dtype) -> BoundaryP2P | None:
    """This rank's end of the boundary before its stage, ``None`` before a replica's first one."""
    if work.previous_stage is None or work.before is None:
        return None
    forward, backward = _channels(context, work.placement.replica, work.placement.stage - 1, work.before)
    return BoundaryP2P(
        incoming=forward,
        outgoing=backward,
        slices_per_microbatch=_slices_per_microbatch(work.stage, work.previous_stage),
        new_tensor=_allocator(context, work.stage, dtype),
    )


def boundary_after(context: ParallelContext, work: StageContext, dtype: torch.dtype) -> BoundaryP2P | None:
    """This rank's end of the boundary after its stage, ``None`` after a replica's last one."""
    if work.next_stage is None or work.after is None:
        return None
    forward, backward = _channels(context, work.placement.replica, work.placement.stage, work.after)
    return BoundaryP2P(
        incoming=backward,
        outgoing=forward,
        slices_per_microbatch=_slices_per_microbatch(work.stage, work.next_stage),
        new_tensor=_allocator(context, work.stage, dtype),
    )


def _channels(context: ParallelContext, replica: int, boundary: int, groups: BoundaryGroups) -> tuple[Channel, Channel]:
    """The forward and the backward channel between stages ``boundary`` and ``boundary + 1``."""
    here, after = context.plan.replicas[replica].stages[boundary : boundary + 2]

    def channel(kind: ActionKind, sender: Stage, receiver: Stage, group: dist.ProcessGroup) -> Channel:
        return Channel(
            sender=sender,
            receiver=receiver,
            rank=context.rank,
            seq_length=context.plan.seq_length,
            group=group,
            start=partial(context.timing.transfer, TransferDirection(replica, boundary, kind)),
        )

    return (
        channel(ActionKind.SEND_F, here, after, groups.forward),
        channel(ActionKind.SEND_B, after, here, groups.backward),
    )


def _slices_per_microbatch(stage: Stage, neighbour: Stage) -> int:
    size = stage.samples_per_microbatch
    return size // min(size, neighbour.samples_per_microbatch)


def _allocator(context: ParallelContext, stage: Stage, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes the tensor [S, B, H] that a rank of ``stage`` holds of one microbatch."""
    rows = context.plan.seq_length // (stage.tp if stage.splits_sequence else 1)
    shape = (rows, stage.micro_batch_size, context.plan.model.hidden_size)
    return lambda: torch.empty(shape, dtype=dtype, device=context.device)
