"""Counts the microbatches whose activations a device group holds, and finds when it holds the most.

A forward leaves the activations of its microbatch behind, which its B or I needs. Where an R runs the forward again,
the first one leaves its input alone. An I leaves what its W needs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hetero.schedule.actions import BACKWARD, COMPUTE, Action, ActionKind


class HeldMicrobatches(NamedTuple):
    """How many microbatches of one stage have something in memory.

    in_flight: between F, or R if there is one, and B or I: all of their activations.
    inputs: between F and R: their input alone.
    deferred: between I and W: what the gradients of the weights will need.
    """

    in_flight: int = 0
    inputs: int = 0
    deferred: int = 0


Moment = Mapping[int, HeldMicrobatches]
"""What the ranks of a device group hold at one time, by stage."""


class Residency:
    """Counts what a device group holds, as its actions begin and end one by one.

    Args:
        recomputed: the microbatches that have an R, as (stage, number).
    """

    def __init__(self, recomputed: Collection[tuple[int, int]] = ()) -> None:
        self._recomputed = recomputed
        self.held: dict[int, HeldMicrobatches] = {}

    @classmethod
    def of_row(cls, row: Iterable[Action]) -> "Residency":
        """A counter at the start of ``row``: nothing is held yet."""
        return cls({(stage, number) for stage, kind, number in row if kind == ActionKind.R})

    def begin(self, action: Action) -> None:
        """Counts the start of a compute: what a forward saves is held from here on."""
        stage, kind, number = action
        if kind == ActionKind.F:
            again = (stage, number) in self._recomputed
            self._add(stage, in_flight=not again, inputs=again)
        elif kind == ActionKind.R:
            self._add(stage, in_flight=1, inputs=-1)

    def end(self, action: Action) -> None:
        """Counts the end of a compute: what it was the last to need is freed, and an I leaves what its W needs."""
        stage, kind, _ = action
        if kind in BACKWARD:
            self._add(stage, in_flight=-1, deferred=kind == ActionKind.I)
        elif kind == ActionKind.W:
            self._add(stage, deferred=-1)

    def _add(self, stage: int, *, in_flight: int = 0, inputs: int = 0, deferred: int = 0) -> None:
        held = self.held.get(stage, HeldMicrobatches())
        self.held[stage] = HeldMicrobatches(held.in_flight + in_flight, held.inputs + inputs, held.deferred + deferred)


def worst_moments(row: Sequence[Action]) -> list[Moment]:
    """The moments at which the row of a device group holds the most: the Pareto maxima over everything that it holds.

    Which of them needs the most bytes depends on the stages, so all are returned. Transfers are not counted, and a row
    without a forward has no such moment.
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
    """Whether ``more`` holds at least as much of everything; all activations of a microbatch contain its input."""
    return all(
        a.in_flight >= b.in_flight and a.deferred >= b.deferred and a.in_flight + a.inputs >= b.in_flight + b.inputs
        for a, b in zip(more, less, strict=True)
    )
