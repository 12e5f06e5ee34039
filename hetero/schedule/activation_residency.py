"""What a row keeps alive: the microbatches that the stages of a device group hold at its worst moments.

A forward leaves the activations of its microbatch behind, which its B or I needs. Where an R runs the forward again,
the first one leaves its input alone. An I leaves what its W needs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hetero.schedule.actions import BACKWARD, COMPUTE, Action, ActionKind


class HeldMicrobatches(NamedTuple):
    """Microbatches of one stage of which something is held.

    in_flight: between F, or R if there is one, and B or I: all of their activations.
    inputs: between F and R: their input alone.
    deferred: between I and W.
    """

    in_flight: int = 0
    inputs: int = 0
    deferred: int = 0


Moment = Mapping[int, HeldMicrobatches]
"""What a device holds at one time, by stage."""


class Residency:
    """Counts what is held while actions of a device group begin and end.

    Args:
        recomputed: the microbatches that have an R, as (stage, number).
    """

    def __init__(self, recomputed: Collection[tuple[int, int]] = ()) -> None:
        self._recomputed = recomputed
        self.held: dict[int, HeldMicrobatches] = {}

    @classmethod
    def of_row(cls, row: Iterable[Action]) -> "Residency":
        """Nothing held yet of what ``row`` will hold."""
        return cls({(stage, number) for stage, kind, number in row if kind == ActionKind.R})

    def begin(self, action: Action) -> None:
        """A compute begins: what a forward saves counts from here on."""
        stage, kind, number = action
        if kind == ActionKind.F:
            again = (stage, number) in self._recomputed
            self._add(stage, in_flight=not again, inputs=again)
        elif kind == ActionKind.R:
            self._add(stage, in_flight=1, inputs=-1)

    def end(self, action: Action) -> None:
        """A compute has ended: what it was the last to need is let go of, and an I leaves what its W needs."""
        stage, kind, _ = action
        if kind in BACKWARD:
            self._add(stage, in_flight=-1, deferred=kind == ActionKind.I)
        elif kind == ActionKind.W:
            self._add(stage, deferred=-1)

    def _add(self, stage: int, *, in_flight: int = 0, inputs: int = 0, deferred: int = 0) -> None:
        held = self.held.get(stage, HeldMicrobatches())
        self.held[stage] = HeldMicrobatches(held.in_flight + in_flight, held.inputs + inputs, held.deferred + deferred)


def worst_moments(row: Sequence[Action]) -> list[Moment]:
    """The moments of ``row``, of one device group, at which it holds most: at no other is as much held of everything.

    Transfers count for nothing here, and a row without a forward has no such moment.
    """
    residency = Residency.of_row(row)
    computes = [action for action in row if action.kind in COMPUTE]
    stages = sorted({action.stage for action in computes})
    seen: dict[tuple[HeldMicrobatches, ...], None] = {}
    for action, after in zip(computes, [*computes[1:], None], strict=True):
        residency.begin(action)
        residency.end(action)
        if after is None or after.kind != ActionKind.F:
            # A forward only adds, so that more is held behind it.
            seen[tuple(residency.held.get(s, HeldMicrobatches()) for s in stages)] = None
    most: list[tuple[HeldMicrobatches, ...]] = []
    for moment in sorted(seen, key=lambda moment: -sum(2 * h.in_flight + h.inputs + h.deferred for h in moment)):
        if not any(_covers(other, moment) for other in most):
            most.append(moment)
    return [dict(zip(stages, moment, strict=True)) for moment in most]


def _covers(more: tuple[HeldMicrobatches, ...], less: tuple[HeldMicrobatches, ...]) -> bool:
    """Whether as much is held of everything; all activations of a microbatch are as much as its input."""
    return all(
        a.in_flight >= b.in_flight and a.deferred >= b.deferred and a.in_flight + a.inputs >= b.in_flight + b.inputs
        for a, b in zip(more, less, strict=True)
    )
