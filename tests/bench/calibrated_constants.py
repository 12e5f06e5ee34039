"""The constants that are calibrated on whole training runs, in one table, and how far they hold without a source.

Everything else that the cost model has is measured elsewhere, counted, or stated by a data sheet.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from hetero.cost.cost_model import CostModel
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.runtime_model import RuntimeModel
from hetero.cost.simulation.simulator import simulate
from hetero.data import shipped_profiles
from hetero.spec.profile import ProfileStore
from tests.helpers.published_runs.published_run import PublishedRun

Values = Mapping[str, float]
"""Of some constants, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedConstant:
    """One constant.

    decides: whether time depends on it or memory.
    grid: the values that calibration tries.
    of_profiles, of_runtime: how it is set there, where it is.
    """

    name: str
    decides: str
    grid: Sequence[float]
    of_profiles: Callable[[ProfileStore, float], ProfileStore] = lambda profiles, value: profiles
    of_runtime: Callable[[RuntimeModel, float], RuntimeModel] = lambda runtime, value: runtime


def _isolation(profiles: ProfileStore, isolation_s: float) -> ProfileStore:
    return ProfileStore(dataclasses.replace(profile, isolation_s=isolation_s) for profile in profiles)


def _context_of_gh200(runtime: RuntimeModel, gib: float) -> RuntimeModel:
    return dataclasses.replace(runtime, context_gib=tuple({**dict(runtime.context_gib), "GH200": gib}.items()))


CONSTANTS = (
    CalibratedConstant(name="isolation_s", decides="time", grid=[i * 2e-5 for i in range(7)], of_profiles=_isolation),
    CalibratedConstant(
        name="sync_host_gb_per_s",
        decides="time",
        grid=[4.0, 6.0, 8.0, 12.0, 20.0, 50.0, 1000.0],
        of_runtime=lambda runtime, value: dataclasses.replace(runtime, sync_host_gb_per_s=value),
    ),
    CalibratedConstant(
        name="context_gib of GH200",
        decides="memory",
        grid=[2.5 + 0.1 * i for i in range(21)],
        of_runtime=_context_of_gh200,
    ),
    CalibratedConstant(
        name="default_context_gib",
        decides="memory",
        grid=[0.2 * i for i in range(1, 11)],
        of_runtime=lambda runtime, value: dataclasses.replace(runtime, default_context_gib=value),
    ),
    CalibratedConstant(
        name="allocator_slack",
        decides="memory",
        grid=[0.01 * i for i in range(21)],
        of_runtime=lambda runtime, value: dataclasses.replace(runtime, allocator_slack=value),
    ),
)


def cost_model(run: PublishedRun, values: Values) -> CostModel:
    """The cost model of a run with these values of some constants, and the others as they ship."""
    profiles, runtime = shipped_profiles(), run.runtime
    for constant in CONSTANTS:
        if (value := values.get(constant.name)) is not None:
            profiles, runtime = constant.of_profiles(profiles, value), constant.of_runtime(runtime, value)
    return CostModel(
        model=run.plan.model,
        seq_length=run.plan.seq_length,
        precision=run.plan.precision,
        profiles=profiles,
        runtime=runtime,
    )


def time_error(run: PublishedRun, costs: CostModel) -> float | None:
    """Of the step, relative to the measured."""
    return simulate(run.plan, run.cluster, costs).step_s / run.step_s - 1


def memory_error(run: PublishedRun, costs: CostModel) -> float | None:
    """Of the fullest device, relative to the measured; ``None`` where it was not measured."""
    if run.peak_bytes is None:
        return None
    devices = device_memory(run.plan, plan_memory(run.plan, costs))
    return max(parts.total for parts in devices.values()) / run.peak_bytes - 1


ERROR_OF = {"time": time_error, "memory": memory_error}


@dataclass(kw_only=True)
class Calibration:
    """Finds the values of the constants that decide time, or memory, for some of the sources.

    It goes through the constants one by one, twice, and takes of each the value with the least mean of squared errors;
    every source counts the same, however many runs it has. Errors are remembered.
    """

    runs: Mapping[str, Sequence[PublishedRun]]
    decides: str
    _known: dict[tuple[str, tuple[tuple[str, float], ...]], list[float]] = field(default_factory=dict)

    def errors(self, family: str, values: Values) -> list[float]:
        """Of the runs of a source in which it was measured."""
        key = family, tuple(sorted(values.items()))
        if key not in self._known:
            error_of = ERROR_OF[self.decides]
            found = [error_of(run, cost_model(run, values)) for run in self.runs[family]]
            self._known[key] = [error for error in found if error is not None]
        return self._known[key]

    def best(self, families: Sequence[str]) -> Values:
        """The values with the least error on these sources; constants that ship stay out until they are tried."""
        values: Values = {}
        for constant in [each for each in CONSTANTS if each.decides == self.decides] * 2:
            tried = [values, *({**values, constant.name: value} for value in constant.grid)]
            values = min(tried, key=lambda candidate: self._loss(families, candidate))
        return values

    def _loss(self, families: Sequence[str], values: Values) -> float:
        of_families = [self.errors(family, values) for family in families]
        return (
            mean(mean(error * error for error in errors) for errors in of_families if errors)
            if of_families
            else math.inf
        )
