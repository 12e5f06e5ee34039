"""Says what of a stage lives in its host's memory instead of the device's, and for which ranks a bucket does.

Positions are those of :mod:`hetero.spec.parameters`: a layer, half a layer more for its MLP, -1 for the embedding and
the number of layers for the head. What lives on the host is the end of a stage, from a position on: its gradients come
first in a backward, and its weights are needed last in a forward, so that the host has most time for it (AutoHete,
arXiv 2503.01890, chooses the same end).
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pydantic import ConfigDict

from hetero.serialization import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What of a stage its ranks leave to their hosts.

    optimizer_from: the optimizer's state of all parameters from this position on is in the host's memory, where the
        host updates them beside the next forward; ``None`` for none. Comes with the plan's ``distributed_optimizer``.
    speculate: the host tries its updates before the norm of the gradient is known, as if nothing were clipped. A wrong
        one is done again, and the state is there twice.
    overlap: the next forward waits in front of each layer for that layer's weights alone. Without, its first layer
        waits for all that hosts update, as in ZeRO-Offload (arXiv 2101.06840); to compare with that.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    optimizer_from: float | None = None
    speculate: bool = False
    overlap: bool = True

    def within(self, start: float, end: float) -> "Offload":
        """The same for a stage whose layers are ``[start, end)`` from now on; nothing if none of that is left."""
        if self.optimizer_from is None:
            return self
        if self.optimizer_from >= end:
            return Offload()
        return dataclasses.replace(self, optimizer_from=max(self.optimizer_from, start if start > 0 else -1.0))


NOTHING_ON_HOST = Offload()


class HeldLayers(Protocol):
    """What is asked of a stage here."""

    @property
    def start(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def offload(self) -> Offload: ...


def offloads(stages: Iterable[HeldLayers]) -> bool:
    """Whether any of ``stages`` leaves something to its host."""
    return any(stage.offload != NOTHING_ON_HOST for stage in stages)


def place_of(position: float, stages: Sequence[HeldLayers]) -> tuple[int, float]:
    """Which of ``stages``, those of one rank in order, holds ``position``, and where in it.

    What none of their layers reach lies in the head of the last one: its own parameters, and the other copy of a tied
    embedding.
    """
    for index, stage in enumerate(stages):
        if (position < 0 and stage.start == 0) or stage.start <= position < stage.end:
            return index, position
    return len(stages) - 1, stages[-1].end


def updates_on_host(position: float, stages: Sequence[HeldLayers]) -> bool:
    """Whether a rank that holds ``stages`` has the optimizer's state of parameters at ``position`` on its host."""
    index, here = place_of(position, stages)
    first = stages[index].offload.optimizer_from
    return first is not None and here >= first


def changes_of_residency(positions: Sequence[float], holders: Sequence[Sequence[HeldLayers]]) -> Iterator[float]:
    """Those of ``positions`` at which some holder has something elsewhere than at the position before in the sequence.

    There a bucket is closed, so that each of its holders has all of its shard in one place.

    Args:
        holders: the stages of each rank, or of ranks that are alike.
    """
    if not offloads(stage for stages in holders for stage in stages):
        return
    before: tuple[bool, ...] | None = None
    for position in positions:
        residency = tuple(updates_on_host(position, stages) for stages in holders)
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
