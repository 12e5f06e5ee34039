"""How far predictions have been off, case by case: what the tables of ``hetero.cost.layers.confidence`` come from."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.layer_times import interpolate
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.data import shipped_profiles
from hetero.data.cost_models import plan_costs
from hetero.data.sailor import MODELS
from hetero.spec.profile import LayerKind, Profile, ProfileStore
from tests.helpers.published_runs import PublishedRun, published_model, read_runs

COVERED = 0.9
"""Share of the cases that a range is to hold."""


@dataclass(frozen=True, slots=True)
class PredictedRun:
    """A run that somebody measured, and the prediction of its step."""

    run: PublishedRun
    costs: CostModel
    simulation: Simulation

    @property
    def log_error(self) -> float:
        return math.log(self.simulation.step_s / self.run.step_s)


def predicted_runs() -> list[PredictedRun]:
    """The published runs under the runtime that made them."""
    found = []
    for run in read_runs():
        costs = plan_costs(run.plan, runtime=DEEPSPEED)
        found.append(PredictedRun(run, costs, simulate(run.plan, run.cluster, costs)))
    return found


def run_errors(runs: Sequence[PredictedRun]) -> list[float]:
    """Logarithms of predicted over measured steps, of the runs whose layers were all measured."""
    return [each.log_error for each in runs if each.simulation.confidence <= Confidence.INTERPOLATED]


def order_errors(runs: Sequence[PredictedRun]) -> list[float]:
    """The same of ratios of two such runs of one model with the same devices and batch."""
    measured = [each for each in runs if each.simulation.confidence <= Confidence.INTERPOLATED]
    return [
        a.log_error - b.log_error
        for a, b in itertools.combinations(measured, 2)
        if a.run.plan.model == b.run.plan.model
        and a.run.plan.global_batch_size == b.run.plan.global_batch_size
        and a.run.cluster == b.run.cluster
    ]


def layer_errors() -> Mapping[Confidence, list[float]]:
    """Logarithms of predicted over measured seconds, by what the prediction rests on.

    Interpolated and extrapolated: one layer at a microbatch size that is left out, between or beyond the others.
    Estimated and by data sheets: forward and backward of all layers of a model at one tp and microbatch size, without
    the profile, and without any profile of the device.
    """
    store = shipped_profiles()
    errors: dict[Confidence, list[float]] = {confidence: [] for confidence in Confidence}
    for profile in store:
        for confidence, error in _left_out_sizes(profile):
            errors[confidence].append(error)
        others = store.without_model(profile.model)
        if profile.device in others.devices():
            errors[Confidence.ESTIMATED] += _model_errors(profile, others)
        elsewhere = ProfileStore(other for other in store if other.device != profile.device)
        errors[Confidence.DATA_SHEET] += _model_errors(profile, elsewhere)
    return errors


def _left_out_sizes(profile: Profile) -> Iterator[tuple[Confidence, float]]:
    """Of blocks. Nobody asks for less than the smallest size, which is one sample in all profiles."""
    for tp in profile.tps("block"):
        times = profile.times_of("block", tp=tp)
        for left_out in times[1:]:
            kept = [time for time in times if time != left_out]
            cost = interpolate(kept, micro_batch_size=left_out.micro_batch_size, isolation_s=profile.isolation_s)
            if cost is not None:
                measured_s = left_out.forward_s + left_out.backward_s - 2 * profile.isolation_s
                yield cost.confidence, math.log((cost.forward_s + cost.backward_s) / measured_s)


def _model_errors(profile: Profile, store: ProfileStore) -> Iterator[float]:
    """Of all layers of the model together, where all of them were measured."""
    name = next(key for key, (known, _, _) in MODELS.items() if known == profile.model)
    model = published_model(name)
    costs = CostModel(
        model=model,
        seq_length=profile.seq_length,
        precision=profile.precision,
        profiles=store,
        arithmetic=profile.arithmetic,
        data_sheets=True,
    )
    counts: dict[LayerKind, int] = {"block": model.num_layers} | ({"head": 1} if profile.head_has_projection else {})
    measured = {(time.kind, time.tp, time.micro_batch_size): time for time in profile.times}
    for tp, size in sorted({(time.tp, time.micro_batch_size) for time in profile.times}):
        if any((kind, tp, size) not in measured for kind in counts):
            continue
        measured_s = predicted_s = 0.0
        for kind, count in counts.items():
            time = measured[kind, tp, size]
            measured_s += count * (time.forward_s + time.backward_s - 2 * profile.isolation_s)
            cost = costs.layer(kind, device=profile.device, tp=tp, micro_batch_size=size)
            predicted_s += count * (cost.forward_s + cost.backward_s)
        yield math.log(predicted_s / measured_s)


def factor(log_errors: Sequence[float]) -> float:
    """The factor within which ``COVERED`` of the cases lie, rounded up to two digits behind the point.

    It is the quantile of the errors' sizes, by straight lines between them in order; no distribution is assumed.
    """
    sizes = sorted(abs(error) for error in log_errors)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} cases are too few for a range")
    cuts = quantiles(sizes, n=100, method="inclusive")
    return math.ceil(100 * math.exp(cuts[round(100 * COVERED) - 1])) / 100
