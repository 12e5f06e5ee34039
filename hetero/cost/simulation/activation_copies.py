"""Says by how much copies of weights and activations between host and device, and of gradients, hold up computes.

As :mod:`hetero.runtime.host_activations` does it: a block leaves behind its forward, one after the other; a block of a
forward begins when the one before the last has left. Blocks come in the order of the backwards, each when its forward
is over and the one before the last has been used up; a block of a backward begins when it is there.

Gradients that add up on the host (:mod:`hetero.runtime.host_gradients`) leave behind their block of a backward, one
after the other; a block of a backward begins when the one before the last has been added.

Weights that live on the host (:mod:`hetero.runtime.host_weights`) come block by block in the order of all computes of
the lane, each when the one before the last has been used; a block begins when its own are there. What is needed again
while it is there does not come again.

Out and in, a rank has a link each, which all of these share with one another and with what updates on the host copy
(:mod:`.copy_link`).
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hetero.cost.simulation.copy_link import Busy, CopyLink
from hetero.cost.stage_memory import ACTIVATION_SLOTS_EACH_WAY, GRADIENT_SLOTS, WEIGHT_SLOTS
from hetero.schedule.actions import BACKWARD, FETCHES, Action, ActionKind


class BlockCopy(NamedTuple):
    """A block whose activations or weights are on the host, or whose gradients add up there.

    forward, backward: from which share of the stage's compute to which it is at work.
    out_s, in_s: seconds of the copies of its activations for one microbatch; ``None`` where these stay.
    add_s: seconds in which its gradients of one microbatch are copied and added; ``None`` where these stay.
    sum_s: those of them in which they are added, and the link is free.
    fetch_s: seconds in which its weights come; ``None`` where these stay.
    whole_s: when these are on the host as the last update made them.
    """

    position: float
    forward: tuple[float, float]
    backward: tuple[float, float]
    out_s: float | None
    in_s: float | None
    add_s: float | None = None
    sum_s: float = 0.0
    fetch_s: float | None = None
    whole_s: float = 0.0

    def seconds_of(self, kind: ActionKind) -> float:
        """Of a copy of this kind."""
        fetches = dict.fromkeys(FETCHES.values(), self.fetch_s)
        copies = {ActionKind.OUT_A: self.out_s, ActionKind.IN_A: self.in_s, ActionKind.ADD_G: self.add_s}
        seconds = (fetches | copies)[kind]
        assert seconds is not None, "the block leaves this on the device"
        return seconds

    def shares(self, kind: ActionKind) -> tuple[float, float]:
        """In a compute of this kind."""
        return self.backward if kind in BACKWARD else self.forward


StageCopies = tuple[tuple[int, tuple[BlockCopy, ...]], ...]
"""By stage, its blocks whose activations, gradients or weights are on the host, in the order of the forward."""


class LaneCopies(NamedTuple):
    """What the stages of a lane copy, and when updates on the host use its links out and in."""

    stages: StageCopies = ()
    out_busy: Busy = ()
    in_busy: Busy = ()


NO_COPIES = LaneCopies()


class _Used(NamedTuple):
    """The weights of a block on the device, by stage and position, and until when computes used them."""

    block: tuple[int, float] | None
    until_s: float


class ActivationCopies:
    """Follows the copies of one lane through its computes, which are told in their order.

    Attributes:
        out, into: the links, with all copies so far.
        added_s: by stage and position of a block, when the last of its gradients so far were added up on the host.
    """

    def __init__(self, copies: LaneCopies, computes: Sequence[Action]) -> None:
        self.out, self.into = CopyLink(copies.out_busy), CopyLink(copies.in_busy)
        self.added_s: dict[tuple[int, float], float] = {}
        self._blocks = {s: blocks for s, blocks in copies.stages if blocks}
        self._again = {(stage, number) for stage, kind, number in computes if kind == ActionKind.R}
        self._out_free_s = self._in_free_s = self._add_free_s = self._fetch_free_s = 0.0
        # Of weights, the last blocks that came, and until when they were used.
        self._used: deque[_Used] = deque([_Used(None, 0.0)] * WEIGHT_SLOTS, WEIGHT_SLOTS)
        self._added_s: deque[float] = deque([0.0] * GRADIENT_SLOTS, GRADIENT_SLOTS)
        # When the last blocks have left, and when the last that came were used up.
        self._left_s: deque[float] = deque([0.0] * ACTIVATION_SLOTS_EACH_WAY, ACTIVATION_SLOTS_EACH_WAY)
        self._used_up_s: deque[float] = deque([0.0] * ACTIVATION_SLOTS_EACH_WAY, ACTIVATION_SLOTS_EACH_WAY)
        self._there_s: dict[tuple[int, int], Sequence[float]] = {}
        self._over_s: dict[tuple[int, int], float] = {}

    def end_s(self, action: Action, end_s: float, *, seconds: float) -> float:
        """When a compute ends that would end at ``end_s`` without copies, ``seconds`` long or longer."""
        stage, kind, number = action
        key, blocks = (stage, number), self._blocks.get(stage)
        if blocks is None:
            return end_s
        if kind in BACKWARD:
            return self._backward(key, blocks, end_s, seconds)
        saves = kind != ActionKind.F or key not in self._again
        return self._forward(key, blocks, end_s, seconds, saves=saves)

    def _forward(
        self, key: tuple[int, int], blocks: Sequence[BlockCopy], end_s: float, seconds: float, *, saves: bool
    ) -> float:
        left_s = []
        for block in blocks:
            begin, end = block.forward
            if block.fetch_s is not None:
                end_s = max(end_s, self._weights_there_s(key[0], block) + (1.0 - begin) * seconds)
            if saves and block.out_s is not None:
                end_s = max(end_s, self._left_s[0] + (1.0 - begin) * seconds)
                done_s = end_s - (1.0 - end) * seconds
                self._out_free_s = self.out.copy(max(self._out_free_s, done_s), block.out_s)
                self._left_s.append(self._out_free_s)
                left_s.append(self._out_free_s)
            if block.fetch_s is not None:
                self._used[-1] = self._used[-1]._replace(until_s=end_s - (1.0 - end) * seconds)
        if saves:
            self._there_s[key], self._over_s[key] = left_s, end_s
        return end_s

    def _weights_there_s(self, stage: int, block: BlockCopy) -> float:
        assert block.fetch_s is not None
        for used in self._used:
            if used.block == (stage, block.position):
                self._used.remove(used)
                self._used.append(used)
                return used.until_s
        after_s = max(self._fetch_free_s, self._used[0].until_s, block.whole_s)
        self._fetch_free_s = self.into.copy(after_s, block.fetch_s)
        self._used.append(_Used((stage, block.position), self._fetch_free_s))
        return self._fetch_free_s

    def _backward(self, key: tuple[int, int], blocks: Sequence[BlockCopy], end_s: float, seconds: float) -> float:
        forward_s = self._over_s.pop(key)
        left = list(self._there_s.pop(key))
        for block in reversed(blocks):
            begin, end = block.backward
            # Backwards of an embedding need no weights.
            fetches = block.fetch_s is not None and block.position >= 0
            if fetches:
                end_s = max(end_s, self._weights_there_s(key[0], block) + (1.0 - begin) * seconds)
            if block.in_s is not None:
                after_s = max(self._in_free_s, self._used_up_s[0], forward_s, left.pop())
                self._in_free_s = self.into.copy(after_s, block.in_s)
                end_s = max(end_s, self._in_free_s + (1.0 - begin) * seconds)
            if block.add_s is not None:
                end_s = max(end_s, self._added_s[0] + (1.0 - begin) * seconds)
            done_s = end_s - (1.0 - end) * seconds
            if fetches:
                self._used[-1] = self._used[-1]._replace(until_s=done_s)
            if block.in_s is not None:
                self._used_up_s.append(done_s)
            if block.add_s is not None:
                copied_s = self.out.copy(max(self._add_free_s, done_s), block.add_s - block.sum_s)
                self._add_free_s = copied_s + block.sum_s
                self._added_s.append(self._add_free_s)
                self.added_s[key[0], block.position] = self._add_free_s
        return end_s
