"""Replicas before their layers are divided: a sequence of stages and a microbatch, with what they can do at best.

The exhaustive search prices a shape first, and divides layers only where the shape may be part of a better plan. With
l layers on stage s, e_s seconds of embedding and head there, and c_s one way across the boundary after it,

    period >= least longest stage over all divisions of the layers,  >= max c_s,  >= the busiest interface
    fill   >= sum_s (layer_s + e_s + 2 c_s) + (layers - stages) x min_s layer_s

with every stage's fastest recomputation and memory left aside: no division of the layers is faster in either.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.planner.balance import Balanced, Share
from hetero.planner.boundaries import Crossing, Seat
from hetero.planner.candidates import Candidates, Slot, StageOption
from hetero.planner.depths import least_period
from hetero.planner.problem import Problem
from hetero.planner.templates import TemplateFactory

ROUNDING = 1e-9
"""Relative: what sums of seconds may be wrong by."""

Devices = tuple[int, ...]
"""How many of each kind."""


@dataclass(frozen=True, slots=True)
class Shape:
    """``samples`` per microbatch through stages on ``seats``; the seconds are bounds from below."""

    seats: tuple[Seat, ...]
    samples: int
    devices: Devices
    options: tuple[tuple[StageOption, ...], ...]
    crossings: tuple[Crossing, ...]
    port_s: float
    least_fill_s: float
    least_period_s: float
    least_update_s: float

    def least_seconds(self, num_microbatches: int) -> float:
        """No replica of this shape takes less for so many microbatches."""
        return self.least_fill_s + (num_microbatches - 1) * self.least_period_s + self.least_update_s

    def most_microbatches(self, seconds: float) -> int:
        """More than these no replica of this shape finishes within ``seconds``."""
        spare = seconds * (1 + ROUNDING) - self.least_fill_s - self.least_update_s
        return int(spare / self.least_period_s) + 1 if spare >= 0 else 0

    def longest_stage_s(self, seconds: float, num_microbatches: int) -> float:
        """A stage takes no longer for a microbatch in a replica that finishes so many within ``seconds``."""
        if num_microbatches < 2:
            return seconds
        return (seconds * (1 + ROUNDING) - self.least_fill_s - self.least_update_s) / (num_microbatches - 1)


def every_shape(problem: Problem, *, sizes: Sequence[int], samples: Sequence[int]) -> list[Shape]:
    """All sequences of stages of ``sizes`` devices with all tp, on one node of each kind.

    Stages of a kind take its devices in order, which loses nothing: devices of a node are alike.
    """
    candidates = Candidates(problem)
    slots = [
        Slot(kind.index, size, tp)
        for kind in candidates.usable_kinds
        for size in sizes
        if size <= kind.gpus_per_node
        for tp in candidates.degrees(size)
    ]
    found: list[Shape] = []
    for per_microbatch in samples:
        if per_microbatch <= problem.global_batch_size:
            found += _Shapes(problem, candidates, slots, per_microbatch).extended(_Part((), (), (), ()))
    return found


@dataclass(frozen=True, slots=True)
class _Part:
    """The first stages of a shape."""

    seats: tuple[Seat, ...]
    options: tuple[tuple[StageOption, ...], ...]
    crossings: tuple[Crossing, ...]
    taken: Devices


class _Shapes:
    """The shapes of one number of samples per microbatch."""

    def __init__(self, problem: Problem, candidates: Candidates, slots: Sequence[Slot], samples: int) -> None:
        self._problem = problem
        self._samples = samples
        self._factory = TemplateFactory(problem, candidates)
        self._slots = [(slot, found) for slot in slots if (found := candidates.options(slot, samples))]
        self._crossings: dict[tuple[Slot, int, Slot, int], Crossing] = {}

    def extended(self, part: _Part) -> Iterator[Shape]:
        """``part`` and all that begin with it."""
        if part.seats:
            yield self._shape(part)
        if len(part.seats) == self._problem.model.num_layers:
            return
        taken = part.taken or (0,) * len(self._problem.kinds)
        for slot, options in self._slots:
            used = taken[slot.kind] + slot.gpus
            if used <= self._problem.kinds[slot.kind].gpus_per_node:
                seat = Seat(slot, 0, taken[slot.kind])
                crossings = (*part.crossings, self._crossing(part.seats[-1], seat)) if part.seats else ()
                more = (*taken[: slot.kind], used, *taken[slot.kind + 1 :])
                yield from self.extended(_Part((*part.seats, seat), (*part.options, options), crossings, more))

    def _crossing(self, here: Seat, after: Seat) -> Crossing:
        key = here.slot, here.offset, after.slot, after.offset
        if key not in self._crossings:
            self._crossings[key] = self._factory.crossings((here, after), self._samples)[0]
        return self._crossings[key]

    def _shape(self, part: _Part) -> Shape:
        fastest = [choices[0] for choices in part.options]
        last = len(fastest) - 1
        ends_s = [option.seconds(0, first=s == 0, last=s == last) for s, option in enumerate(fastest)]
        layer_s = [option.layer_s for option in fastest]
        transfers = [crossing.seconds for crossing in part.crossings]
        port_s = self._factory.port_s(part.seats, part.crossings)
        num_layers = self._problem.model.num_layers
        return Shape(
            seats=part.seats,
            samples=self._samples,
            devices=part.taken,
            options=part.options,
            crossings=part.crossings,
            port_s=port_s,
            least_fill_s=sum(ends_s) + sum(layer_s) + (num_layers - len(fastest)) * min(layer_s) + 2 * sum(transfers),
            least_period_s=max([_least_longest_s(layer_s, ends_s, num_layers), port_s, *transfers]),
            least_update_s=max(option.update_s(1, first=s == 0, last=s == last) for s, option in enumerate(fastest)),
        )


def _least_longest_s(layer_s: Sequence[float], ends_s: Sequence[float], num_layers: int) -> float:
    """The least longest stage: each layer goes where it ends first, which is optimal for whole layers."""
    ends = [layer + end for layer, end in zip(layer_s, ends_s, strict=True)]
    after = [end + layer for layer, end in zip(layer_s, ends, strict=True)]
    for _ in range(num_layers - len(ends)):
        s = min(range(len(after)), key=after.__getitem__)
        ends[s], after[s] = after[s], after[s] + layer_s[s]
    return max(ends)


def divisions(shape: Shape, num_layers: int, longest_stage_s: float) -> Iterator[tuple[int, ...]]:
    """Every division of the layers in which no stage takes longer than ``longest_stage_s`` for a microbatch."""
    last = len(shape.seats) - 1
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


def settlements(shape: Shape, layers: Sequence[int]) -> Iterator[Balanced]:
    """``layers`` with every choice of recomputations that another one does not beat in fill and in period.

    Where the fastest ones reach the longest stage's seconds as period, nothing beats them. Else memory limits depth,
    and all choices are looked at.
    """
    last = len(layers) - 1
    fitting = [
        [option for option in choices if option.fits(layers[s], 1, first=s == 0, last=s == last)]
        for s, choices in enumerate(shape.options)
    ]
    if not all(fitting):
        return
    kept: list[Balanced] = []
    for chosen in _products(fitting):
        balanced, is_free = _settled(shape, layers, chosen)
        if not any(k.fill_s <= balanced.fill_s and k.period_s <= balanced.period_s for k in kept):
            kept.append(balanced)
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


def _settled(shape: Shape, layers: Sequence[int], chosen: Sequence[StageOption]) -> tuple[Balanced, bool]:
    """The replica, and whether its period is that of its longest stage, transfer or interface."""
    last = len(layers) - 1
    transfers = [crossing.seconds for crossing in shape.crossings]
    times = [option.seconds(layers[s], first=s == 0, last=s == last) for s, option in enumerate(chosen)]
    caps = [option.deepest(layers[s], first=s == 0, last=s == last) for s, option in enumerate(chosen)]
    free_s = max([shape.port_s, *times, *transfers])
    period_s, depths = least_period(times, transfers, caps, free_s)
    period_s = max(period_s, shape.port_s)
    shares = tuple(map(Share, layers, chosen, depths, times))
    return Balanced(shares, sum(times) + 2 * sum(transfers), period_s), period_s <= free_s * (1 + ROUNDING)
