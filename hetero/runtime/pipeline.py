"""Runs the action list of one stage: the same rows that the simulator replays.

Tensor shapes: S sequence rows on this rank, B samples of a microbatch on this rank, H hidden size.

Nothing blocks but a compute that waits for its own input: a RECV only posts, a SEND only starts, and buffers live
until their transfers are done.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import custom_backward
from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

from hetero.distributed.p2p import Channel, Pending
from hetero.distributed.pace import Direction
from hetero.distributed.process_groups import BoundaryGroups, ParallelContext, StageContext
from hetero.plan.ir import Stage
from hetero.plan.lowering import evaluation_rows, step_rows
from hetero.runtime.batch import Microbatch
from hetero.runtime.stage import StageModel
from hetero.schedule.actions import Kind


class PipelineExecutor:
    """Executes this rank's stage for one step: forward and backward of all its microbatches."""

    def __init__(self, context: ParallelContext, work: StageContext, model: StageModel) -> None:
        self._context = context
        self._pace = context.pace
        self._model = model
        self._row = step_rows(context.plan.replicas[work.placement.replica])[work.placement.stage]
        self._evaluation_row = evaluation_rows(context.plan.replicas[work.placement.replica])[work.placement.stage]
        self._last_backward = work.num_microbatches - 1
        self._in_flight = work.stage.in_flight
        self._aux_loss_share = work.stage.micro_batch_size / context.plan.global_batch_size
        self._before = _boundary_before(context, work, model.dtype)
        self._after = _boundary_after(context, work, model.dtype)
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    def run(
        self,
        microbatches: Sequence[Microbatch] | None,
        *,
        loss_scale: Callable[[], torch.Tensor] | None,
        aux_loss_scale: float = 1.0,
        before_last_backward: Callable[[], None],
        gradient_ready: Callable[[torch.nn.Parameter], None],
    ) -> torch.Tensor:
        """One forward and backward of every microbatch; gradients add up in the parameters.

        Returns the sum of the token losses of this rank's samples, not scaled, in float64; 0 except on last stages.

        Args:
            microbatches: this rank's, in order; ``None`` on stages that are neither first nor last.
            loss_scale: what the sum of token losses is multiplied by, 1 / (loss tokens of the whole global batch);
                called by backwards of last stages only, ``None`` on the others.
            aux_loss_scale: what an auxiliary loss of a layer is multiplied by, in the mean over samples.
            before_last_backward: called once, when the last microbatch's gradients are still missing, and those that
                a split backward has put off.
            gradient_ready: told each weight of these when its gradient is whole; autograd's hooks tell of the others.
        """
        device = self._context.device
        if self._context.plan.model.num_experts is not None:
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(aux_loss_scale * self._aux_loss_share, device=device))
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for _, kind, number in self._row:
            match kind:
                case Kind.RECV_F:
                    _present(self._before).post_receive(number)
                case Kind.RECV_B:
                    _present(self._after).post_receive(number)
                case Kind.SEND_F:
                    _present(self._after).start_send(number)
                case Kind.SEND_B:
                    _present(self._before).start_send(number)
                case Kind.F:
                    batch = microbatches[number] if microbatches is not None else None
                    loss_sum += self._forward(number, batch)
                case Kind.B | Kind.I:
                    if number == self._last_backward:
                        before_last_backward()
                    self._backward(kind, number, loss_scale)
                case Kind.W:
                    assert self._model.later is not None
                    is_last = number == self._last_backward
                    with self._pace.compute(Kind.W, number):
                        self._model.later.compute(number, ready=gradient_ready if is_last else None)
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.finish_sends()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch] | None) -> torch.Tensor:
        """The forward of every microbatch without dropout; returns the sum of token losses as :meth:`run` does.

        A stage that is faster than the next one waits for it when ``in_flight`` of its outputs are on their way.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._context.device)
        self._model.module.eval()
        for _, kind, number in self._evaluation_row:
            match kind:
                case Kind.RECV_F:
                    _present(self._before).post_receive(number)
                case Kind.SEND_F:
                    _present(self._after).start_send(number, at_most=self._in_flight)
                case Kind.F:
                    batch = microbatches[number] if microbatches is not None else None
                    input_SBH = self._before.take_received(number) if self._before is not None else None
                    with self._pace.compute(Kind.F, number):
                        output = self._model.forward(input_SBH, batch)
                    if self._after is not None:
                        self._after.offer(number, output)
                    else:
                        assert batch is not None
                        loss_sum += (output * batch.loss_mask_BS).sum()
        if self._after is not None:
            self._after.finish_sends()
        self._model.module.train()
        return loss_sum

    def _forward(self, number: int, batch: Microbatch | None) -> torch.Tensor | float:
        """Forward of a microbatch; returns the sum of its token losses on a last stage, else 0."""
        input_SBH = None
        if self._before is not None:
            input_SBH = self._inputs[number] = self._before.take_received(number).requires_grad_()
        with self._pace.compute(Kind.F, number):
            output = self._model.forward(input_SBH, batch)
        if self._after is None:
            assert batch is not None
            loss = (output * batch.loss_mask_BS).sum()
            self._outputs[number] = loss
            return loss.detach()
        self._after.offer(number, output.detach())
        # Only the graph is needed from here on; the activation itself lives until it has been sent.
        output.data = torch.empty(1, dtype=output.dtype, device=output.device)
        self._outputs[number] = output
        return 0.0

    def _backward(self, kind: Kind, number: int, loss_scale: Callable[[], torch.Tensor] | None) -> None:
        output = self._outputs.pop(number)
        if self._after is not None:
            gradient = self._after.take_received(number)
        else:
            assert loss_scale is not None, "a last stage scales its loss"
            gradient = loss_scale().to(output.dtype)
        with self._pace.compute(kind, number):
            custom_backward(output, gradient)
        if self._model.later is not None:
            self._model.later.end_of_backward(number)
        if self._before is not None:
            gradient_SBH = self._inputs.pop(number).grad
            assert gradient_SBH is not None
            self._before.offer(number, gradient_SBH)


class _Boundary:
    """This rank's end of the boundary before or after its stage: microbatch tensors in, microbatch tensors out."""

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
        self._new_tensor = new_tensor
        self._arriving: dict[int, tuple[torch.Tensor, list[Pending]]] = {}
        self._departing: dict[int, torch.Tensor] = {}
        self._sending: list[Pending] = []

    def post_receive(self, number: int) -> None:
        """Post the receipt of a slice; the first of a microbatch allocates its tensor."""
        microbatch = number // self._slices
        if microbatch not in self._arriving:
            self._arriving[microbatch] = self._new_tensor(), []
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
            at_most: microbatches under way; one more waits for the oldest. The schedule bounds them in training.
        """
        microbatch, index = divmod(number, self._slices)
        under_way = []
        for transfer in self._sending:
            if transfer.is_done():
                # NCCL keeps the buffers of a send until somebody has waited for it.
                transfer.wait()
            else:
                under_way.append(transfer)
        self._sending = under_way
        while at_most is not None and len(self._sending) >= at_most * self._slices:
            self._sending.pop(0).wait()
        self._sending.append(self._outgoing.send(self._departing[microbatch], number=number))
        if index == self._slices - 1:
            del self._departing[microbatch]

    def finish_sends(self) -> None:
        """Wait for everything that is still being sent."""
        for transfer in self._sending:
            transfer.wait()
        self._sending = []


def _boundary_before(context: ParallelContext, work: StageContext, dtype: torch.dtype) -> _Boundary | None:
    if work.previous_stage is None or work.before is None:
        return None
    forward, backward = _channels(context, work.placement.replica, work.placement.stage - 1, work.before)
    return _Boundary(
        incoming=forward,
        outgoing=backward,
        slices_per_microbatch=_slices_per_microbatch(work.stage, work.previous_stage),
        new_tensor=_allocator(context, work.stage, dtype),
    )


def _boundary_after(context: ParallelContext, work: StageContext, dtype: torch.dtype) -> _Boundary | None:
    if work.next_stage is None or work.after is None:
        return None
    forward, backward = _channels(context, work.placement.replica, work.placement.stage, work.after)
    return _Boundary(
        incoming=backward,
        outgoing=forward,
        slices_per_microbatch=_slices_per_microbatch(work.stage, work.next_stage),
        new_tensor=_allocator(context, work.stage, dtype),
    )


def _channels(context: ParallelContext, replica: int, boundary: int, groups: BoundaryGroups) -> tuple[Channel, Channel]:
    """The forward and the backward channel between stages ``boundary`` and ``boundary + 1``."""
    here, after = context.plan.replicas[replica].stages[boundary : boundary + 2]

    def channel(kind: Kind, sender: Stage, receiver: Stage, group: dist.ProcessGroup) -> Channel:
        return Channel(
            sender=sender,
            receiver=receiver,
            rank=context.rank,
            seq_length=context.plan.seq_length,
            group=group,
            start=partial(context.pace.transfer, Direction(replica, boundary, kind)),
        )

    return (
        channel(Kind.SEND_F, here, after, groups.forward),
        channel(Kind.SEND_B, after, here, groups.backward),
    )


def _slices_per_microbatch(stage: Stage, neighbour: Stage) -> int:
    size = stage.samples_per_microbatch
    return size // min(size, neighbour.samples_per_microbatch)


def _allocator(context: ParallelContext, stage: Stage, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes the tensor [S, B, H] that a rank of ``stage`` holds of one microbatch."""
    rows = context.plan.seq_length // (stage.tp if stage.splits_sequence else 1)
    shape = (rows, stage.micro_batch_size, context.plan.model.hidden_size)
    return lambda: torch.empty(shape, dtype=dtype, device=context.device)


def _present(boundary: _Boundary | None) -> _Boundary:
    assert boundary is not None, "the schedule has a transfer where the replica has no boundary"
    return boundary
