"""Adds up gradients of microbatches on the host, from where they go back bucket by bucket to be summed over ranks.

    main thread   last backward   block 2 ─ block 1 ─ block 0 ─
    copies out                           └ ADD 2   └ ADD 1   └ ADD 0          to the host, added there
    sums                                         └ IN 9 ─ REDUCE 9 ─ OUT 9    of buckets of several ranks alone

Autograd puts the gradient of a weight into ``.grad``; here that leaves, and no sum stays on the device. A thread copies
the gradients of a block when they are all there and adds them to the bucket, which lies in the host's memory: one
microbatch after the other, in the order in which a device adds. A backward goes on with a block when the one before the
last has left.

Another thread takes a bucket that other ranks hold as well back to the device, where it is summed as any other, and to
the host again, one bucket at a time. Ranks could as well sum on their hosts, but for these there is often no fast
network, and every holder of a bucket would have to have it there. As all ranks launch their sums in one order, this
thread launches those of buckets on the device too.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from hetero.cost.stage_memory import GRADIENT_SLOTS
from hetero.distributed.timing import Timing, Waitable, wait_for_all
from hetero.plan.ir import Stage
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.buckets import LocalBucket
from hetero.runtime.host_activations import HeldBytes
from hetero.runtime.host_copies import host_copies
from hetero.runtime.host_optimizer import HostOptimizer
from hetero.runtime.main_grad import drop_grad, main_grad
from hetero.runtime.stage_blocks import blocks_of
from hetero.schedule.actions import ActionKind
from hetero.schedule.program import QueuedAction


@dataclass(slots=True, eq=False)
class _Block:
    """The gradients that one block has of one microbatch.

    gradients: with what they are added to.
    left: once they have been added, when that was.
    """

    stage: int
    position: float
    missing: set[torch.nn.Parameter]
    gradients: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    left: "Future[float]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Launched:
    """The sum of a bucket, under way in a thread; waiting raises what that raised."""

    launched: "Future[Sequence[Waitable]]"

    def wait(self) -> object:
        wait_for_all(self.launched.result())
        return None

    def is_completed(self) -> bool:
        return self.launched.done() and all(work.is_completed() for work in self.launched.result())


@dataclass(frozen=True, slots=True)
class _OnHost:
    """Sums that are on the host at ``at_s``, or will be when the copy there is over."""

    timing: Timing
    queued: QueuedAction
    at_s: float
    copied: Callable[[], float] | None

    def wait(self) -> object:
        self.timing.host_came(self.queued, self.copied() if self.copied is not None else self.at_s)
        return None

    def is_completed(self) -> bool:
        return False


class HostGradients:
    """Takes gradients of a rank's stages to its host, as the plan says: in most plans none.

    A step is :meth:`zero`; :meth:`add` for each gradient of each microbatch and :meth:`ends` behind each compute;
    :meth:`sum` for each bucket in the order of the program, also for those on the device.

    Args:
        stages: by index, those that the rank holds.
        host: has the optimizer's state of all that is here.
        timing: how long copies take.

    Attributes:
        on_device: bytes of gradients on their way to the host, and of a bucket that is summed.
        on_host: bytes of the host's memory.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        buckets: Sequence[LocalBucket],
        *,
        num_layers: int,
        device: torch.device,
        host: HostOptimizer,
        timing: Timing | None = None,
    ) -> None:
        self.on_device = HeldBytes()
        self._lock = Lock()
        self._summed_bytes: dict[int, int] = {}
        self._timing = timing or Timing()
        self._host = host
        self._device = device
        # The lowest positions are updated first, and may be overwritten first.
        self._buckets = sorted((each for each in buckets if each.adds_on_host), key=lambda each: each.bucket.position)
        self._block_of = dict(blocks_of(self._buckets, stages, num_layers=num_layers))
        self._members: dict[tuple[int, float], set[torch.nn.Parameter]] = {}
        for tensor, block in self._block_of.items():
            self._members.setdefault(block, set()).add(tensor)
        self._block: _Block | None = None
        self._leaving: deque[_Block] = deque()
        self._slot_is_free: Callable[[], float] = _at_once
        self._copies = host_copies(device)
        self._adding = ThreadPoolExecutor(1, thread_name_prefix="gradients-out")
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="gradient-sums")
        largest = max(self._block_of, key=lambda tensor: tensor.numel())
        self._landed = self._copies.to_keep(largest.detach().flatten(), dtype=main_grad(largest).dtype)
        beside = {tensor for local in self._buckets for tensor in local.cut_tensors()}
        self.on_host = self._landed.nbytes + sum(local.gradients.nbytes for local in self._buckets)
        self.on_host += sum(main_grad(tensor).nbytes for tensor in beside)

    def __contains__(self, tensor: torch.nn.Parameter) -> bool:
        return tensor in self._block_of

    def zero(self) -> None:
        """Forget the gradients of the last step, each bucket as soon as the host has updated it."""
        for local in self._buckets:
            self._adding.submit(self._forget, local, self._host.wait_for_update(local.number))

    def add(self, tensor: torch.nn.Parameter) -> None:
        """The gradient of ``tensor`` of one microbatch is in ``.grad``, from where it leaves."""
        gradient = tensor.grad
        drop_grad(tensor)
        assert gradient is not None, "no kernel adds to what is on the host"
        self._hold(gradient.nbytes)
        stage, position = self._block_of[tensor]
        block = self._block
        if block is None or (stage, position) != (block.stage, block.position):
            block = self._begin_block(stage, position)
        block.gradients.append((main_grad(tensor), gradient))
        block.missing.discard(tensor)
        if not block.missing:
            self._end_block()

    def ends(self) -> None:
        """A compute is over: what has not come by now does not."""
        self._end_block()

    def sum(self, queued: QueuedAction, local: LocalBucket) -> Waitable:
        """All gradients of a bucket have come: sum it over its holders, and tell the host."""
        ready_s = self._timing.reached_s(queued)
        if not local.adds_on_host:
            local.collect_gradients()
            return _Launched(
                self._summing.submit(self._sum_there, queued, local, self._copies.mark_computed(), ready_s)
            )
        under_way = [*self._leaving, *([self._block] if self._block is not None else [])]
        return _Launched(self._summing.submit(self._sum_here, queued, local, under_way, ready_s))

    def _begin_block(self, stage: int, position: float) -> _Block:
        self._end_block()
        while len(self._leaving) > GRADIENT_SLOTS - 1:
            self._timing.block_waited(position, self._leaving.popleft().left.result())
        self._block = _Block(stage, position, set(self._members[stage, position]))
        return self._block

    def _end_block(self) -> None:
        block, self._block = self._block, None
        if block is not None:
            done_s = self._timing.block_end_s(block.position)
            self._leaving.append(block)
            added = self._adding.submit(self._add, block, self._copies.mark_computed(), done_s)
            added.add_done_callback(partial(_pass_on, block.left))

    @torch.no_grad()
    def _add(self, block: _Block, computed: Callable[[], None], done_s: float) -> float:
        for target, gradient in block.gradients:
            landed = self._landed.view(gradient.dtype)[: gradient.numel()].view(gradient.shape)
            with self._copies.outwards(StreamRole.COMPUTED_OUT):
                computed()
                self._copies.copy(landed, gradient)
            target.add_(landed)
        self._hold(-sum(gradient.nbytes for _, gradient in block.gradients))
        block.gradients.clear()
        return self._timing.copy_block(ActionKind.ADD_G, block.stage, block.position, after_s=done_s)

    def _forget(self, local: LocalBucket, updated: Callable[[], None]) -> None:
        updated()
        local.gradients.zero_()
        for tensor in local.cut_tensors():
            main_grad(tensor).zero_()

    @torch.no_grad()
    def _sum_there(
        self, queued: QueuedAction, local: LocalBucket, computed: Callable[[], None], ready_s: float
    ) -> Sequence[Waitable]:
        """A bucket on the device, in its turn."""
        with self._copies.within(StreamRole.SUMS):
            computed()
            works = self._launch(queued, local, local.gradients, ready_s)
            self._host.summed(local, works, ready_s=ready_s)
        return works

    @torch.no_grad()
    def _sum_here(
        self, queued: QueuedAction, local: LocalBucket, under_way: Sequence[_Block], ready_s: float
    ) -> Sequence[Waitable]:
        """A bucket on the host, which goes to the device in between where others hold it."""
        added_s = max((block.left.result() for block in under_way), default=0.0)
        added_s = max(added_s, ready_s)
        local.collect_gradients()
        if not local.is_shared:
            self._host.summed(local, (), ready_s=added_s)
            return [_OnHost(self._timing, queued, added_s, None)]
        # One at a time is on the device.
        self._slot_is_free()
        with self._copies.within(StreamRole.SUMS):
            on_device = torch.empty_like(local.gradients, device=self._device)
            self._hold(on_device.nbytes)
            self._summed_bytes[queued.action.number] = on_device.nbytes
            with self._timing.host(ActionKind.IN_G, local.bucket, after_s=added_s) as span:
                self._copies.copy(on_device, local.gradients)
            works = self._launch(queued, local, on_device, max(span.end_s, added_s))
            there = self._host.summed(local, works, ready_s=span.end_s, source=on_device)
        copied = partial(self._let_go, there, queued.action.number)
        self._slot_is_free = copied
        return [*works, _OnHost(self._timing, queued, 0.0, copied)]

    def _launch(
        self, queued: QueuedAction, local: LocalBucket, gradients: torch.Tensor, ready_s: float
    ) -> Sequence[Waitable]:
        if queued.action.kind != ActionKind.REDUCE:
            return ()
        start = partial(local.collectives.sum, gradients)
        return self._timing.collective(queued, local.collectives.summing, local.bucket, start, ready_s=ready_s)

    def _let_go(self, copied: Callable[[], float], bucket: int) -> float:
        """Called by who waits for the copy and by who needs the room, of which the first one gives it back."""
        at_s = copied()
        with self._lock:
            self.on_device.add(-self._summed_bytes.pop(bucket, 0))
        return at_s

    def _hold(self, num_bytes: int) -> None:
        with self._lock:
            self.on_device.add(num_bytes)


def _pass_on(to: "Future[float]", over: "Future[float]") -> None:
    error = over.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(over.result())


def _at_once() -> float:
    return 0.0
