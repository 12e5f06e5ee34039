"""Keeps what blocks save of a microbatch on the host, from their forward to their backward.

    main thread   forward   block 0 ─ block 1 ─ block 2 ─ ...      backward   ... ─ block 2 ─ block 1 ─ block 0
    copies out                       └ OUT 0   └ OUT 1   └ OUT 2
    copies in                                                              └ IN 2 ── IN 1 ──┴ IN 0

torch's hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``) tell what a block saves, and when its
backward wants it. torch's own ``save_on_cpu`` copies each tensor on the spot and waits for it; megatron-core's offload
of activations needs TransformerEngine, and knows one stage per rank. Here a thread copies the tensors of a block out
when the block is done, and another brings a block back while the one above it computes: one ahead.

A device holds two blocks that leave, the one that computes among them, and two that come.
In a forward a block begins when the one before the last has left. Blocks come back in the order of the backwards of the
program, each as soon as its forward is over and there is room: also beside other microbatches' computes and those of
other stages of the rank.

Weights stay, with everything that shares their memory. A layer under full recomputation saves its input alone, and that
goes out; what it computes again stays.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from hetero.cost.stage_memory import ACTIVATION_SLOTS_EACH_WAY
from hetero.distributed.timing import Timing
from hetero.plan.ir import Stage
from hetero.plan.offload import blocks_with_activations_on_host
from hetero.plan.stream_roles import StreamRole
from hetero.runtime.host_copies import Arrived, host_copies
from hetero.runtime.host_slots import BlockKey, HostSlots, Taken
from hetero.runtime.stage_blocks import tell_beginnings
from hetero.schedule.actions import Action, ActionKind
from hetero.schedule.activation_residency import worst_moments
from hetero.schedule.program import Program


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of one or more saved tensors, as bytes.

    source: on the device as the forward made it, until it is on the host.
    host: there, until the backward is over.
    device: back on the device.
    """

    nbytes: int
    source: torch.Tensor | None
    host: torch.Tensor | None = None
    device: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Block:
    """What one block saves of one microbatch, by the address of its memory.

    taken: its memory on the host.
    left: returns, once it is on the host, when that was.
    coming: on its way back; returns when it is there.
    """

    microbatch: "_Microbatch"
    stage: int
    position: float
    memory: dict[int, _Memory] = field(default_factory=dict)
    taken: Taken = field(default_factory=Taken)
    left: "Future[float] | None" = None
    coming: "Future[tuple[Arrived, float]] | None" = None
    is_reached: bool = False
    is_over: bool = False

    @property
    def key(self) -> BlockKey:
        return self.stage, self.position

    @property
    def sizes(self) -> list[int]:
        return [each.nbytes for each in self.memory.values()]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


@dataclass(slots=True, eq=False)
class _Microbatch:
    """The blocks of one microbatch on one stage, in the order of the forward.

    input: the stage's, as long as its memory may be given back.
    savers: blocks that have saved the input and not left yet.
    """

    input: torch.Tensor | None
    blocks: list[_Block] = field(default_factory=list)
    savers: int = 0
    forward_is_over: bool = False

    def is_input(self, address: int) -> bool:
        return self.input is not None and self.input.untyped_storage().data_ptr() == address

    def give_input_back(self) -> None:
        """Once nobody reads it any more; its shape and its gradient stay."""
        if self.input is not None and self.forward_is_over and self.savers == 0:
            self.input.untyped_storage().resize_(0)
            self.input = None


class _Tensor(NamedTuple):
    """Takes the place of a saved tensor in autograd's graph."""

    block: _Block
    memory: _Memory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(slots=True)
class HeldBytes:
    """Bytes that are held now, and the most that were."""

    now: int = 0
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Take note of more, or of less."""
        self.now += num_bytes
        self.most = max(self.most, self.now)


class HostActivations:
    """Takes activations of a rank's stages to its host and back, as the plan says: those of no block in most plans.

    A step is :meth:`begin`, :meth:`saving` around each forward that leaves a graph, :meth:`using` around each backward.

    Args:
        stages: by index, those that the rank holds, and their modules.
        program: of a training step.
        timing: how long copies take.

    Attributes:
        on_device: of blocks that are on their way, those that compute among them.
        on_host: of blocks that are there, or leave for it.
    """

    def __init__(
        self,
        stages: Mapping[int, tuple[Stage, torch.nn.Module]],
        program: Program,
        *,
        num_layers: int,
        device: torch.device,
        timing: Timing | None = None,
    ) -> None:
        self.on_device, self.on_host = HeldBytes(), HeldBytes()
        self._timing = timing or Timing()
        self._device = device
        self._modules = {s: module for s, (_, module) in stages.items()}
        self._positions = {
            s: blocks_with_activations_on_host(stage, num_layers=num_layers) for s, (stage, _) in stages.items()
        }
        self._copies = host_copies(device)
        self._slots = HostSlots(self._copies)
        self._weighs = False
        self.follow(program)
        self._kept: dict[tuple[int, int], _Microbatch] = {}
        self._microbatch: _Microbatch | None = None
        self._block: _Block | None = None
        self._weights: set[int] = set()
        self._leaving: deque[_Block] = deque()
        self._backwards: deque[Action] = deque()
        self._next: deque[_Block] = deque()
        self._coming: deque[_Block] = deque()
        if self._order:
            self._out = ThreadPoolExecutor(1, thread_name_prefix="activations-out")
            self._in = ThreadPoolExecutor(1, thread_name_prefix="activations-in")
            for s, (stage, module) in stages.items():
                if self._positions[s]:
                    # What is saved until the next block begins is a block's own.
                    tell_beginnings(stage, module, partial(self._begins, s), is_last=stage.end == num_layers)

    def follow(self, program: Program) -> None:
        """Bring blocks back from the next step on in the order of ``program``, which differs in its microbatches."""
        self._order = [queued.action for queued in program.queues.get("activations_in", ())]
        moments = worst_moments([queued.action for queued in program.queues["compute"]]) if self._order else []
        self._in_flight = {s: max((moment[s].in_flight for moment in moments), default=0) for s in self._positions}

    def reserve(self) -> None:
        """Allocate on the host what the blocks of a step need, as far as is known; no step may be under way."""
        self._slots.grow(self._in_flight)

    def begin(self) -> None:
        """A step begins; nothing is kept of the one before."""
        self.reserve()
        self._backwards = deque(self._order)

    @contextmanager
    def weighing(self, s: int, input_SBH: torch.Tensor | None) -> Iterator[None]:
        """Surrounds a forward of a warm-up, of which nothing goes to the host: learn what each block saves."""
        self._weighs = True
        with self._hooks(s, _Microbatch(input_SBH)):
            yield
        self._weighs = False

    @contextmanager
    def saving(self, action: Action, input_SBH: torch.Tensor | None) -> Iterator[None]:
        """Surrounds a forward that leaves a graph.

        Args:
            input_SBH: of the stage. Its memory goes when it is on the host and the forward over, but not its gradient.
        """
        if not self._positions[action.stage]:
            yield
            return
        kept = self._kept[action.stage, action.number] = _Microbatch(input_SBH)
        with self._hooks(action.stage, kept):
            yield
        kept.forward_is_over = True
        kept.give_input_back()
        self._bring(self._timing.block_end_s(None))

    @contextmanager
    def _hooks(self, s: int, microbatch: _Microbatch) -> Iterator[None]:
        """Surrounds a forward, whose blocks are those of ``microbatch``."""
        if not self._positions[s]:
            yield
            return
        module = self._modules[s]
        self._weights = {_identity(each) for each in (*module.parameters(), *module.buffers())}
        self._microbatch = microbatch
        self._begin_block(s, self._positions[s][0])
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._end_block()
        self._microbatch = None

    @contextmanager
    def using(self, action: Action) -> Iterator[None]:
        """Surrounds a backward, which says itself what it needs."""
        yield
        kept = self._kept.pop((action.stage, action.number), None)
        if kept is None:
            return
        while not all(block.is_over for block in kept.blocks):
            self._let_go()
        for block in kept.blocks:
            self.on_host.add(-block.nbytes)
            for each in block.memory.values():
                each.host = None
            self._slots.give_back(block.key, block.taken)

    def _begins(self, s: int, position: float) -> None:
        # Elsewhere it is an evaluation, a warm-up, or a layer that is computed again.
        if self._microbatch is not None and (self._block is None or self._block.position != position):
            self._end_block()
            self._begin_block(s, position)

    def _begin_block(self, s: int, position: float) -> None:
        if position not in self._positions[s]:
            return
        assert self._microbatch is not None
        while len(self._leaving) > ACTIVATION_SLOTS_EACH_WAY - 1:
            before = self._leaving[0]
            assert before.left is not None
            self._timing.block_waited(position, before.left.result())
            self._has_left(before)
        self._block = _Block(self._microbatch, s, position)
        self._microbatch.blocks.append(self._block)

    def _end_block(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        self._slots.weigh(block.key, block.sizes)
        if not self._weighs:
            block.taken = self._slots.take(block.key, block.sizes)
            for each, part in zip(block.memory.values(), block.taken.parts, strict=True):
                each.host = part
            self.on_host.add(block.nbytes)
            done_s = self._timing.block_end_s(block.position)
            block.left = self._out.submit(self._copy_out, block, self._copies.mark_computed(), done_s)
            self._leaving.append(block)

    def _has_left(self, block: _Block) -> None:
        """Its copy on the host is whole: forget what the forward has made."""
        self._leaving.remove(block)
        for address, each in block.memory.items():
            block.microbatch.savers -= block.microbatch.is_input(address)
            each.source = None
        self.on_device.add(-block.nbytes)
        block.microbatch.give_input_back()

    def _pack(self, tensor: torch.Tensor) -> "_Tensor | torch.Tensor":
        storage = tensor.untyped_storage()
        address, kept, block = storage.data_ptr(), self._microbatch, self._block
        assert kept is not None
        if block is None or tensor.device != self._device or _identity(tensor) in self._weights or not storage.nbytes():
            if kept.is_input(address):
                kept.input = None
            return tensor.detach()
        if address not in block.memory:
            source = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            block.memory[address] = _Memory(source.nbytes, source)
            if not self._weighs:
                self.on_device.add(source.nbytes)
                kept.savers += kept.is_input(address)
        if self._weighs:
            return tensor.detach()
        return _Tensor(
            block, block.memory[address], tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def _unpack(self, saved: "_Tensor | torch.Tensor") -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._reach(saved.block)
        # Autograd goes through blocks downwards. Should it want something of one above after all, here it is.
        there = saved.memory.device if saved.memory.device is not None else _present(saved.memory.host).to(self._device)
        found = torch.empty(0, dtype=saved.dtype, device=self._device)
        return found.set_(there.untyped_storage(), saved.offset, saved.size, saved.stride)

    def _reach(self, block: _Block) -> None:
        """The backward begins ``block``, and has done with those above it."""
        if block.is_reached:
            return
        while not self._coming or self._coming[0] is not block:
            self._let_go()
        self._wait(block)

    def _wait(self, block: _Block) -> None:
        assert block.coming is not None
        arrived, at_s = block.coming.result()
        arrived.wait()
        self._timing.block_waited(block.position, at_s)
        block.is_reached = True
        if block in self._leaving:
            self._has_left(block)

    def _let_go(self) -> None:
        """Of the block that came first."""
        block = self._coming.popleft()
        if not block.is_reached:
            # It has saved nothing that the backward wanted.
            self._wait(block)
        for each in block.memory.values():
            each.device = None
        self.on_device.add(-block.nbytes)
        block.is_over = True
        self._bring(self._timing.block_end_s(block.position))

    def _bring(self, room_s: float) -> None:
        """Let as many blocks come as there is room for, from ``room_s`` on."""
        while len(self._coming) < ACTIVATION_SLOTS_EACH_WAY:
            if not self._next:
                first = self._backwards[0] if self._backwards else None
                kept = self._kept.get((first.stage, first.number)) if first is not None else None
                if kept is None or not kept.forward_is_over:
                    return
                self._backwards.popleft()
                self._next.extend(reversed(kept.blocks))
            block = self._next.popleft()
            for each in block.memory.values():
                each.device = torch.empty(each.nbytes, dtype=torch.uint8, device=self._device)
            self.on_device.add(block.nbytes)
            block.coming = self._in.submit(self._copy_in, block, self._copies.mark_computed(), room_s)
            self._coming.append(block)

    @torch.no_grad()
    def _copy_out(self, block: _Block, computed: Callable[[], None], done_s: float) -> float:
        with self._copies.outwards(StreamRole.COMPUTED_OUT):
            computed()
            for each in block.memory.values():
                self._copies.copy(_present(each.host), _present(each.source))
        return self._timing.copy_block(ActionKind.OUT_A, block.stage, block.position, after_s=done_s)

    @torch.no_grad()
    def _copy_in(self, block: _Block, computed: Callable[[], None], room_s: float) -> tuple[Arrived, float]:
        assert block.left is not None
        left_s = block.left.result()
        with self._copies.within(StreamRole.FETCHES_IN):
            computed()
            for each in block.memory.values():
                self._copies.copy(_present(each.device), _present(each.host))
            arrived = self._copies.arrived(StreamRole.FETCHES_IN)
        after_s = max(left_s, room_s)
        return arrived, self._timing.copy_block(ActionKind.IN_A, block.stage, block.position, after_s=after_s)


def _identity(tensor: torch.Tensor) -> int:
    """Names the storage below a tensor also while weights that live on the host have no memory (:mod:`.host_weights`),
    or get some elsewhere."""
    found: int = tensor.untyped_storage()._cdata
    return found


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a block goes out before it comes in"
    return tensor
