"""Finds nodes that compute slower than they should, and makes them a node type of their own until they recover.

A node's slowness is what its ranks take for their computing against what the plan's simulation says, beside that of the
others: a prediction that is off by one factor everywhere demotes nobody. What is slower than a threshold for some time
is planned for as what it is: a node whose device takes so many times as long for every layer. Ranks measure
(:mod:`hetero.runtime.compute_seconds`), the leader judges (:mod:`hetero.elastic.node_speeds`).
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.cost.simulation.simulator import Simulation
from hetero.data import shipped_profiles
from hetero.elastic.planning_problem import PlanningProblem
from hetero.spec.cluster import ClusterSpec, NodePair
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.profile import Profile

_FACTOR_STEP = 0.25
"""Factors are multiples of it, so that the noise of a measurement makes no node type of its own. A heuristic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerSettings:
    """When a node counts as a straggler. All of them heuristics.

    threshold: times as slow as it should be; infinity for nobody ever.
    recovered: below so many times it is none any more.
    for_s: seconds for which either has to last without a break.
    window: reports whose median counts, so that a single slow step is no matter.
    retry_s: after so many seconds one that is left without work counts as recovered, as nobody can see whether it is.
    """

    threshold: float = 1.3
    recovered: float = 1.1
    for_s: float = 60.0
    window: int = 5
    retry_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reclassification:
    """A node is to be planned for as ``factor`` times as slow as its type; 1 for no slower.

    slowness: as it was measured beside the others, 0 where it computes nothing.
    """

    node: str
    factor: float
    slowness: float


class StragglerWatch:
    """Follows the nodes of one epoch, on a clock that its caller reads, in seconds.

    Args:
        factors: of the nodes that the plan of the epoch takes to be slower than their type.
        now_s: when the epoch began.
    """

    def __init__(self, settings: StragglerSettings, *, factors: Mapping[str, float], now_s: float) -> None:
        self._settings = settings
        self._planned = dict(factors)
        self._factors = dict(factors)
        self._began_s = now_s
        self._ratios: dict[str, deque[float]] = {}
        self._since: dict[str, float] = {}

    @property
    def factors(self) -> Mapping[str, float]:
        """The nodes that count as slower now, and how many times as slow as its type each is."""
        return dict(self._factors)

    def observe(self, ratios: Mapping[str, float]) -> None:
        """Take in, for some nodes, measured by predicted seconds of a step; predicted under the plan of the epoch."""
        for node, ratio in ratios.items():
            window = self._ratios.setdefault(node, deque(maxlen=self._settings.window))
            window.append(ratio * self._planned.get(node, 1.0))

    def slowness(self) -> dict[str, float]:
        """How many times as slow as its type each node is, beside the others; of nodes with a full window.

        The lower median of all nodes is taken for as fast as can be expected.
        """
        known = {
            node: statistics.median(ratios)
            for node, ratios in self._ratios.items()
            if len(ratios) == self._settings.window
        }
        if len(known) < 2:
            return {}
        usual = statistics.median_low(known.values())
        return {node: ratio / usual for node, ratio in known.items()}

    def judge(self, now_s: float) -> list[Reclassification]:
        """Which nodes count as slower or faster from now on than a moment ago."""
        slowness = self.slowness()
        found = []
        for node, factor in self._wanted(slowness, now_s).items():
            if factor == self._factors.get(node, 1.0):
                self._since.pop(node, None)
            elif node not in slowness or now_s - self._since.setdefault(node, now_s) >= self._settings.for_s:
                found.append(Reclassification(node=node, factor=factor, slowness=slowness.get(node, 0.0)))
        for change in found:
            self._since.pop(change.node, None)
            self._factors[change.node] = change.factor
            if change.factor == 1.0:
                del self._factors[change.node]
        return found

    def _wanted(self, slowness: Mapping[str, float], now_s: float) -> dict[str, float]:
        """By node, the factor that it should have."""
        wanted = {node: self._wanted_factor(node, times) for node, times in slowness.items()}
        if now_s - self._began_s >= self._settings.retry_s:
            wanted |= {node: 1.0 for node in self._planned if node not in self._ratios}
        return wanted

    def _wanted_factor(self, node: str, slowness: float) -> float:
        present = self._factors.get(node, 1.0)
        if slowness < self._settings.recovered:
            return 1.0
        wanted = max(1 + _FACTOR_STEP, round(slowness / _FACTOR_STEP) * _FACTOR_STEP)
        if present == 1.0:
            return wanted if slowness >= self._settings.threshold else 1.0
        # Where it is slower or faster than it was demoted for, by a step alone it stays as it is.
        return wanted if abs(wanted - present) > _FACTOR_STEP else present


def busy_of_ranks(simulation: Simulation) -> dict[int, float]:
    """By working rank, the predicted seconds of a step in its own forwards and backwards."""
    # All stages of a rank have the times of the rank.
    return {rank: simulation.stages[r, s].busy_s for r, s, stage in simulation.plan.stages() for rank in stage.ranks}


def ratio_of_ranks(predicted_s: Mapping[int, float], compute_s: Mapping[int, float]) -> float | None:
    """Measured by predicted seconds of the slowest of a node's ranks; ``None`` if of none both are known.

    Args:
        predicted_s: by rank, as :func:`busy_of_ranks` finds.
        compute_s: by rank of the node, seconds of one step in its own forwards and backwards, 0 where not known.
    """
    ratios = [seconds / predicted_s[rank] for rank, seconds in compute_s.items() if seconds and predicted_s.get(rank)]
    return max(ratios, default=None)


def slower_type(node_type: str, factor: float) -> str:
    """What nodes of a type are called that are ``factor`` times as slow; the type itself for 1."""
    return node_type if factor == 1.0 else f"{node_type}-slower-{factor:g}"


def with_slower_type(problem: PlanningProblem, node_type: str, factor: float) -> PlanningProblem:
    """The same question, with a node type for the nodes of a type that are ``factor`` times as slow.

    It has the links of that type, and a device of its own for which every profile is slower. Asked for twice, it is
    there once. It stays when the last of its nodes is promoted: a plan that ends may still name it.
    """
    name = slower_type(node_type, factor)
    cluster = problem.cluster
    if name in {each.name for each in cluster.node_types}:
        return problem
    place, base = next((i, each) for i, each in enumerate(cluster.node_types) if each.name == node_type)
    device = slower_type(base.device, factor)
    variant = dataclasses.replace(base, name=name, device=device, count=1, nodes=())
    links = dataclasses.replace(
        cluster.links, node_pairs=(*cluster.links.node_pairs, *_pairs_of(cluster, node_type, name))
    )
    devices, profiles = cluster.devices, problem.profiles
    if device not in cluster.device_types:
        devices = (*devices, _slower_device(cluster.device_types.of(base.device), device, factor))
        of_device = [each for each in (*profiles, *shipped_profiles()) if each.device == base.device]
        profiles = (*profiles, *(_slower_profile(each, device, factor) for each in of_device))
    return dataclasses.replace(
        problem,
        cluster=ClusterSpec(
            devices=devices,
            node_types=(*cluster.node_types[: place + 1], variant, *cluster.node_types[place + 1 :]),
            links=links,
        ),
        profiles=profiles,
        slower_types={**problem.slower_types, name: factor},
    )


def _pairs_of(cluster: ClusterSpec, node_type: str, variant: str) -> list[NodePair]:
    """The links of the variant: with others those of its type, with its type and itself that of two of the type."""
    pairs = []
    for pair in cluster.links.node_pairs:
        if node_type not in pair.node_types:
            continue
        a, b = pair.node_types
        if a == b:
            others: tuple[str, ...] = (node_type, variant)
        else:
            others = (b if a == node_type else a,)
        pairs += [NodePair(node_types=(other, variant), link=pair.link) for other in others]
    return pairs


def _slower_device(device: DeviceType, name: str, factor: float) -> DeviceType:
    sheet = device.data_sheet
    if sheet is not None:
        rates = {
            field.name: value / factor
            for field in dataclasses.fields(DataSheet)
            if field.name == "memory_gb_per_s" or field.name.endswith("_tflops")
            if (value := getattr(sheet, field.name)) is not None
        }
        sheet = dataclasses.replace(sheet, **rates)
    return dataclasses.replace(device, name=name, data_sheet=sheet)


def _slower_profile(profile: Profile, device: str, factor: float) -> Profile:
    def slower(measured: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            dataclasses.replace(each, **{name: getattr(each, name) * factor for name in _seconds_of(each)})
            for each in measured
        )

    return dataclasses.replace(
        profile,
        device=device,
        isolation_s=profile.isolation_s * factor,
        times=slower(profile.times),
        recomputed=slower(profile.recomputed),
        split_backwards=slower(profile.split_backwards),
        updates=slower(profile.updates),
    )


def _seconds_of(measured: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(measured) if field.name.endswith("_s")]
