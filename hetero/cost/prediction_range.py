"""How far a predicted step may be off, and whether two predictions can be told apart.

Figures that rest on the same thing err alike: if the fit of a device is 20 % too fast for one layer, it is about that
for all of them. So each :data:`ErrorSource` of a plan, such as "what is scaled by data sheets on H100", is moved as a
whole to either end of what such figures have been off by (:mod:`.confidence`), and the step is simulated again: its
shift, in logarithms, is what this source does to it. Sources are taken to be independent of one another and of what
whole runs are off by, so their squares add up (the rule for independent errors, JCGM 100:2008, 5.1.2):

    high = step exp( sqrt( run^2 + sum_i shift_i^2 ) )

and likewise below. Two plans on the same devices share these errors. What counts for their order is how differently a
source shifts the two, and how far ratios of measured runs were off:

    apart if  |ln(a / b)| > sqrt( order^2 + sum_i (shift_i(a) - shift_i(b))^2 )

Not in it: memory, and the seconds of the update, which are small and in what whole runs are off by.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import LAYER_ERRORS, ORDER_ERROR, RUN_ERROR, STATED_LINK_ERROR, LayerBasis
from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec
from hetero.spec.link import LEAST_GB_PER_S, MOST_GB_PER_S, Link

StatedLinks = Literal["inside nodes", "between nodes"]
"""Links of which the cluster file states the bandwidth as one number."""

ErrorSource = LayerBasis | StatedLinks
"""What errs as a whole."""


class Shift(NamedTuple):
    """What one source does to a step, as logarithms of the step over the predicted one.

    fast: with its seconds at their low end, at most 0; ``slow``: at their high end, at least 0.
    """

    fast: float
    slow: float


@dataclass(frozen=True, slots=True)
class StepRange:
    """A predicted step with what may be wrong with it; nine of ten such steps are measured within ``low_s`` to
    ``high_s``.

    are_bounds: the shifts are the most that the sources can do, and not what they do.
    """

    step_s: float
    shifts: Mapping[ErrorSource, Shift]
    are_bounds: bool = False

    @property
    def low_s(self) -> float:
        return self.step_s * math.exp(-math.hypot(RUN_ERROR.log, *(shift.fast for shift in self.shifts.values())))

    @property
    def high_s(self) -> float:
        return self.step_s * math.exp(math.hypot(RUN_ERROR.log, *(shift.slow for shift in self.shifts.values())))

    @property
    def width(self) -> float:
        """How many times the low end the high end is, as a logarithm."""
        return math.log(self.high_s / self.low_s)

    def without(self, settled: Iterable[ErrorSource]) -> "StepRange":
        """The range around the same step if these were measured."""
        left = dict(self.shifts)
        for source in settled:
            left.pop(source, None)
        return dataclasses.replace(self, shifts=left)


def step_range(simulation: Simulation, topology: Topology, costs: CostModel, *, replays: bool = True) -> StepRange:
    """Find the range of a step that was simulated on ``topology`` by ``costs``.

    replays: simulate twice for each source of error; otherwise each counts as if the whole step took as much longer or
        shorter as its figures may, which is the most that it can do.

    Raises:
        ConfigError: two ranks that talk to one another have no link.
    """
    step_s, shifts = simulation.step_s, {}
    for source, log in _sources(simulation.plan, topology.cluster, costs).items():
        if not replays:
            shifts[source] = Shift(-log, log)
            continue
        fast_s, slow_s = (_step_s(simulation.plan, topology, costs, source, math.exp(sign * log)) for sign in (-1, 1))
        shift = Shift(min(0.0, math.log(fast_s / step_s)), max(0.0, math.log(slow_s / step_s)))
        if shift != (0.0, 0.0):
            shifts[source] = shift
    return StepRange(step_s, shifts, are_bounds=not replays)


def least_difference(a: StepRange, b: StepRange) -> float:
    """The ratio of two steps, at least 1, from which on their order is certain as far as that can be: the head of this
    file has the formula."""
    none = Shift(0.0, 0.0)
    apart = []
    for source in {**a.shifts, **b.shifts}:
        one, other = a.shifts.get(source, none), b.shifts.get(source, none)
        if a.are_bounds or b.are_bounds:
            # Either may be shifted as far as that and the other not at all.
            apart.append(max(map(abs, (*one, *other))))
        else:
            apart.append(max(abs(one.fast - other.fast), abs(one.slow - other.slow)))
    return math.exp(math.hypot(ORDER_ERROR.log, *apart))


def _sources(plan: Plan, cluster: ClusterSpec, costs: CostModel) -> dict[ErrorSource, float]:
    """What may be wrong with a plan's step beside what whole runs are off by, with the logarithm of how far."""
    found: dict[ErrorSource, float] = {}
    for _, _, stage in plan.stages():
        for _, cost in costs.layers(stage).values():
            error = LAYER_ERRORS[cost.confidence]
            if error.factor > 1:
                found[LayerBasis(stage.device, cost.confidence)] = error.log
    if any(_is_stated(node_type.inside_node) for node_type in cluster.node_types):
        found["inside nodes"] = STATED_LINK_ERROR.log
    if any(map(_is_stated, _between_nodes(cluster))):
        found["between nodes"] = STATED_LINK_ERROR.log
    return found


def _step_s(plan: Plan, topology: Topology, costs: CostModel, source: ErrorSource, times: float) -> float:
    """Seconds of a step whose figures of ``source`` take so many times as long."""
    if isinstance(source, LayerBasis):
        return simulate(plan, topology, costs.slower({source: times})).step_s
    slower = _with_slower_links(topology.cluster, source, times)
    return simulate(plan, slower, costs.on(slower) if source == "inside nodes" else costs).step_s


def _is_stated(link: Link | None) -> bool:
    return link is not None and not isinstance(link.bandwidth_gb_per_s, tuple)


def _between_nodes(cluster: ClusterSpec) -> list[Link | None]:
    links = cluster.links
    return [links.between_nodes, *(p.link for p in links.node_pairs), *(p.link for p in links.zone_pairs)]


def _with_slower_links(cluster: ClusterSpec, which: StatedLinks, times: float) -> ClusterSpec:
    """The cluster if bandwidths that are stated as one number were so many times smaller, within a link's limits."""

    def slower(link: Link) -> Link:
        if isinstance(link.bandwidth_gb_per_s, tuple):
            return link
        bandwidth = min(max(link.bandwidth_gb_per_s / times, LEAST_GB_PER_S), MOST_GB_PER_S)
        return dataclasses.replace(link, bandwidth_gb_per_s=bandwidth)

    if which == "inside nodes":
        node_types = (
            dataclasses.replace(node_type, inside_node=slower(node_type.inside_node))
            if node_type.inside_node
            else node_type
            for node_type in cluster.node_types
        )
        return dataclasses.replace(cluster, node_types=tuple(node_types))
    links = cluster.links
    changed = dataclasses.replace(
        links,
        between_nodes=slower(links.between_nodes) if links.between_nodes is not None else None,
        node_pairs=tuple(dataclasses.replace(pair, link=slower(pair.link)) for pair in links.node_pairs),
        zone_pairs=tuple(dataclasses.replace(pair, link=slower(pair.link)) for pair in links.zone_pairs),
    )
    return dataclasses.replace(cluster, links=changed)
