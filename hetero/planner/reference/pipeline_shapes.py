"""Enumerates pipelines before their layers are divided, with bounds on what each can do at best.

The exhaustive search prices a shape first, and divides layers only where the shape may be part of a better plan. With
l layers on stage s, e_s seconds of embedding and head there, and c_s one way across the boundary after it,

    period >= least longest stage over all divisions of the layers,  >= max c_s,  >= the busiest NIC
    fill   >= sum_s (layer_s + e_s + 2 c_s) + (layers - stages) x min_s layer_s

with every stage's fastest recomputation and memory left aside: no division of the layers is faster in either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.planner.problem import Problem
from hetero.planner.replica.balance import BalancedPipeline, settled
from hetero.planner.replica.boundary_costs import BoundaryCost, PlacedSlot
from hetero.planner.replica.stage_options import Slot, StageOption, StageOptionTable
from hetero.planner.replica.templates import TemplateFactory

ROUNDING = 1e-9
"""Relative: what sums of seconds may be wrong by."""

Devices = tuple[int, ...]
"""How many of each node type."""


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline before its layers are divided: ``samples`` per microbatch through stages on ``placed_slots``; the
    seconds are bounds from below."""

    placed_slots: tuple[PlacedSlot, ...]
    samples: int
    devices: Devices
    options: tuple[tuple[StageOption, ...], ...]
    boundary_costs: tuple[BoundaryCost, ...]
    nic_s: float
    least_fill_s: float
    least_period_s: float
    least_update_s: float

    def least_seconds(self, num_microbatches: int) -> float:
        """The least seconds that any replica of this shape takes for so many microbatches."""
        return self.least_fill_s + (num_microbatches - 1) * self.least_period_s + self.least_update_s

    def most_microbatches(self, seconds: float) -> int:
        """The most microbatches that any replica of this shape finishes within ``seconds``."""
        spare = seconds * (1 + ROUNDING) - self.least_fill_s - self.least_update_s
        return int(spare / self.least_period_s) + 1 if spare >= 0 else 0

    def longest_stage_s(self, seconds: float, num_microbatches: int) -> float:
        """The most seconds per microbatch of a stage in a replica that finishes so many within ``seconds``."""
        if num_microbatches < 2:
            return seconds
        return (seconds * (1 + ROUNDING) - self.least_fill_s - self.least_update_s) / (num_microbatches - 1)


def every_shape(problem: Problem, *, sizes: Sequence[int], samples: Sequence[int]) -> list[PipelineShape]:
    """All sequences of stages of ``sizes`` devices with all tp, on one node of each type.

    Stages of a node type take its devices in order, which loses nothing: devices of a node are alike.
    """
    stage_options = StageOptionTable(problem)
    slots = [
        Slot(node_type.index, size, tp)
        for node_type in stage_options.usable_node_types
        for size in sizes
        if size <= node_type.gpus_per_node
        for tp in stage_options.degrees(size)
    ]
    found: list[PipelineShape] = []
    for per_microbatch in samples:
        if per_microbatch <= problem.global_batch_size:
            of_samples = _ShapesOfSamples(problem, stage_options, slots, per_microbatch)
            of_samples.extend(_Part((), (), (), (0,) * len(problem.node_types)))
            found += of_samples.found
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """The first stages of a shape."""

    placed_slots: tuple[PlacedSlot, ...]
    options: tuple[tuple[StageOption, ...], ...]
    boundary_costs: tuple[BoundaryCost, ...]
    taken: Devices


class _ShapesOfSamples:
    """Enumerates the shapes of one number of samples per microbatch."""

    def __init__(self, problem: Problem, stage_options: StageOptionTable, slots: Sequence[Slot], samples: int) -> None:
        self._problem = problem
        self._samples = samples
        self._factory = TemplateFactory(problem, stage_options)
        self._slots = [(slot, found) for slot in slots if (found := stage_options.of(slot, samples))]
        self._boundary_costs: dict[tuple[Slot, int, Slot, int], BoundaryCost] = {}
        self.found: list[PipelineShape] = []

    def extend(self, part: _Part) -> None:
        """Add all shapes that begin with ``part``, itself included, to those that were found."""
        if part.placed_slots:
            self.found.append(self._shape(part))
        if len(part.placed_slots) == self._problem.model.num_layers:
            return
        taken = part.taken
        for slot, options in self._slots:
            used = taken[slot.node_type] + slot.gpus
            if used <= self._problem.node_types[slot.node_type].gpus_per_node:
                placed = PlacedSlot(slot, 0, taken[slot.node_type])
                boundary_costs = (
                    (*part.boundary_costs, self._boundary_cost(part.placed_slots[-1], placed))
                    if part.placed_slots
                    else ()
                )
                more = (*taken[: slot.node_type], used, *taken[slot.node_type + 1 :])
                self.extend(_Part((*part.placed_slots, placed), (*part.options, options), boundary_costs, more))

    def _boundary_cost(self, here: PlacedSlot, after: PlacedSlot) -> BoundaryCost:
        key = here.slot, here.offset, after.slot, after.offset
        if key not in self._boundary_costs:
            self._boundary_costs[key] = self._factory.boundary_costs((here, after), self._samples)[0]
        return self._boundary_costs[key]

    def _shape(self, part: _Part) -> PipelineShape:
        fastest = [choices[0] for choices in part.options]
        last = len(fastest) - 1
        ends_s = [option.seconds(0, first=s == 0, last=s == last) for s, option in enumerate(fastest)]
        layer_s = [option.layer_s for option in fastest]
        transfers = [boundary_cost.seconds for boundary_cost in part.boundary_costs]
        nic_s = self._factory.nic_s(part.placed_slots, part.boundary_costs)
        num_layers = self._problem.model.num_layers
        return PipelineShape(
            placed_slots=part.placed_slots,
            samples=self._samples,
            devices=part.taken,
            options=part.options,
            boundary_costs=part.boundary_costs,
            nic_s=nic_s,
            least_fill_s=sum(ends_s) + sum(layer_s) + (num_layers - len(fastest)) * min(layer_s) + 2 * sum(transfers),
            least_period_s=max([_least_longest_s(layer_s, ends_s, num_layers), nic_s, *transfers]),
            least_update_s=max(option.update_s(1, first=s == 0, last=s == last) for s, option in enumerate(fastest)),
        )


def _least_longest_s(layer_s: Sequence[float], ends_s: Sequence[float], num_layers: int) -> float:
    """The least longest stage: each layer goes where it ends first, which is optimal for whole layers.

    A bound by which shapes are left out, and therefore apart from the planner's own rule: a mistake in that one must
    not rule out here the plan that shows it.
    """
    ends = [layer + end for layer, end in zip(layer_s, ends_s, strict=True)]
    after = [end + layer for layer, end in zip(layer_s, ends, strict=True)]
    for _ in range(num_layers - len(ends)):
        s = after.index(min(after))
        ends[s], after[s] = after[s], after[s] + layer_s[s]
    return max(ends)


def divisions(shape: PipelineShape, num_layers: int, longest_stage_s: float) -> Iterator[tuple[int, ...]]:
    """Every division of the layers in which no stage takes longer than ``longest_stage_s`` for a microbatch."""
    last = len(shape.placed_slots) - 1
    most = []
    for s, choices in enumerate(shape.options):
        spare_s = longest_stage_s - choices[0].seconds(0, first=s == 0, last=s == last)
        by_time = int(min(spare_s / choices[0].layer_s + ROUNDING, num_layers)) if spare_s > 0 else 0
        by_memory = max(option.most_layers(1, first=s == 0, last=s == last) for option in choices)
        most.append(min(by_time, by_memory))
    after = [sum(most[s + 1 :]) for s in range(len(most))]

    def extend(layers: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        s = len(layers)
        if s == last:
            if 1 <= left <= most[s]:
                yield (*layers, left)
            return
        for number in range(max(1, left - after[s]), min(most[s], left - (last - s)) + 1):
            yield from extend((*layers, number), left - number)

    yield from extend((), num_layers)


def settlements(shape: PipelineShape, layers: Sequence[int]) -> Iterator[BalancedPipeline]:
    """Every choice of recomputations for ``layers`` that another one does not beat in fill and in period.

    Where the fastest ones reach the longest stage's seconds as period, nothing beats them. Else memory limits depth,
    and all choices are looked at.
    """
    last = len(layers) - 1
    transfers = [boundary_cost.seconds for boundary_cost in shape.boundary_costs]
    fitting = [
        [option for option in choices if option.fits(layers[s], 1, first=s == 0, last=s == last)]
        for s, choices in enumerate(shape.options)
    ]
    if not all(fitting):
        return
    kept: list[BalancedPipeline] = []
    for chosen in _products(fitting):
        balanced = settled(chosen, transfers, layers, shape.nic_s)
        if not any(k.fill_s <= balanced.fill_s and k.period_s <= balanced.period_s for k in kept):
            kept.append(balanced)
        free_s = max([shape.nic_s, *transfers, *(stage.seconds for stage in balanced.stages)])
        is_free = balanced.period_s <= free_s * (1 + ROUNDING)
        if is_free and all(option is choices[0] for option, choices in zip(chosen, shape.options, strict=True)):
            break
    yield from kept


def _products(fitting: Sequence[Sequence[StageOption]]) -> Iterator[tuple[StageOption, ...]]:
    """Every choice, the fastest of all stages first."""
    if not fitting:
        yield ()
        return
    for option in fitting[0]:
        for rest in _products(fitting[1:]):
            yield option, *rest
