"""Says what of a stage lives in its host's memory instead of the device's, and for which ranks a bucket does.

Positions are those of :mod:`hetero.spec.parameters`: a layer, half a layer more for its MLP, -1 for the embedding and
the number of layers for the head. What lives on the host is the end of a stage, from a position on: its gradients come
first in a backward, and its weights are needed last in a forward, so that the host has most time for it (AutoHete,
arXiv 2503.01890, chooses the same end). Of activations it is the other end: they are saved first and needed last.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol

from pydantic import ConfigDict

from hetero.schedule.actions import BACKWARD, FETCHES, ActionKind
from hetero.serialization import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What of a stage its ranks leave to their hosts.

    optimizer_from: the optimizer's state of all parameters from this position on is in the host's memory, where the
        host updates them beside the next forward; ``None`` for none. Comes with the plan's ``distributed_optimizer``.
    gradients_from: gradients of all parameters from this position on are added up in the host's memory, microbatch
        after microbatch, so that the device holds those of two blocks; ``None`` for none. Only of parameters whose
        optimizer's state is there.
    weights_from: weights of all parameters from this position on, in the precision of training, are in the host's
        memory; each compute fetches those of its blocks one ahead, so that the device holds those of two blocks;
        ``None`` for none. Only of parameters whose gradients add up there: these free twice the bytes for half the
        copies.
    speculate: the host tries its updates before the norm of the gradient is known, as if nothing were clipped. A wrong
        one is done again, and the state is there twice.
    overlap: the next forward waits in front of each layer for that layer's weights alone. Without, its first layer
        waits for all that hosts update, as in ZeRO-Offload (arXiv 2101.06840); to compare with that.
    activations_until: what blocks save of a microbatch between its forward and its backward goes to the host and comes
        back: of all blocks up to the one at this position, it included; ``None`` for none. A block is the embedding, a
        layer or the half of one that the stage holds, or the head (:func:`block_positions`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    optimizer_from: float | None = None
    gradients_from: float | None = None
    weights_from: float | None = None
    speculate: bool = False
    overlap: bool = True
    activations_until: float | None = None

    @property
    def updates(self) -> bool:
        """Hosts update something of the stage."""
        return self.optimizer_from is not None

    def left_at(self, position: float) -> "OnHost":
        """What of the parameters at ``position`` is on the host."""
        if self.optimizer_from is None or position < self.optimizer_from:
            return OnHost.NOTHING
        if self.gradients_from is None or position < self.gradients_from:
            return OnHost.OPTIMIZER
        if self.weights_from is None or position < self.weights_from:
            return OnHost.GRADIENTS
        return OnHost.WEIGHTS

    def within(self, start: float, end: float, *, before: float) -> "Offload":
        """The same for a stage whose layers are ``[start, end)`` from now on; nothing if none of that is left.

        Args:
            before: where the stage has ended so far. Activations until there are the head's too.
        """
        first, gradients, weights = (
            max(position, start if start > 0 else -1.0)
            if position is not None and (position < end or position == before == end)
            else None
            for position in (self.optimizer_from, self.gradients_from, self.weights_from)
        )
        return dataclasses.replace(
            self,
            optimizer_from=first,
            gradients_from=gradients,
            weights_from=weights,
            speculate=self.speculate and first is not None,
            overlap=self.overlap or first is None,
            activations_until=self._activations_within(start, end, before=before),
        )

    def _activations_within(self, start: float, end: float, *, before: float) -> float | None:
        until = self.activations_until
        if until is None or (until < 0 and start == 0) or until == before == end:
            return until
        if math.floor(until) < math.floor(start):
            return None
        # Of a layer that has been cut, the half that is left is the block.
        return max(start, min(math.floor(until), math.ceil(end) - 1.0))


NOTHING_ON_HOST = Offload()


class OnHost(IntEnum):
    """What of its parameters a stage leaves to its host; each with what stands before it."""

    NOTHING = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    WEIGHTS = 3

    def offload(self, position: float) -> Offload:
        """All of that from a position on."""
        return Offload(
            optimizer_from=position if self >= OnHost.OPTIMIZER else None,
            gradients_from=position if self >= OnHost.GRADIENTS else None,
            weights_from=position if self >= OnHost.WEIGHTS else None,
        )


class HeldLayers(Protocol):
    """What is asked of a stage here."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def offload(self) -> Offload: ...


def hosts_update(stages: Iterable[HeldLayers]) -> bool:
    """Whether any of ``stages`` leaves its optimizer or a part of it to its host."""
    return any(stage.offload.updates for stage in stages)


def block_positions(stage: HeldLayers, *, num_layers: int) -> list[float]:
    """The positions of the blocks of ``stage``, in the order of the forward: of each that of its first weights.

    The embedding is a block, and so are a layer, the half of one at an edge of the stage, and the head.
    """
    layers = range(math.floor(stage.start), math.ceil(stage.end))
    positions = [-1.0] if stage.start == 0 else []
    positions += [max(float(layer), stage.start) for layer in layers]
    return positions + ([stage.end] if stage.end == num_layers else [])


def blocks_with_activations_on_host(stage: HeldLayers, *, num_layers: int) -> list[float]:
    """Those of the positions of blocks whose activations are on the host, in the order of the forward."""
    until = stage.offload.activations_until
    if until is None:
        return []
    return [position for position in block_positions(stage, num_layers=num_layers) if position <= until]


def place_of(position: float, stages: Sequence[HeldLayers]) -> tuple[int, float]:
    """Which of ``stages``, those of one rank in order, holds ``position``, and where in it.

    What none of their layers reach lies in the head of the last one: its own parameters, and the other copy of a tied
    embedding.
    """
    for index, stage in enumerate(stages):
        if (position < 0 and stage.start == 0) or stage.start <= position < stage.end:
            return index, position
    return len(stages) - 1, stages[-1].end


def left_at(position: float, stages: Sequence[HeldLayers]) -> OnHost:
    """What a rank that holds ``stages`` leaves to its host of parameters at ``position``."""
    index, here = place_of(position, stages)
    return stages[index].offload.left_at(here)


def updates_on_host(position: float, stages: Sequence[HeldLayers]) -> bool:
    """Whether a rank that holds ``stages`` has the optimizer's state of parameters at ``position`` on its host."""
    return left_at(position, stages) >= OnHost.OPTIMIZER


def gradients_on_host(position: float, stages: Sequence[HeldLayers]) -> bool:
    """Whether a rank that holds ``stages`` adds up gradients of parameters at ``position`` on its host."""
    return left_at(position, stages) >= OnHost.GRADIENTS


def weights_on_host(position: float, stages: Sequence[HeldLayers]) -> bool:
    """Whether a rank that holds ``stages`` has the weights of parameters at ``position`` on its host."""
    return left_at(position, stages) >= OnHost.WEIGHTS


def blocks_with_gradients_on_host(stage: HeldLayers, *, num_layers: int) -> list[float]:
    """Those of the positions of blocks of which gradients are on the host, in the order of the forward.

    Of a layer from whose MLP on they are there, the whole layer counts: its gradients leave together.
    """
    return _blocks_from(stage.offload.gradients_from, stage, num_layers=num_layers)


def blocks_with_weights_on_host(stage: HeldLayers, *, num_layers: int) -> list[float]:
    """As :func:`blocks_with_gradients_on_host`, of weights, which come together."""
    return _blocks_from(stage.offload.weights_from, stage, num_layers=num_layers)


def fetched_blocks(stage: HeldLayers, kind: ActionKind, *, num_layers: int) -> list[float]:
    """The positions of blocks whose weights come from the host for a compute of this kind, in its order.

    Nothing comes for a backward of the embedding, which needs no weights.
    """
    blocks = blocks_with_weights_on_host(stage, num_layers=num_layers) if kind in FETCHES else []
    return [position for position in reversed(blocks) if position >= 0] if kind in BACKWARD else blocks


def _blocks_from(first: float | None, stage: HeldLayers, *, num_layers: int) -> list[float]:
    if first is None:
        return []
    positions = block_positions(stage, num_layers=num_layers)
    return [here for here, above in zip(positions, [*positions[1:], math.inf], strict=True) if above > first]


def changes_of_residency(positions: Sequence[float], holders: Sequence[Sequence[HeldLayers]]) -> Iterator[float]:
    """Those of ``positions`` at which some holder has something elsewhere than at the position before in the sequence.

    There a bucket is closed, so that each of its holders has all of its shard in one place.

    Args:
        holders: the stages of each rank, or of ranks that are alike.
    """
    if not hosts_update(stage for stages in holders for stage in stages):
        return
    before: list[OnHost] | None = None
    for position in positions:
        residency = [left_at(position, stages) for stages in holders]
        if before is not None and residency != before:
            yield position
        before = residency


def stages_of_ranks(stages: Sequence[tuple[tuple[int, ...], HeldLayers]]) -> Mapping[int, Sequence[HeldLayers]]:
    """By rank the stages that it holds, from all stages of a plan with their ranks, in order."""
    found: dict[int, list[HeldLayers]] = {}
    for ranks, stage in stages:
        for rank in ranks:
            found.setdefault(rank, []).append(stage)
    return found
