"""Says by how much copies of activations to the host and back, and of gradients there, hold up the computes of a lane.

As :mod:`hetero.runtime.host_activations` does it: a block leaves behind its forward, one after the other; a block of a
forward begins when the one before the last has left. Blocks come in the order of the backwards, each when its forward
is over and the one before the last has been used up; a block of a backward begins when it is there. Out and in, a rank
has a link each.

Gradients that add up on the host (:mod:`hetero.runtime.host_gradients`) leave behind their block of a backward, one
after the other; a block of a backward begins when the one before the last has been added.

Left out: that all share these links with one another, and with gradients and weights of updates on the host.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hetero.cost.stage_memory import ACTIVATION_SLOTS, GRADIENT_SLOTS
from hetero.schedule.actions import BACKWARD, Action, ActionKind

_EACH_WAY = ACTIVATION_SLOTS // 2


class BlockCopy(NamedTuple):
    """A block whose activations are on the host, or whose gradients add up there.

    forward, backward: from which share of the stage's compute to which it is at work.
    out_s, in_s: seconds of the copies of its activations for one microbatch; ``None`` where these stay.
    add_s: seconds in which its gradients of one microbatch are copied and added; ``None`` where these stay.
    """

    position: float
    forward: tuple[float, float]
    backward: tuple[float, float]
    out_s: float | None
    in_s: float | None
    add_s: float | None = None

    def seconds_of(self, kind: ActionKind) -> float:
        """Of a copy of this kind."""
        seconds = {ActionKind.OUT_A: self.out_s, ActionKind.IN_A: self.in_s, ActionKind.ADD_G: self.add_s}[kind]
        assert seconds is not None, "the block leaves this on the device"
        return seconds

    def shares(self, kind: ActionKind) -> tuple[float, float]:
        """In a compute of this kind."""
        return self.backward if kind in BACKWARD else self.forward


StageCopies = tuple[tuple[int, tuple[BlockCopy, ...]], ...]
"""By stage, its blocks whose activations or gradients are on the host, in the order of the forward."""


class ActivationCopies:
    """Follows the copies of one lane through its computes, which are told in their order."""

    def __init__(self, copies: StageCopies, computes: Sequence[Action]) -> None:
        self._blocks = {s: blocks for s, blocks in copies if blocks}
        self._again = {(stage, number) for stage, kind, number in computes if kind == ActionKind.R}
        self._out_free_s = self._in_free_s = self._add_free_s = 0.0
        self._added_s: deque[float] = deque([0.0] * GRADIENT_SLOTS, GRADIENT_SLOTS)
        # When the last blocks have left, and when the last that came were used up.
        self._left_s: deque[float] = deque([0.0] * _EACH_WAY, _EACH_WAY)
        self._used_up_s: deque[float] = deque([0.0] * _EACH_WAY, _EACH_WAY)
        self._there_s: dict[tuple[int, int], Sequence[float]] = {}
        self._over_s: dict[tuple[int, int], float] = {}

    def end_s(self, action: Action, end_s: float, *, seconds: float) -> float:
        """When a compute ends that would end at ``end_s`` without copies, ``seconds`` long or longer."""
        stage, kind, number = action
        key, blocks = (stage, number), self._blocks.get(stage)
        if blocks is None or (kind == ActionKind.F and key in self._again):
            return end_s
        if kind in BACKWARD:
            return self._backward(key, blocks, end_s, seconds)
        return self._forward(key, blocks, end_s, seconds)

    def _forward(self, key: tuple[int, int], blocks: Sequence[BlockCopy], end_s: float, seconds: float) -> float:
        left_s = []
        for block in blocks:
            if block.out_s is None:
                continue
            begin, end = block.forward
            end_s = max(end_s, self._left_s[0] + (1.0 - begin) * seconds)
            self._out_free_s = max(self._out_free_s, end_s - (1.0 - end) * seconds) + block.out_s
            self._left_s.append(self._out_free_s)
            left_s.append(self._out_free_s)
        self._there_s[key], self._over_s[key] = left_s, end_s
        return end_s

    def _backward(self, key: tuple[int, int], blocks: Sequence[BlockCopy], end_s: float, seconds: float) -> float:
        forward_s = self._over_s.pop(key)
        left = list(self._there_s.pop(key))
        for block in reversed(blocks):
            begin, end = block.backward
            if block.in_s is not None:
                self._in_free_s = max(self._in_free_s, self._used_up_s[0], forward_s, left.pop()) + block.in_s
                end_s = max(end_s, self._in_free_s + (1.0 - begin) * seconds)
            if block.add_s is not None:
                end_s = max(end_s, self._added_s[0] + (1.0 - begin) * seconds)
            done_s = end_s - (1.0 - end) * seconds
            if block.in_s is not None:
                self._used_up_s.append(done_s)
            if block.add_s is not None:
                self._add_free_s = max(self._add_free_s, done_s) + block.add_s
                self._added_s.append(self._add_free_s)
        return end_s
