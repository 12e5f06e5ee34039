"""Estimates the bytes of a stage by a formula in its layers and its depth, for the inner loops of the search.

    bytes(l, n) = base + l x per_layer + n x (per_flight + l x per_layer_flight)

l layers, n microbatches in flight; one set of coefficients for each of the four cases with and without embedding and
head. The coefficients come from the memory model at two numbers of layers. What is not linear in it (a bucket that is
larger than the gradients of one layer) is overestimated; plans are checked again with the memory model itself. What
is streamed to the host and back has slots of two blocks: what such a stage takes is linear from three layers on.
"""

import math
from dataclasses import dataclass

from hetero.cost.cost_model import StageConfig
from hetero.cost.stage_memory import GRADIENT_SLOTS, StageMemory, stage_memory, with_offload
from hetero.plan.ir import Recompute, Stage
from hetero.plan.offload import OnHost
from hetero.planner.problem import Problem

UNLIMITED = 10**6


@dataclass(frozen=True, slots=True)
class Affine:
    """One case of the formula at the head of this file."""

    base: float
    per_layer: float
    per_flight: float
    per_layer_flight: float

    def bytes(self, num_layers: int, depth: int) -> float:
        return self.base + num_layers * self.per_layer + depth * (self.per_flight + num_layers * self.per_layer_flight)


IMPOSSIBLE = Affine(float("inf"), 0.0, 0.0, 0.0)
"""A stage that the model has too few layers for: the first of two where there is one layer."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a stage option on one device.

    cases: without embedding and head, with the embedding, with the head, with both.
    """

    cases: tuple[Affine, Affine, Affine, Affine]

    def bytes(self, num_layers: int, depth: int, *, first: bool, last: bool) -> float:
        return self.cases[first + 2 * last].bytes(num_layers, depth)

    def most_layers(self, capacity: int, depth: int, *, first: bool, last: bool) -> int:
        """The most layers within ``capacity`` bytes at ``depth``, 0 if none."""
        case = self.cases[first + 2 * last]
        room = capacity - case.base - depth * case.per_flight
        return _times_into(room, case.per_layer + depth * case.per_layer_flight)

    def deepest(self, capacity: int, num_layers: int, *, first: bool, last: bool) -> int:
        """The most microbatches in flight within ``capacity`` bytes, 0 if none."""
        case = self.cases[first + 2 * last]
        room = capacity - case.base - num_layers * case.per_layer
        return _times_into(room, case.per_flight + num_layers * case.per_layer_flight)


def _times_into(room: float, each: float) -> int:
    if room < 0:
        return 0
    return int(room // each) if each > 0 else UNLIMITED


class Footprints:
    """Fits the footprints of one problem's stages.

    Args:
        num_gradient_groups: sets of ranks with which a device is assumed to sum gradients; each has buffers.
        optimizer_ways: ranks among which a distributed optimizer shares its state; ``None`` is the data-parallel ranks
            of the stage alone: with which other replicas it is shared as well, nobody knows before the cover.
    """

    def __init__(self, problem: Problem, *, num_gradient_groups: int, optimizer_ways: int | None) -> None:
        self._problem = problem
        self._num_gradient_groups = num_gradient_groups
        self._optimizer_ways = optimizer_ways

    def of(
        self,
        *,
        device: str,
        tp: int,
        dp: int,
        micro_batch_size: int,
        recompute: Recompute,
        on_host: OnHost = OnHost.NOTHING,
    ) -> Footprint:
        """The footprint of one device of a stage, whose host has that of all its parameters."""
        ways = float(self._optimizer_ways or dp) if self._problem.distributed_optimizer else 1.0
        if on_host:
            ways = math.inf
        num_layers = self._problem.model.num_layers
        smallest = GRADIENT_SLOTS + 1 if on_host >= OnHost.GRADIENTS and num_layers > GRADIENT_SLOTS + 2 else 1

        def at(first_layer: int, end_layer: int) -> StageMemory:
            num_neighbours = (first_layer != 0) + (end_layer != num_layers)
            stage = Stage(
                first_layer=first_layer,
                end_layer=end_layer,
                ranks=tuple(range(tp)),
                device=device,
                tp=tp,
                micro_batch_size=micro_batch_size,
                in_flight=1,
                sequence_parallel=self._problem.splits_sequence(tp),
                recompute=recompute,
                fp8=self._problem.computes_in_fp8(device, tp=tp, micro_batch_size=micro_batch_size),
                offload=on_host.offload(float(first_layer) or -1.0),
            )
            memory = stage_memory(
                self._problem.costs,
                StageConfig.of(stage),
                num_neighbours=num_neighbours,
                optimizer_ways=ways,
                num_communicators=2 + (tp > 1) + 2 * num_neighbours + self._num_gradient_groups,
            )
            return with_offload(
                memory, stage, self._problem.costs, shares_gradients=dp > 1 or self._num_gradient_groups > 0
            )

        # Layers beyond the last one stand for those between the ends, of which a short model has none: what they would
        # take is what options are compared by.
        counts = smallest, smallest + 1
        middle = _line([at(num_layers + 1, num_layers + 1 + held) for held in counts], smallest)
        first = _line([at(0, held) for held in counts if held < num_layers], smallest)
        last = _line([at(num_layers - held, num_layers) for held in counts if held < num_layers], smallest)
        return Footprint((middle, first, last, _line([at(0, num_layers)], num_layers)))


def _line(held: list[StageMemory], smallest: int) -> Affine:
    """Fit the formula to stages of ``smallest`` and one more layers; constant in the layers if only one number is
    possible."""
    if not held:
        return IMPOSSIBLE
    bases = [float(memory.at(0).total) for memory in held]
    flights = [memory.at(1).total - base for memory, base in zip(held, bases, strict=True)]
    if len(held) == 1:
        return Affine(bases[0], 0.0, flights[0], 0.0)
    per_layer, per_layer_flight = bases[1] - bases[0], flights[1] - flights[0]
    return Affine(
        bases[0] - smallest * per_layer, per_layer, flights[0] - smallest * per_layer_flight, per_layer_flight
    )
