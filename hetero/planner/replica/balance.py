"""Balances a pipeline whose slots and microbatch are given: layers, recomputation and in-flight depths of its stages.

The period P is searched by bisection. For a target P, stage s takes at most

    max over options o of  min( (P - extra_s) / o.layer_s,  layers that o's memory holds at depth N_s(P) )

layers, with N_s(P) the smallest depths of :mod:`hetero.cost.pipeline_period`. P is reachable if these add up to all
layers; what is too much is taken from the stages with the slowest layers, which shortens the fill. Depths and period
are then computed anew, exactly, for the layers that were chosen. The choice of layers is a heuristic: other divisions
with the same period may fill faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cost.pipeline_period import smallest_depths
from hetero.planner.replica.boundary_costs import BoundaryCost
from hetero.planner.replica.in_flight import least_period
from hetero.planner.replica.stage_options import StageOption

BISECTIONS = 8
"""Of the period, between its least and ``SLOWEST`` times that: they leave 0.8 % of it. A heuristic."""

SLOWEST = 8.0
"""A replica whose memory makes it this many times slower than its arithmetic is not looked for. A heuristic."""


@dataclass(frozen=True, slots=True)
class BalancedStage:
    """What one stage of a balanced pipeline holds."""

    num_layers: int
    option: StageOption
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True)
class BalancedPipeline:
    """A balanced pipeline: M microbatches take ``fill_s + (M - 1) period_s``.

    fill_s: sum_s (t_s + 2 c_s).
    """

    stages: tuple[BalancedStage, ...]
    fill_s: float
    period_s: float


Options = Sequence[Sequence[StageOption]]


def balance(
    options: Options,
    boundary_costs: Sequence[BoundaryCost],
    *,
    num_layers: int,
    nic_s: float,
    worth_s: float = float("inf"),
) -> BalancedPipeline | None:
    """The pipeline with the shortest period that the bisection finds; ``None`` if nothing fits.

    options: of each stage, fastest first.
    nic_s: seconds per microbatch that the busiest NIC is taken, a bound on the period.
    worth_s: periods above this one are of no interest.
    """
    if len(options) > num_layers or not all(options):
        return None
    transfers = [boundary_cost.seconds for boundary_cost in boundary_costs]
    layers = _layers_that_end_first(options, num_layers)
    free = _times(layers, [choices[0] for choices in options])
    low = max(max(free), nic_s, *transfers) if transfers else max(free)
    if low > worth_s:
        return None
    if (found := _reachable(options, transfers, free, low, num_layers)) is None:
        high = min(SLOWEST * low, worth_s)
        if (found := _reachable(options, transfers, free, high, num_layers)) is None:
            return None
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            if (better := _reachable(options, transfers, free, middle, num_layers)) is None:
                low = middle
            else:
                high, found = middle, better
    return settle(options, boundary_costs, layers=found, nic_s=nic_s)


def settle(
    options: Options, boundary_costs: Sequence[BoundaryCost], *, layers: Sequence[int], nic_s: float
) -> BalancedPipeline | None:
    """Choose recomputation and depths for given ``layers``: the fastest options first, others where memory asks.

    The period is the least that the depths which fit can reach; a stage recomputes if that makes the period shorter.
    """
    transfers = [boundary_cost.seconds for boundary_cost in boundary_costs]
    last = len(layers) - 1
    chosen = []
    for s, choices in enumerate(options):
        # The deepest that 1F1B between equal stages asks for; options that cannot hold it are the second choice.
        wanted = len(layers) - s
        fitting = [o for o in choices if o.fits(layers[s], 1, first=s == 0, last=s == last)]
        if not fitting:
            return None
        deep = [o for o in fitting if o.fits(layers[s], wanted, first=s == 0, last=s == last)]
        chosen.append((deep or fitting[-1:])[0])
    best = settled(chosen, transfers, layers, nic_s)
    for s, choices in enumerate(options):
        longest = max(stage.seconds for stage in best.stages)
        for option in choices:
            # A faster option with less depth helps the longest stage; a smaller one with more, where depth is short.
            helps = (
                best.stages[s].seconds == longest
                if option.layer_s < chosen[s].layer_s
                else best.period_s > longest * (1 + 1e-6)
            )
            if option is chosen[s] or not helps or not option.fits(layers[s], 1, first=s == 0, last=s == last):
                continue
            other = [*chosen[:s], option, *chosen[s + 1 :]]
            candidate = settled(other, transfers, layers, nic_s)
            if (candidate.period_s, candidate.fill_s) < (best.period_s, best.fill_s):
                chosen, best = other, candidate
    return best


def settled(
    chosen: Sequence[StageOption], transfers: Sequence[float], layers: Sequence[int], nic_s: float
) -> BalancedPipeline:
    """The pipeline with these options and layers, at the least period that its memory allows.

    transfers: c_s of every boundary.
    nic_s: as for :func:`balance`.
    """
    last = len(layers) - 1
    times = _times(layers, chosen)
    caps = [option.deepest(layers[s], first=s == 0, last=s == last) for s, option in enumerate(chosen)]
    period, depths = least_period(times, transfers, caps, max([nic_s, *times, *transfers]))
    fill_s = sum(times) + 2 * sum(transfers)
    stages = tuple(map(BalancedStage, layers, chosen, depths, times))
    return BalancedPipeline(stages, fill_s, max(period, nic_s))


def _times(layers: Sequence[int], chosen: Sequence[StageOption]) -> list[float]:
    """Seconds of a microbatch on every stage."""
    last = len(layers) - 1
    return [option.seconds(layers[s], first=s == 0, last=s == last) for s, option in enumerate(chosen)]


def _layers_that_end_first(options: Options, num_layers: int) -> list[int]:
    """Layers per stage with the least longest stage, memory left aside: each next layer goes where it ends first."""
    last = len(options) - 1
    layers = [1] * len(options)
    ends = [choices[0].seconds(2, first=s == 0, last=s == last) for s, choices in enumerate(options)]
    for _ in range(num_layers - len(options)):
        s = ends.index(min(ends))
        layers[s] += 1
        ends[s] += options[s][0].layer_s
    return layers


def _reachable(
    options: Options, transfers: Sequence[float], free: Sequence[float], period: float, num_layers: int
) -> list[int] | None:
    """Layers per stage with which ``period`` is reached, ``None`` if memory or time forbid it.

    free: seconds of the stages if memory did not count, from which the depths are judged.
    """
    last = len(options) - 1
    at_most = [min(period, seconds) for seconds in free]
    depths = smallest_depths(microbatch_s=at_most, boundary_s=transfers, period_s=period)
    layers, speed = [], []
    for s, choices in enumerate(options):
        most, layer_s = 0, 0.0
        for option in choices:
            extra_s = option.seconds(0, first=s == 0, last=s == last)
            by_time = int((period - extra_s) / option.layer_s + 1e-9)
            if by_time > most:
                held = min(by_time, option.most_layers(depths[s], first=s == 0, last=s == last))
                if held > most:
                    most, layer_s = held, option.layer_s
        if most < 1:
            return None
        layers.append(most)
        speed.append(layer_s)
    surplus = sum(layers) - num_layers
    if surplus < 0:
        return None
    for s in sorted(range(len(layers)), key=lambda s: -speed[s]):
        taken = min(surplus, layers[s] - 1)
        layers[s] -= taken
        surplus -= taken
    return layers
