"""Sums the gradients of every segment over the ranks that hold it, beside the rest of the backward."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.delayed_wgrad import has_delayed_gradient
from hetero.runtime.sharded_state import TensorSlice
from hetero.schedule.actions import BACKWARD, Action, ActionKind
from hetero.schedule.program import Program, QueuedAction


class GradientSync:
    """Launches the REDUCEs of one rank's program, each as soon as the gradients that it sums are there.

    A step is: :meth:`zero`; :meth:`begins` and :meth:`ends` around each compute; :meth:`finish`. A REDUCE is launched
    as soon as its program lets it: behind those before it in the queue, which all ranks share, and once the action that
    it comes after is over; if it comes after a position inside that action, then once all its gradients are there.
    Autograd tells which are, and whoever adds to a ``.grad`` past it calls :meth:`arrived`. A gradient that never
    comes, as that of an expert without tokens, holds nobody up for longer than its backward.

    Args:
        buckets: this rank's, in the global order.
        timing: when sums happen.
    """

    def __init__(self, buckets: Sequence[LocalBucket], program: Program, *, timing: Timing | None = None) -> None:
        self._buckets = buckets
        self._timing = timing or Timing()
        by_number = {local.number: local for local in buckets if local.number is not None}
        self._queue: list[tuple[QueuedAction, LocalBucket]] = [
            (queued, by_number[queued.action.number]) for queued in program.queues.get("reduce", ())
        ]
        self._last = _last_gradients(program)
        self._running: Action | None = None
        self._done: set[Action] = set()
        self._missing: list[set[torch.nn.Parameter]] = []
        self._launched = 0
        self._pending: list[Waitable] = []
        self._places: dict[torch.Tensor, list[int]] = {}
        for place, (_, local) in enumerate(self._queue):
            for tensor in local.tensors():
                self._places.setdefault(tensor, []).append(place)
        for summed in self._places:
            if not has_delayed_gradient(summed):
                summed.register_post_accumulate_grad_hook(self.arrived)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._launched = 0
        self._done.clear()
        self._missing = [local.tensors() for _, local in self._queue]
        for local in self._buckets:
            local.gradients.zero_()
            for segment in local.segments:
                if not segment.is_view and segment.tensor.grad is not None:
                    segment.tensor.grad.zero_()

    def begins(self, compute: Action) -> None:
        """``compute`` begins; if it is the last one of its stage that makes gradients, those that come are whole."""
        self._running = compute

    def arrived(self, tensor: torch.Tensor) -> None:
        """Something has been added to the gradient of ``tensor``."""
        if self._running in self._last:
            for place in self._places.get(tensor, []):
                self._missing[place].discard(tensor)
            self._launch()

    def ends(self, compute: Action) -> None:
        """``compute`` is over."""
        self._running = None
        self._done.add(compute)
        self._launch()

    def finish(self) -> None:
        """Wait for everything, when all computes are over.

        Afterwards the buffers hold the sums in what each :attr:`LocalBucket.summed` says, and so does every ``.grad``
        of which this rank has all sums.
        Per bucket what its :class:`.BucketCollectives` do, over its holders, in the order of
        the queue.
        """
        assert self._launched == len(self._queue), "a gradient sum comes after a compute that has not run"
        for local in self._buckets:
            if local.number is None:
                local.collect_gradients()
        for work in self._pending:
            work.wait()
        self._pending.clear()
        for local in self._buckets:
            local.return_gradients()

    def summed(self) -> Iterator[TensorSlice]:
        """The gradients that this rank has the sums of, after :meth:`finish`."""
        for local in self._buckets:
            yield from local.slices("gradients", local.gradients, first=0, within=local.summed)

    def _launch(self) -> None:
        while self._launched < len(self._queue) and self._may_launch(self._launched):
            queued, local = self._queue[self._launched]
            self._launched += 1
            local.collect_gradients()
            start = partial(local.collectives.sum, local.gradients)
            self._pending += self._timing.collective(queued, local.collectives.summing, local.bucket, start)

    def _may_launch(self, place: int) -> bool:
        queued, _ = self._queue[place]
        return all(
            point.action in self._done
            or (point.position is not None and point.action == self._running and not self._missing[place])
            for point in queued.after
        )


def _last_gradients(program: Program) -> frozenset[Action]:
    """Of each stage the last backward and, where weights' gradients come later, the last of those."""
    computes = [queued.action for queued in program.queues["compute"]]
    last = {
        (each.stage, each.kind == ActionKind.W): each for each in computes if each.kind in BACKWARD | {ActionKind.W}
    }
    return frozenset(last.values())
