"""Runs the computes of one stage of a pipeline, and its transfers.

Tensor shapes: S sequence rows on this rank, B samples of a microbatch on this rank, H hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum, auto

import torch
from megatron.core.pipeline_parallel.schedules import custom_backward

from hetero.distributed.process_groups import ParallelContext, StageContext
from hetero.runtime.boundary_p2p import BoundaryP2P, boundary_after, boundary_before
from hetero.runtime.host_activations import HostActivations
from hetero.runtime.host_weights import HostWeights
from hetero.runtime.mcore import dropout_state, restore_dropout_state
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.stage import StageModel
from hetero.schedule.actions import FETCHES, Action, ActionKind


class Keeps(Enum):
    """What a forward leaves behind: its graph for a backward, its input for another forward, or nothing."""

    GRAPH = auto()
    INPUT = auto()
    NOTHING = auto()


_MADE_UP = -1
"""The microbatch of a warm-up; those of a step count from 0."""


class StageRunner:
    """Runs forwards and backwards of a rank's stage, and keeps between them what its microbatches need later.

    Args:
        activations: what its forwards save and its backwards use, as far as that is on the host in between.
        weights: what its computes need, as far as that lives on the host.
        ready: told each weight that a split backward has added a gradient to, which autograd's hooks know nothing of.
    """

    def __init__(
        self,
        context: ParallelContext,
        work: StageContext,
        model: StageModel,
        *,
        activations: HostActivations,
        weights: HostWeights,
        ready: Callable[[torch.nn.Parameter], None],
    ) -> None:
        self.reads_data = work.is_first or work.is_last
        self.module = model.module
        self._timing = context.timing
        self._model = model
        self._activations = activations
        self._weights = weights
        self._stage = work.placement.stage
        self._ready = ready
        self._before = boundary_before(context, work, model.dtype)
        self._after = boundary_after(context, work, model.dtype)
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._generators: dict[int, dict[str, torch.Tensor]] = {}

    def post_receive(self, action: Action) -> None:
        """Post the receipt of a slice."""
        boundary = self._before if action.kind == ActionKind.RECV_F else self._after
        _present(boundary).post_receive(action.number)

    def start_send(self, action: Action, *, at_most: int | None) -> None:
        """Start sending a slice, with ``at_most`` microbatches under way."""
        boundary = self._after if action.kind == ActionKind.SEND_F else self._before
        _present(boundary).start_send(action.number, at_most=at_most)

    def finish_sends(self) -> None:
        """Wait for everything that is still being sent."""
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.finish_sends()

    def forward(self, action: Action, batch: Microbatch | None, *, keeps: Keeps) -> torch.Tensor | None:
        """F: the output goes to the next stage; returns the sum of its token losses on a last stage alone."""
        number = action.number
        input_SBH = self._before.take_received(number) if self._before is not None else None
        if keeps != Keeps.NOTHING and input_SBH is not None:
            self._inputs[number] = input_SBH
        if keeps == Keeps.INPUT:
            self._generators[number] = dropout_state()
        output = self._compute_forward(action, input_SBH, batch, with_graph=keeps == Keeps.GRAPH)
        if self._after is not None:
            self._after.offer(number, output.detach())
        if keeps == Keeps.GRAPH:
            self._keep_graph(number, output)
        return output.detach() if self._after is None else None

    def forward_again(self, action: Action, batch: Microbatch | None) -> None:
        """R: the forward of a microbatch that kept its input alone, with the same dropout, for its graph."""
        now = dropout_state()
        restore_dropout_state(self._generators.pop(action.number))
        output = self._compute_forward(action, self._inputs.get(action.number), batch, with_graph=True)
        restore_dropout_state(now)
        self._keep_graph(action.number, output)

    def backward(self, action: Action, loss_scale: Callable[[], torch.Tensor] | None) -> None:
        """B or I: the gradient of the input goes to the stage before."""
        output = self._outputs.pop(action.number)
        if self._after is not None:
            gradient = self._after.take_received(action.number)
        else:
            assert loss_scale is not None, "a last stage scales its loss"
            gradient = loss_scale().to(output.dtype)
        with self._timing.compute(action), self._weights.using(action), self._activations.using(action):
            custom_backward(output, gradient)
        if self._model.delayed is not None:
            self._model.delayed.end_of_backward(action.number)
        if self._before is not None:
            gradient_SBH = self._inputs.pop(action.number).grad
            assert gradient_SBH is not None
            self._before.offer(action.number, gradient_SBH)

    def weight_gradients(self, action: Action) -> None:
        """W: the gradients of weights that I has left for later."""
        assert self._model.delayed is not None, "the schedule has a W where backwards are whole"
        with self._timing.compute(action):
            self._model.delayed.compute(action.number, ready=self._ready)

    def warm_up(
        self, batch: Microbatch | None, loss_scale: Callable[[], torch.Tensor], *, forwards_again: bool
    ) -> torch.Tensor | None:
        """Run all that the computes of this stage run, on a made-up microbatch and without a message.

        Returns what :meth:`forward` does.

        Args:
            forwards_again: a forward may keep its input alone.
        """
        for boundary in (self._before, self._after):
            if boundary is not None:
                boundary.warm_up()
        forward, backward = (Action(self._stage, kind, _MADE_UP) for kind in (ActionKind.F, ActionKind.B))
        computes = [forward] * (2 + forwards_again) + [backward]
        self._weights.begin(each._replace(kind=FETCHES[each.kind]) for each in computes)
        self.module.eval()
        self._compute_forward(None, self._made_up_input(), batch, with_graph=False)
        self.module.train()
        if forwards_again:
            self._compute_forward(None, self._made_up_input(), batch, with_graph=False)
        output = self._compute_forward(None, self._made_up_input(), batch, with_graph=True)
        loss = output.detach().clone() if self._after is None else None
        self._keep_graph(_MADE_UP, output)
        gradient = loss_scale().to(output.dtype) if self._after is None else self._after.new_tensor().zero_()
        with self._weights.using(backward):
            custom_backward(self._outputs.pop(_MADE_UP), gradient)
        if self._model.delayed is not None:
            self._model.delayed.end_of_backward(_MADE_UP)
            self._model.delayed.compute(_MADE_UP, ready=self._ready)
        return loss

    def _made_up_input(self) -> torch.Tensor | None:
        return self._before.new_tensor().normal_() if self._before is not None else None

    def _compute_forward(
        self, action: Action | None, input_SBH: torch.Tensor | None, batch: Microbatch | None, *, with_graph: bool
    ) -> torch.Tensor:
        """Activations [S, B, H], or the sum of the token losses on a last stage. ``action`` is none in a warm-up."""
        if with_graph and input_SBH is not None:
            input_SBH.requires_grad_()
        with torch.set_grad_enabled(with_graph):
            with self._surrounded(action, input_SBH, with_graph=with_graph):
                output = self._model.forward(input_SBH, batch)
            if self._after is None:
                assert batch is not None
                output = (output * batch.loss_mask_BS).sum()
        return output

    @contextmanager
    def _surrounded(self, action: Action | None, input_SBH: torch.Tensor | None, *, with_graph: bool) -> Iterator[None]:
        if action is None:
            weighing = self._activations.weighing(self._stage, input_SBH) if with_graph else nullcontext()
            with self._weights.using(Action(self._stage, ActionKind.F, _MADE_UP)), weighing:
                yield
            return
        saving = self._activations.saving(action, input_SBH) if with_graph else nullcontext()
        with self._timing.compute(action), self._weights.using(action), saving:
            yield

    def _keep_graph(self, number: int, output: torch.Tensor) -> None:
        if self._after is not None:
            # Only the graph is needed from here on; the activation itself lives until it has been sent.
            output.data = torch.empty(1, dtype=output.dtype, device=output.device)
        self._outputs[number] = output


def _present(boundary: BoundaryP2P | None) -> BoundaryP2P:
    assert boundary is not None, "the schedule has a transfer where the replica has no boundary"
    return boundary
