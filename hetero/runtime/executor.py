"""Executes the program of a rank, the same one that the simulator replays.

The host walks through computes and transfers in the program's order. Nothing blocks but a compute that waits for its
own input: a RECV only posts, a SEND only starts. Collectives run beside the computes: autograd, split backwards and
modules report how far these are, and the queues of the program say what may start then, and what has to be there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hetero.distributed.process_groups import ParallelContext
from hetero.runtime.grad_sync import GradientSync
from hetero.runtime.host_activations import HostActivations
from hetero.runtime.mcore import scale_auxiliary_losses
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.stage_runner import Keeps, StageRunner
from hetero.runtime.weight_gather import WeightGather
from hetero.schedule.actions import BACKWARD, RECEIVE, SEND, UPDATE, Action, ActionKind
from hetero.schedule.program import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """What the computes of a step are given.

    microbatches: this rank's, in order; ``None`` where no stage is a first or last one.
    loss_scale: what the sum of token losses is multiplied by, 1 / (loss tokens of the whole global batch); called by
        backwards of last stages only, ``None`` without any.
    aux_loss_scale: what an auxiliary loss of a layer is multiplied by, in the mean over samples.
    """

    microbatches: Sequence[Microbatch] | None
    loss_scale: Callable[[], torch.Tensor] | None = None
    aux_loss_scale: float = 1.0


class Executor:
    """Executes one program of this rank, of a training step or of an evaluation.

    Args:
        stages: by index, those that this rank holds.
        global_batch_size: samples of a step on all replicas.
    """

    def __init__(
        self,
        context: ParallelContext,
        program: Program,
        *,
        stages: Mapping[int, StageRunner],
        sums: GradientSync,
        gather: WeightGather,
        activations: HostActivations,
        global_batch_size: int,
    ) -> None:
        self._context = context
        self._stages = stages
        self._sums = sums
        self._gather = gather
        self._activations = activations
        self._global_batch_size = global_batch_size
        self._order = [action for action in program.host_order if action != UPDATE]
        self._keeps = _kept_by_forwards(self._order)
        self._trains = any(action.kind in BACKWARD for action in self._order)
        self._depths = {work.placement.stage: work.stage.in_flight for work in context.stages}

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Everything before the update; gradients add up in the parameters.

        Returns the sum of the token losses of this rank's samples, not scaled, in float64; 0 without a last stage.
        Afterwards the gradients are summed, and no weight is on its way any more.
        """
        if self._trains:
            self._sums.zero()
            self._activations.begin()
        self._set_aux_loss_scale(inputs)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._context.device)
        progress = self._context.progress
        for action in self._order:
            progress.at(action)
            stage = self._stages[action.stage]
            if action.kind in RECEIVE:
                stage.post_receive(action)
            elif action.kind in SEND:
                stage.start_send(action, at_most=None if self._trains else self._depths[action.stage])
            else:
                loss = self._compute(stage, action, inputs)
                if loss is not None:
                    loss_sum += loss
        progress.at("last sends")
        for stage in self._stages.values():
            stage.finish_sends()
        progress.at("sums of gradients")
        self._gather.finish()
        if self._trains:
            self._sums.finish()
        progress.at("")
        return loss_sum

    def update(self, apply: Callable[[], None]) -> None:
        """UPDATE, which ``apply`` does, and the launch of all GATHERs behind it."""
        self._context.progress.at(UPDATE)
        with self._context.timing.compute(UPDATE):
            apply()
        self._gather.start()
        self._context.progress.at("")

    def _compute(self, stage: StageRunner, action: Action, inputs: StepInputs) -> torch.Tensor | None:
        """Returns what it adds to the loss, if it is the forward of a last stage."""
        batch = None
        if stage.reads_data:
            assert inputs.microbatches is not None, "first stages read tokens, last stages labels"
            batch = inputs.microbatches[action.number]
        loss = None
        self._sums.begins(action)
        match action.kind:
            case ActionKind.F:
                loss = stage.forward(action, batch, keeps=self._keeps[action])
            case ActionKind.R:
                stage.forward_again(action, batch)
            case ActionKind.B | ActionKind.I:
                stage.backward(action, inputs.loss_scale)
            case ActionKind.W:
                stage.weight_gradients(action)
        self._sums.ends(action)
        return loss

    def _set_aux_loss_scale(self, inputs: StepInputs) -> None:
        plan, work = self._context.plan, self._context.work
        if plan.model.num_experts is not None and work is not None:
            share = inputs.aux_loss_scale * work.stage.micro_batch_size / self._global_batch_size
            scale_auxiliary_losses(share, device=self._context.device)


def _kept_by_forwards(order: Sequence[Action]) -> dict[Action, Keeps]:
    """What each forward keeps, as what comes later needs it."""
    again = {(a.stage, a.number) for a in order if a.kind == ActionKind.R}
    with_backward = {(a.stage, a.number) for a in order if a.kind in BACKWARD}
    return {
        action: Keeps.INPUT
        if (action.stage, action.number) in again
        else Keeps.GRAPH
        if (action.stage, action.number) in with_backward
        else Keeps.NOTHING
        for action in order
        if action.kind == ActionKind.F
    }
