"""Sums the gradients of every segment over the ranks that hold it, beside the rest of the backward."""

import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable
from hetero.errors import ScheduleError
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.main_grad import add_grad, comes_later, drop_grad, main_grad
from hetero.runtime.sharded_state import TensorSlice
from hetero.schedule.actions import BACKWARD, Action, ActionKind
from hetero.schedule.program import Program, QueuedAction


class GradientSync:
    """Launches the REDUCEs of one rank's program, each as soon as the gradients that it sums are there.

    A step is: :meth:`zero`; :meth:`begins` and :meth:`ends` around each compute; :meth:`finish`. A REDUCE is launched
    as soon as its program lets it: behind those before it in the queue, which all ranks share, and once the action that
    it comes after is over; if it comes after a position inside that action, then once all its gradients are there.
    Autograd tells which are, and whoever adds to a ``main_grad`` past it calls :meth:`arrived`. A gradient that never
    comes, as that of an expert without tokens, holds nobody up for longer than its backward.

    The hooks on parameters live in C++, where nobody looks for garbage: they keep nothing alive.

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
        self._names = {
            tensor: name for local in buckets for tensor, name in local.names().items() if not _may_stay_away(name)
        }
        self._came: set[torch.Tensor] = set()
        hook = partial(_from_autograd, weakref.ref(self))
        for tensor in {tensor for local in buckets for tensor in local.tensors()}:
            tensor.register_post_accumulate_grad_hook(hook)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._launched = 0
        self._done.clear()
        self._came.clear()
        self._missing = [local.tensors() for _, local in self._queue]
        for local in self._buckets:
            local.gradients.zero_()
            for tensor in local.cut_tensors():
                main_grad(tensor).zero_()

    def begins(self, compute: Action) -> None:
        """Note that ``compute`` begins; if it is the last one of its stage that makes gradients, these are whole."""
        self._running = compute

    def arrived(self, tensor: torch.nn.Parameter) -> None:
        """The gradient of ``tensor`` of one microbatch is there, in ``.grad`` or already in ``main_grad``."""
        add_grad(tensor)
        self._came.add(tensor)
        if self._running in self._last:
            for place in self._places.get(tensor, []):
                self._missing[place].discard(tensor)
            self._launch()

    def ends(self, compute: Action) -> None:
        """Note that ``compute`` is over, and launch the sums that may go now."""
        self._running = None
        self._done.add(compute)
        self._launch()

    def finish(self) -> None:
        """Wait for everything, when all computes are over.

        Afterwards the buffers hold the sums in what each :attr:`LocalBucket.summed` says, and so does every
        ``main_grad`` of which this rank has all sums.
        Per bucket what its :class:`.BucketCollectives` do, over its holders, in the order of
        the queue.

        Raises:
            ScheduleError: a parameter has had no gradient in this step; all sums have been launched by then, so that
                no other rank waits for this one in them.
        """
        assert self._launched == len(self._queue), "a gradient sum comes after a compute that has not run"
        if absent := [name for tensor, name in self._names.items() if tensor not in self._came]:
            raise ScheduleError(
                f"gradients: none has come for {', '.join(absent[:3])}{' and others' if len(absent) > 3 else ''} in "
                "this step; a fused kernel must say so in grad_added_to_main_grad: try "
                "--no-gradient-accumulation-fusion"
            )
        for local in self._buckets:
            if local.number is None:
                local.collect_gradients()
        for work in self._pending:
            work.wait()
        self._pending.clear()
        for local in self._buckets:
            local.return_gradients()

    def warm_up(self) -> None:
        """Do once what is done with gradients beside their sums, and forget them."""
        for local in self._buckets:
            local.collect_gradients()
            local.return_gradients()
        self.zero()

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


def _from_autograd(sums: "weakref.ref[GradientSync]", tensor: torch.Tensor) -> None:
    """Autograd has brought a ``.grad``."""
    assert isinstance(tensor, torch.nn.Parameter)
    if comes_later(tensor):
        drop_grad(tensor)
    elif (alive := sums()) is not None:
        alive.arrived(tensor)


def _may_stay_away(name: str) -> bool:
    """An expert without tokens has no gradient."""
    return ".mlp.experts." in name


def _last_gradients(program: Program) -> frozenset[Action]:
    """Of each stage the last backward and, where weights' gradients come later, the last of those."""
    computes = [queued.action for queued in program.queues["compute"]]
    last = {
        (each.stage, each.kind == ActionKind.W): each for each in computes if each.kind in BACKWARD | {ActionKind.W}
    }
    return frozenset(last.values())
