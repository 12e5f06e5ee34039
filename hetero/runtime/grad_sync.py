"""Sums the gradients of every segment over the ranks that hold it, beside the rest of the backward."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from hetero.distributed.timing import Timing, Waitable, wait_for_all
from hetero.errors import ScheduleError
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.host_gradients import HostGradients
from hetero.runtime.host_optimizer import HostOptimizer
from hetero.runtime.main_grad import add_grad, comes_later, drop_grad, main_grad
from hetero.runtime.sharded_state import TensorSlice
from hetero.schedule.actions import BACKWARD, COMPUTE, Action, ActionKind
from hetero.schedule.program import QUEUES_BESIDE, Point, Program, QueuedAction


class GradientSync:
    """Launches the REDUCEs of one rank's program, each as soon as the gradients that it sums are there.

    A step is: :meth:`zero`; :meth:`begins` and :meth:`ends` around each compute; :meth:`finish`. A REDUCE is launched
    as soon as its program lets it: behind those before it in the queue, which all ranks share, and once the action that
    it comes after is over; if it comes after a position inside that action, then once all its gradients are there.
    Autograd tells which are, and whoever adds to a ``main_grad`` past it calls :meth:`arrived`. A gradient that never
    comes, as that of an expert without tokens, holds nobody up for longer than its backward.

    The hooks on parameters live in C++, where nobody looks for garbage: they keep nothing alive.

    What the program then copies to the host, ``host`` is told of; so it is of a bucket that nobody else holds, as soon
    as its gradients are there. Where some of them add up on the host, ``on_host`` launches the sums.

    Args:
        buckets: this rank's, in the global order.
        timing: when sums happen.
    """

    def __init__(
        self,
        buckets: Sequence[LocalBucket],
        program: Program,
        *,
        host: HostOptimizer | None = None,
        on_host: HostGradients | None = None,
        timing: Timing | None = None,
    ) -> None:
        self._buckets = buckets
        self._host = host
        self._on_host = on_host
        self._timing = timing or Timing()
        self.follow(program)
        self._running: Action | None = None
        self._done: set[Action] = set()
        self._pending: list[Waitable] = []
        self._names = {
            tensor: name for local in buckets for tensor, name in local.names().items() if not _may_stay_away(name)
        }
        self._came: set[torch.Tensor] = set()
        hook = partial(_from_autograd, weakref.ref(self))
        for tensor in {tensor for local in buckets for tensor in local.tensors()}:
            tensor.register_post_accumulate_grad_hook(hook)

    def follow(self, program: Program) -> None:
        """Launch from the next step on as ``program`` says, which sums the same buckets behind other computes."""
        by_number = {local.number: local for local in self._buckets}
        copies = [q for q in _on_hosts_alone(program) if not by_number[q.action.number].is_shared]
        self._copied_alone = {queued.action.number for queued in copies}
        self._queues = [
            _LaunchQueue([(_behind_computes(queued, program), by_number[queued.action.number]) for queued in queue])
            for queue in (program.queues.get("reduce", ()), copies)
        ]
        self._last = _last_gradients(program)

    def zero(self) -> None:
        """Forget the gradients of the last step."""
        self._done.clear()
        self._came.clear()
        for queue in self._queues:
            queue.begin()
        if self._on_host is not None:
            self._on_host.zero()
        for local in self._buckets:
            if local.adds_on_host:
                continue
            local.gradients.zero_()
            for tensor in local.cut_tensors():
                main_grad(tensor).zero_()

    def begins(self, compute: Action) -> None:
        """Note that ``compute`` begins; if it is the last one of its stage that makes gradients, these are whole."""
        self._running = compute

    def arrived(self, tensor: torch.nn.Parameter) -> None:
        """The gradient of ``tensor`` of one microbatch is there, in ``.grad`` or already in ``main_grad``."""
        if self._on_host is None or tensor not in self._on_host:
            add_grad(tensor)
        elif self._running is None:
            # A warm-up, of which nothing is kept.
            drop_grad(tensor)
        else:
            self._on_host.add(tensor)
        self._came.add(tensor)
        if self._running in self._last:
            for queue in self._queues:
                queue.arrived(tensor)
            self._launch()

    def ends(self, compute: Action) -> None:
        """Note that ``compute`` is over, and launch the sums that may go now."""
        self._running = None
        if self._on_host is not None:
            self._on_host.ends()
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
        assert all(queue.is_over for queue in self._queues), "a gradient sum comes after a compute that has not run"
        if absent := [name for tensor, name in self._names.items() if tensor not in self._came]:
            raise ScheduleError(
                f"gradients: none has come for {', '.join(absent[:3])}{' and others' if len(absent) > 3 else ''} in "
                "this step; a fused kernel must say so in grad_added_to_main_grad: try "
                "--no-gradient-accumulation-fusion"
            )
        for local in self._buckets:
            if not local.is_shared and local.number not in self._copied_alone:
                local.collect_gradients()
        wait_for_all(self._pending)
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
        for queue in self._queues:
            while (found := queue.next_that(self._may_launch)) is not None:
                self._start(*found)

    def _start(self, queued: QueuedAction, local: LocalBucket) -> None:
        if self._on_host is not None:
            self._pending.append(self._on_host.sum(queued, local))
            return
        local.collect_gradients()
        works: Sequence[Waitable] = ()
        if queued.action.kind == ActionKind.REDUCE:
            start = partial(local.collectives.sum, local.gradients)
            works = self._timing.collective(queued, local.collectives.summing, local.bucket, start)
            self._pending += works
        if self._host is not None:
            self._host.summed(local, works, ready_s=self._timing.reached_s(queued))

    def _may_launch(self, queued: QueuedAction, all_arrived: bool) -> bool:
        return all(
            point.action in self._done or (point.position is not None and point.action == self._running and all_arrived)
            for point in queued.after
        )


class _LaunchQueue:
    """A queue of the program that is launched in order, and how far it has come in this step."""

    def __init__(self, entries: Sequence[tuple[QueuedAction, LocalBucket]]) -> None:
        self._entries = entries
        self._places: dict[torch.nn.Parameter, list[int]] = {}
        for place, (_, local) in enumerate(entries):
            for tensor in local.tensors():
                self._places.setdefault(tensor, []).append(place)
        self.begin()

    @property
    def is_over(self) -> bool:
        return self._launched == len(self._entries)

    def begin(self) -> None:
        """Nothing of this step has been launched."""
        self._launched = 0
        self._missing = [local.tensors() for _, local in self._entries]

    def arrived(self, tensor: torch.nn.Parameter) -> None:
        """The last gradient of ``tensor`` is there."""
        for place in self._places.get(tensor, ()):
            self._missing[place].discard(tensor)

    def next_that(self, may_launch: Callable[[QueuedAction, bool], bool]) -> tuple[QueuedAction, LocalBucket] | None:
        """The next entry, if it may be launched, which it counts as from now on."""
        if self.is_over or not may_launch(self._entries[self._launched][0], not self._missing[self._launched]):
            return None
        self._launched += 1
        return self._entries[self._launched - 1]


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


def _on_hosts_alone(program: Program) -> list[QueuedAction]:
    """For each bucket that the host updates, what comes first: the copy there, or the update of what adds up there."""
    first: dict[int, QueuedAction] = {}
    for queue in ("copy_out", "host"):
        for queued in program.queues.get(queue, ()):
            first.setdefault(queued.action.number, queued)
    behind = {number: _behind_computes(queued, program).after[0] for number, queued in first.items()}
    order = {queued.action: place for place, queued in enumerate(program.queues["compute"])}
    return sorted(
        first.values(),
        key=lambda queued: (
            order[behind[queued.action.number].action],
            -_position(behind[queued.action.number]),
            queued.action.number,
        ),
    )


def _position(point: Point) -> float:
    return point.position if point.position is not None else float("-inf")


def _behind_computes(queued: QueuedAction, program: Program) -> QueuedAction:
    """The same with the computes alone that it comes after, instead of copies and sums that come after these."""
    beside = {each.action: each for name in QUEUES_BESIDE for each in program.queues.get(name, ())}

    def computes(point: Point) -> Iterator[Point]:
        if point.action.kind in COMPUTE:
            yield point
        elif point.action.kind == ActionKind.ADD_G:
            yield from (Point(made.action, point.position) for made in beside[point.action].after)
        elif point.action in beside:
            for each in beside[point.action].after:
                yield from computes(each)

    return queued._replace(after=tuple(each for point in queued.after for each in computes(point)))


def _last_gradients(program: Program) -> frozenset[Action]:
    """Of each stage the last backward and, where weights' gradients come later, the last of those."""
    computes = [queued.action for queued in program.queues["compute"]]
    last = {
        (each.stage, each.kind == ActionKind.W): each for each in computes if each.kind in BACKWARD | {ActionKind.W}
    }
    return frozenset(last.values())
