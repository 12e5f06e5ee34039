"""Says what is certain about a predicted step: its range, its order among other plans, and what to measure.

A plan that was simulated is simulated again with each source of error at its two ends
(:mod:`hetero.cost.prediction_range`). Where that would take too long, bounds stand in for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import LayerBasis
from hetero.cost.network import Topology
from hetero.cost.prediction_range import ErrorSource, StatedLinks, StepRange, least_difference, step_range
from hetero.cost.simulation.simulator import Simulation
from hetero.cost.wanted_profile import WantedProfile, wanted_profile
from hetero.plan.ir import Plan
from hetero.planner.scoring import scoring_s
from hetero.text import number_ranges

MOST_REPLAY_S = 0.25
"""Longest simulation, by estimate, that is repeated for a range. A heuristic: there are up to a dozen of them."""

MOST_MEASUREMENTS = 3

LEAST_NARROWER = 0.01
"""A measurement that makes a range narrower by less of its width is not named. A heuristic."""


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """Another plan for the same problem.

    ratio: of its goal, seconds or money, to that of the plan that was chosen.
    """

    name: str
    simulation: Simulation
    ratio: float


@dataclass(frozen=True, slots=True)
class Rival:
    """How a plan stands against another one.

    ratio: of the other's goal to the plan's.
    certain_from: the ratio from which on the order is certain.
    """

    name: str
    ratio: float
    certain_from: float

    @property
    def is_certain(self) -> bool:
        return max(self.ratio, 1 / self.ratio) > self.certain_from


@dataclass(frozen=True, slots=True)
class Measurement:
    """Something to measure.

    what: for a reader.
    profile: that would tell; ``None`` where the links of the cluster are to be measured.
    settled: the range of the step if what was measured is what is assumed.
    """

    what: str
    profile: WantedProfile | None
    settled: StepRange


@dataclass(frozen=True, slots=True)
class Certainty:
    """What is known of the error of a predicted step.

    measurements: those that would narrow the range most, the best first, at most ``MOST_MEASUREMENTS``.
    """

    step: StepRange
    rivals: tuple[Rival, ...]
    measurements: tuple[Measurement, ...]


def certainty_of(
    simulation: Simulation, topology: Topology, costs: CostModel, runners_up: Sequence[RunnerUp] = ()
) -> Certainty:
    """Find what is certain about a simulated step, and about its order among others of the same problem.

    Raises:
        ConfigError: two ranks that talk to one another have no link.
    """
    # Bounds are far wider than ranges that are simulated: plans of one comparison have either.
    replays = all(scoring_s(each.plan) <= MOST_REPLAY_S for each in (simulation, *(r.simulation for r in runners_up)))
    step = step_range(simulation, topology, costs, replays=replays)
    rivals = []
    for other in runners_up:
        others = step_range(other.simulation, topology, costs, replays=replays)
        rivals.append(Rival(other.name, other.ratio, least_difference(step, others)))
    return Certainty(step, tuple(rivals), _measurements(simulation.plan, costs, step))


def _measurements(plan: Plan, costs: CostModel, step: StepRange) -> tuple[Measurement, ...]:
    found = []
    for device in dict.fromkeys(source.device for source in step.shifts if isinstance(source, LayerBasis)):
        settles: list[ErrorSource] = [s for s in step.shifts if isinstance(s, LayerBasis) and s.device == device]
        what = f"the layers of this model on {device}: {_points(plan, costs, device, settles)}"
        wanted = wanted_profile(plan, costs, device=device)
        found.append(Measurement(what, wanted, step.without(settles)))
    links: tuple[StatedLinks, ...] = ("between nodes", "inside nodes")
    for which in links:
        if which in step.shifts:
            what = f"the links {which}, which the cluster file states as one number"
            found.append(Measurement(what, None, step.without([which])))
    telling = [each for each in found if each.settled.width < (1 - LEAST_NARROWER) * step.width]
    return tuple(sorted(telling, key=lambda each: each.settled.width)[:MOST_MEASUREMENTS])


def _points(plan: Plan, costs: CostModel, device: str, unsettled: Sequence[ErrorSource]) -> str:
    """``block and head at tp 1 with microbatches of 2, tp 2 with microbatches of 1,4``."""
    kinds: dict[str, None] = {}
    sizes: dict[int, set[int]] = {}
    for _, _, stage in plan.stages():
        for kind, (_, cost) in costs.layers(stage).items():
            if stage.device == device and LayerBasis(device, cost.confidence) in unsettled:
                kinds["block" if kind in ("attention", "mlp") else kind] = None
                sizes.setdefault(stage.tp, set()).add(stage.micro_batch_size)
    at = ", ".join(f"tp {tp} with microbatches of {number_ranges(sorted(of))}" for tp, of in sorted(sizes.items()))
    return f"{' and '.join(kinds)} at {at}"
