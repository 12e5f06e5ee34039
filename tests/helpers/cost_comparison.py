"""Published runs beside what the cost model says of them: errors of time and memory, order, verdict on memory."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

from hetero.cost.capacity import memory_error
from hetero.cost.cost_model import CostModel
from hetero.cost.memory import device_memory, plan_memory
from hetero.cost.network import Topology, ring_all_reduce_cost
from hetero.cost.runtime_model import RuntimeModel
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.data import shipped_profiles
from hetero.serialization import load
from hetero.spec.profile import Profile, ProfileStore
from hetero.units import BYTES_OF_PRECISION
from tests.helpers.published_runs import read_all
from tests.helpers.published_runs.published_run import PublishedRun

APART = 0.10
"""Two plans whose measured times differ by more, relative to the faster one, have to be predicted in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStage:
    """What is predicted of a stage that was measured alone: seconds of a step."""

    forward_s: float
    backward_s: float
    all_reduce_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One run: measured and predicted. Errors are relative to the measured.

    peak_bytes: of the fullest device.
    verdict: why the run is rejected as too large, ``None`` if it is not.
    """

    run: PublishedRun
    step_s: float
    peak_bytes: float
    verdict: str | None
    stages: Sequence[PredictedStage]

    @property
    def time_error(self) -> float:
        return self.step_s / self.run.step_s - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.peak_bytes is None else self.peak_bytes / self.run.peak_bytes - 1

    def stage_errors(self) -> dict[str, list[float]]:
        """By quantity, the errors of the stages of which it was measured.

        Of updates only the stage that waited least for the others, as the measurement contains what it waits.
        """
        pairs = list(zip(self.stages, self.run.stages, strict=True)) if self.run.stages else []
        least = min((measured.update_s for _, measured in pairs), default=0.0)
        return {
            "forward": [ours.forward_s / theirs.forward_s - 1 for ours, theirs in pairs],
            "backward": [ours.backward_s / theirs.backward_s - 1 for ours, theirs in pairs],
            "gradient all-reduce": [
                ours.all_reduce_s / theirs.all_reduce_s - 1 for ours, theirs in pairs if theirs.all_reduce_s is not None
            ],
            "optimizer": [ours.update_s / theirs.update_s - 1 for ours, theirs in pairs if theirs.update_s == least],
        }


def costs_of(run: PublishedRun, runtime: RuntimeModel, *, profiles: Iterable[Path] = ()) -> CostModel:
    """Return the costs of a run's model on its cluster under ``runtime``, by ``profiles`` and the shipped ones."""
    return CostModel(
        model=run.plan.model,
        seq_length=run.plan.seq_length,
        precision=run.plan.precision,
        profiles=ProfileStore(
            (*(load(Profile, path) for path in profiles), *shipped_profiles()),
            device_types=run.cluster.device_types,
            all_reduce=run.cluster.all_reduce_of_devices,
        ),
        runtime=runtime,
        arithmetic=run.arithmetic,
        data_sheets=True,
    )


def shipped_costs(run: PublishedRun, *, profiles: Iterable[Path] = ()) -> CostModel:
    """The cost model as it ships, of the runtime that ran it."""
    return costs_of(run, run.runtime.with_dropout_of(run.plan), profiles=profiles)


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """A run that somebody measured, and the prediction of its step."""

    run: PublishedRun
    costs: CostModel
    simulation: Simulation

    @property
    def log_error(self) -> float:
        return math.log(self.simulation.step_s / self.run.step_s)


def predict(run: PublishedRun, costs: CostModel) -> PredictedRun:
    """Simulate ``run``."""
    return PredictedRun(run, costs, simulate(run.plan, run.cluster, costs))


@cache
def predicted_runs() -> Sequence[PredictedRun]:
    """The published runs under the runtimes that made them, by the cost model as it ships."""
    return [predict(run, shipped_costs(run)) for run in read_all()]


def compare(run: PublishedRun, costs_of: Callable[[PublishedRun], CostModel] = shipped_costs) -> Comparison:
    """Simulate ``run`` once and hold it against what was measured."""
    return compared(predict(run, costs_of(run)))


def compared(predicted: PredictedRun) -> Comparison:
    """Hold a prediction against what was measured."""
    run, costs, simulation = predicted.run, predicted.costs, predicted.simulation
    memory = plan_memory(run.plan, costs)
    error = memory_error(run.plan, run.cluster, costs, memory)
    return Comparison(
        run=run,
        step_s=simulation.step_s,
        peak_bytes=max(parts.total for parts in device_memory(run.plan, memory).values()),
        verdict=None if error is None else str(error),
        stages=[_predicted_stage(run, simulation, s) for s in range(len(run.stages))],
    )


def _predicted_stage(run: PublishedRun, simulation: Simulation, stage: int) -> PredictedStage:
    """Of the first replica's stage, which stands for those of all replicas."""
    replicas = simulation.plan.replicas
    replica = replicas[0]
    cost, rank = simulation.costs[0, stage], replica.stages[stage].ranks[0]
    count = replica.num_microbatches(stage)
    return PredictedStage(
        forward_s=count * cost.forward_s,
        backward_s=count * cost.backward_s,
        all_reduce_s=_stage_sum_s(run, simulation, rank, {other.stages[stage].ranks[0] for other in replicas}),
        update_s=simulation.stages[0, stage].update_s,
    )


def _stage_sum_s(run: PublishedRun, simulation: Simulation, rank: int, ranks: set[int]) -> float:
    """Seconds to sum all gradients of ``rank`` over ``ranks`` at once, as Megatron-LM does before it sums those of an
    embedding that two stages share, which was not timed with them."""
    numel = sum(sync.bucket.numel for sync in simulation.syncs if rank in sync.bucket.ranks)
    num_bytes = numel * BYTES_OF_PRECISION[simulation.plan.precision]
    return ring_all_reduce_cost(num_bytes, sorted(ranks), Topology(run.cluster)).seconds


def by_family(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """The comparisons of each family, in their order."""
    found: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        found.setdefault(comparison.run.family, []).append(comparison)
    return found


def errors_of(comparisons: Sequence[Comparison]) -> dict[str, list[float]]:
    """By quantity, the errors of all runs, or stages, of which it was measured."""
    found = {
        "step time": [each.time_error for each in comparisons],
        "peak memory": [each.memory_error for each in comparisons if each.memory_error is not None],
    }
    for each in comparisons:
        for quantity, errors in each.stage_errors().items():
            found.setdefault(quantity, []).extend(errors)
    return {quantity: errors for quantity, errors in found.items() if errors}


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Sizes of errors: their mean and the worst, and the mean with signs."""

    count: int
    mean: float
    worst: float
    signed: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> "ErrorSummary":
        """Of ``errors``, one at least."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), mean(sizes), max(sizes), mean(errors))

    def cells(self) -> str:
        """As cells of a table in Markdown."""
        return f"{self.mean:.1%} | {self.worst:.1%} | {self.signed:+.1%}"


def pairs_apart(comparisons: Iterable[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Pairs of plans that answer one question and differ by more than :data:`APART`, the faster one first."""
    by_question: dict[object, list[Comparison]] = {}
    for comparison in comparisons:
        by_question.setdefault(comparison.run.question, []).append(comparison)
    pairs = []
    for group in by_question.values():
        for a, b in itertools.combinations(sorted(group, key=lambda each: each.run.step_s), 2):
            if b.run.step_s > (1 + APART) * a.run.step_s:
                pairs.append((a, b))
    return pairs


def wrong_pairs(comparisons: Iterable[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Those of :func:`pairs_apart` that are predicted in the wrong order."""
    return [(a, b) for a, b in pairs_apart(comparisons) if a.step_s >= b.step_s]


def recompute_of(run: PublishedRun) -> str:
    """What the plan of a run computes again."""
    return run.plan.replicas[0].stages[0].recompute
