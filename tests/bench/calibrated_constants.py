"""The constants that are calibrated on whole training runs, in one table, and how far they hold without a source.

Everything else that the cost model has is measured elsewhere, counted, or stated by a data sheet. A constant is found
by its module and name, so that one that goes or moves is missed here at once.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import mean
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

from hetero.cost import network
from hetero.cost.cost_model import CostModel
from hetero.cost.layers import kernels, launches, layer_kernels, throughput_fit
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.runtime_model import RuntimeModel
from hetero.cost.simulation.simulator import simulate
from hetero.data import shipped_profiles
from hetero.spec.profile import Profile, ProfileStore
from tests.helpers.published_runs.published_run import PublishedRun

Decides = Literal["time", "memory"]

Values = Mapping[str, float]
"""Of some constants, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedConstant:
    """One constant.

    what: for the page.
    decides: whether time depends on it or memory.
    grid: the values that calibration tries.
    module: which has it under its name; otherwise it is
    of_profile, of_runtime: the field of either under its name, or how it is set there.
    """

    name: str
    what: str
    decides: Decides
    grid: Sequence[float]
    module: ModuleType | None = None
    of_profile: bool = False
    of_runtime: bool = False
    on_device: str | None = None

    @property
    def shipped(self) -> float:
        """Its value as the package has it; of a runtime, DeepSpeed's."""
        if self.on_device is not None:
            return dict(DEEPSPEED.context_gib)[self.on_device]
        owner: object = DEEPSPEED if self.of_runtime else self.module
        if self.of_profile:
            owner = next(iter(shipped_profiles()))
        return float(getattr(owner, self.name))

    def in_profile(self, profile: Profile, value: float) -> Profile:
        """``profile`` with it at ``value``."""
        return dataclasses.replace(profile, **self._at(value)) if self.of_profile else profile

    def in_runtime(self, runtime: RuntimeModel, value: float) -> RuntimeModel:
        """``runtime`` with it at ``value``."""
        if self.on_device is not None:
            changed = {**dict(runtime.context_gib), self.on_device: value}
            return dataclasses.replace(runtime, context_gib=tuple(changed.items()))
        return dataclasses.replace(runtime, **self._at(value)) if self.of_runtime else runtime

    def _at(self, value: float) -> dict[str, Any]:
        """For ``dataclasses.replace``, whose types cannot follow the name of a field."""
        return {self.name: value}


CONSTANTS = (
    CalibratedConstant(
        name="isolation_s",
        what="s that timing a layer alone adds to each pass, in the shipped profiles",
        decides="time",
        grid=[0.0, 5e-5, 1e-4, 1.5e-4, 1.9e-4, 2.5e-4],
        of_profile=True,
    ),
    CalibratedConstant(
        name="in_a_step",
        what="how many times as long a layer takes in a running step as timed alone, of the shipped profiles",
        decides="time",
        grid=[1.0, 1.03, 1.06, 1.09],
        of_profile=True,
    ),
    CalibratedConstant(
        name="SUSTAINED",
        what="share of the best product ever measured on a device that a step reaches",
        decides="time",
        grid=[0.8, 0.85, 0.9, 0.95, 1.0],
        module=kernels,
    ),
    CalibratedConstant(
        name="MEMORY_SHARE",
        what="share of the data sheet's memory bandwidth that kernels between products reach",
        decides="time",
        grid=[0.55, 0.65, 0.75, 0.85, 0.95],
        module=kernels,
    ),
    CalibratedConstant(
        name="CONTENTION",
        what="share of its seconds that a collective costs beside products",
        decides="time",
        grid=[0.0, 0.25, 0.5, 0.75, 1.0],
        module=layer_kernels,
    ),
    CalibratedConstant(
        name="GENERATOR_S",
        what="s of the host around the dropout of a tensor-parallel block of Megatron-LM",
        decides="time",
        grid=[0.0, 2e-4, 4e-4, 6e-4, 8e-4],
        module=throughput_fit,
    ),
    CalibratedConstant(
        name="LAUNCH_S",
        what="s of the host to launch a kernel of megatron-core's layers, where no profile of the device shows it",
        decides="time",
        grid=[1e-5, 2e-5, 3e-5, 3.8e-5, 5e-5],
        module=launches,
    ),
    CalibratedConstant(
        name="RING_SHARE",
        what="share of a link between nodes that a ring of NCCL reaches",
        decides="time",
        grid=[0.55, 0.65, 0.75, 0.85, 1.0],
        module=network,
    ),
    CalibratedConstant(
        name="transfer_host_s",
        what="s around a transfer in which the host waits for the device, of DeepSpeed and Megatron-LM",
        decides="time",
        grid=[0.0, 4e-4, 8e-4, 1.2e-3],
        of_runtime=True,
    ),
    CalibratedConstant(
        name="context_gib",
        what="GiB that nvidia-smi counts on a GH200 beside the tensors of a process: context, kernels, libraries",
        decides="memory",
        grid=[2.5 + 0.1 * i for i in range(21)],
        on_device="GH200",
    ),
    CalibratedConstant(
        name="allocator_slack",
        what="share of activations and temporaries that the allocator reserves beyond them",
        decides="memory",
        grid=[0.01 * i for i in range(21)],
        of_runtime=True,
    ),
)


def constants_table() -> str:
    """The constants as they ship."""
    rows = [f"| `{each.name}` | {each.shipped:.3g} | {each.what} | {each.decides} |" for each in CONSTANTS]
    return "\n".join(["| constant | value | what it is | decides |", "|---|--:|---|---|", *rows])


@contextmanager
def cost_model(run: PublishedRun, values: Values) -> Iterator[CostModel]:
    """The cost model of a run while some constants have these values, and the others those that ship."""
    profiles, runtime = list(shipped_profiles()), run.runtime
    with ExitStack() as stack:
        for constant in CONSTANTS:
            if (value := values.get(constant.name)) is None:
                continue
            if constant.module is not None:
                stack.enter_context(patch.object(constant.module, constant.name, value))
            profiles = [constant.in_profile(profile, value) for profile in profiles]
            runtime = constant.in_runtime(runtime, value)
        yield CostModel(
            model=run.plan.model,
            seq_length=run.plan.seq_length,
            precision=run.plan.precision,
            profiles=ProfileStore(
                profiles, device_types=run.cluster.device_types, all_reduce=run.cluster.all_reduce_of_devices
            ),
            runtime=runtime,
            arithmetic=run.arithmetic,
            data_sheets=True,
        )


def seconds(run: PublishedRun, values: Values) -> float:
    """Predicted, of a step."""
    with cost_model(run, values) as costs:
        return simulate(run.plan, run.cluster, costs).step_s


def peak_bytes(run: PublishedRun, values: Values) -> float:
    """Predicted, of the fullest device."""
    with cost_model(run, values) as costs:
        devices = device_memory(run.plan, plan_memory(run.plan, costs))
    return max(parts.total for parts in devices.values())


PREDICTED: Mapping[Decides, Callable[[PublishedRun, Values], float]] = {"time": seconds, "memory": peak_bytes}

MOST_ACTIONS = 50_000
"""Runs with more forwards and backwards to simulate take seconds each: while constants are looked for, the others of
their source stand for them."""

SWEEPS = 5
"""How often all constants are gone through: more change nothing."""


@dataclass(kw_only=True)
class Calibration:
    """Finds the values of the constants that decide time, or memory, for some of the sources.

    It goes through the constants one by one, several times, and takes of each the value on its grid with the least mean
    of squared errors; every source counts the same, however many runs it has. While it looks, each constant is taken to
    change a prediction by the factor by which it alone changes it; errors that it reports are of whole predictions.
    """

    runs: Mapping[str, Sequence[PublishedRun]]
    decides: Decides
    _known: dict[object, float] = field(default_factory=dict)

    def errors(self, family: str, values: Values) -> list[float]:
        """Of the runs of a source in which it was measured, predicted with these values."""
        return [self._predicted(run, values) / truth - 1 for run, truth in self._measured(family)]

    def best(self, families: Sequence[str]) -> Values:
        """The values with the least error on these sources."""
        own = [constant for constant in CONSTANTS if constant.decides == self.decides]
        values: Values = {constant.name: constant.shipped for constant in own}
        for constant in own * SWEEPS:
            values = self.best_of(constant, families, values)
        return values

    def best_of(self, constant: CalibratedConstant, families: Sequence[str], values: Values) -> Values:
        """``values`` with that of one constant that has the least error on these sources."""
        tried: list[Values] = [{**values, constant.name: value} for value in constant.grid]
        return min(tried, key=lambda candidate: self._loss(families, candidate))

    def _measured(self, family: str) -> list[tuple[PublishedRun, float]]:
        truths = [(run, run.step_s if self.decides == "time" else run.peak_bytes) for run in self.runs[family]]
        return [(run, truth) for run, truth in truths if truth is not None]

    def _predicted(self, run: PublishedRun, values: Values) -> float:
        key = run.family, run.label, tuple(sorted(values.items()))
        if key not in self._known:
            self._known[key] = PREDICTED[self.decides](run, values)
        return self._known[key]

    def _loss(self, families: Sequence[str], values: Values) -> float:
        squares = []
        for family in families:
            errors = [
                self._quickly_predicted(run, values) / truth - 1
                for run, truth in self._measured(family)
                if 2 * sum(run.plan.replicas[0].microbatch_counts) <= MOST_ACTIONS
            ]
            squares += [mean(error * error for error in errors)] if errors else []
        return mean(squares)

    def _quickly_predicted(self, run: PublishedRun, values: Values) -> float:
        shipped = self._predicted(run, {})
        found = shipped
        for name, value in values.items():
            found *= self._predicted(run, {name: value}) / shipped
        return found
