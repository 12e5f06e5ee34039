"""Says in blocks what of a stage is kept on its device, and exchanges some of it for something else."""

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from hetero.cost.offload.blocks import OffloadChoice
from hetero.plan.ir import Stage
from hetero.plan.offload import Offload, block_positions, blocks_with_activations_on_host


class BlockMoves(NamedTuple):
    """Blocks more whose forward is computed again, or of which something stays on the device, or goes to the host;
    fewer below 0.

    again: computed again.
    optimizer, gradients, weights: on the device.
    activations: on the host.
    """

    again: int = 0
    optimizer: int = 0
    gradients: int = 0
    weights: int = 0
    activations: int = 0


Kind = Literal["again", "optimizer", "gradients", "weights", "activations"]
"""A field of :class:`BlockMoves`."""


class Exchange(NamedTuple):
    """A block of a kind comes to the device or leaves it, and of another kind as many as make room or have room.

    comes: it does, and as few of the other leave as have to; else it leaves, and as many of the other come as may.
    other: ``None`` for nothing else.
    """

    kind: Kind
    comes: bool
    other: Kind | None = None


def exchanges(kinds: Sequence[Kind]) -> Iterator[Exchange]:
    """All of these kinds: one alone, and each for each other one."""
    for kind, comes in itertools.product(kinds, (True, False)):
        yield Exchange(kind, comes)
        yield from (Exchange(kind, comes, other) for other in kinds if other != kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResidency:
    """A stage of ``num_layers`` layers and ``num_blocks`` blocks, with embedding and head those it has.

    again: the first so many layers are computed again.
    optimizer, gradients, weights: those of the first so many blocks are on the device, and the host has the others'.
    activations: those of the first so many blocks are on the host between forward and backward.
    """

    positions: tuple[float, ...]
    num_layers: int
    again: int
    optimizer: int
    gradients: int
    weights: int
    activations: int
    offload: Offload

    @classmethod
    def of(cls, stage: Stage, *, num_layers: int) -> Self:
        """What it is in a plan of a model of ``num_layers``.

        The stage computes no layer again selectively.
        """
        positions = tuple(block_positions(stage, num_layers=num_layers))
        layers = len(stage.layer_numbers)

        def kept(first: float | None) -> int:
            return len(positions) if first is None else sum(position < first for position in positions)

        return cls(
            positions=positions,
            num_layers=layers,
            again=(stage.recompute_num_layers or layers) if stage.recompute == "full" else 0,
            optimizer=kept(stage.offload.optimizer_from),
            gradients=kept(stage.offload.gradients_from),
            weights=kept(stage.offload.weights_from),
            activations=len(blocks_with_activations_on_host(stage, num_layers=num_layers)),
            offload=stage.offload,
        )

    @classmethod
    def chosen(cls, choice: OffloadChoice, stage: Stage, *, num_layers: int) -> Self:
        """What CP-SAT has chosen for a stage, by position."""
        now = cls.of(dataclasses.replace(stage, recompute="none", recompute_num_layers=None), num_layers=num_layers)
        blocks = choice.blocks

        def kept(on_host: Iterable[bool]) -> int:
            return next((i for i, there in enumerate(on_host) if there), len(blocks))

        return dataclasses.replace(
            now,
            again=sum(block.recompute for block in blocks),
            optimizer=kept(block.optimizer for block in blocks),
            gradients=kept(block.gradients for block in blocks),
            weights=kept(block.weights for block in blocks),
            activations=max((i + 1 for i, block in enumerate(blocks) if block.activations), default=0),
            offload=dataclasses.replace(stage.offload, speculate=choice.speculate),
        )

    def moved(self, moves: BlockMoves) -> Self:
        """The same with so many blocks more of each, and with what has to stay where their optimizer's state stays."""
        optimizer = self.optimizer + moves.optimizer
        gradients = max(self.gradients + moves.gradients, optimizer)
        return dataclasses.replace(
            self,
            again=self.again + moves.again,
            optimizer=optimizer,
            gradients=gradients,
            weights=max(self.weights + moves.weights, gradients),
            activations=self.activations + moves.activations,
        )

    def exchanged(self, exchange: Exchange, fits: Callable[["StageResidency"], bool]) -> "StageResidency | None":
        """The same after ``exchange``; ``None`` where there is nothing to exchange, or no room.

        Args:
            fits: whether the device has room for another residency.
        """
        changed = self._with_on_device(exchange.kind, 1 if exchange.comes else -1)
        if changed == self or not changed.is_possible:
            return None
        if exchange.other is None:
            return changed if not exchange.comes or fits(changed) else None
        steps = list(changed._each_more(exchange.other, -1 if exchange.comes else 1))
        if exchange.comes:
            if fits(changed):
                return None  # Nothing has to leave for it.
            fewest = _first(steps, fits)
            return steps[fewest] if fewest < len(steps) else None
        too_many = _first(steps, lambda more: not fits(more))
        return steps[too_many - 1] if too_many else None

    def _with_on_device(self, kind: Kind, blocks: int) -> Self:
        """The same with so many blocks more that keep what ``kind`` says on the device, fewer below 0."""
        return self.moved(BlockMoves(**{kind: -blocks if kind in ("again", "activations") else blocks}))

    def _each_more(self, kind: Kind, sign: int) -> Iterator[Self]:
        """The same with one, two, ... blocks more of it on the device, or fewer, as many as there are."""
        before = self
        for number in itertools.count(1):
            changed = self._with_on_device(kind, sign * number)
            if changed == before or not changed.is_possible:
                return
            yield changed
            before = changed

    @property
    def is_possible(self) -> bool:
        """Whether there are so many layers and blocks."""
        return (
            0 <= self.again <= self.num_layers
            and 0 <= self.optimizer <= self.gradients <= self.weights <= len(self.positions)
            and 0 <= self.activations <= len(self.positions)
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the stage that say so."""

        def first(kept: int) -> float | None:
            return self.positions[kept] if kept < len(self.positions) else None

        updates = first(self.optimizer) is not None
        return {
            "recompute": "full" if self.again else "none",
            "recompute_num_layers": self.again if 0 < self.again < self.num_layers else None,
            "offload": dataclasses.replace(
                self.offload,
                optimizer_from=first(self.optimizer),
                gradients_from=first(self.gradients),
                weights_from=first(self.weights),
                speculate=self.offload.speculate and updates,
                overlap=self.offload.overlap or not updates,
                activations_until=self.positions[self.activations - 1] if self.activations else None,
            ),
        }


def _first(steps: Sequence[StageResidency], holds: Callable[[StageResidency], bool]) -> int:
    """The number of the first of ``steps`` for which ``holds``, as for all behind it; their number if there is none. It
    is mostly one of the first few."""
    end = 1
    while end <= len(steps) and not holds(steps[end - 1]):
        end *= 2
    return bisect_left(steps, True, lo=end // 2, hi=min(end, len(steps)), key=holds)
