"""How far predictions have been off, case by case: what the tables of ``hetero.cost.layers.confidence`` come from."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import quantiles

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.layer_times import LayerCost, interpolate
from hetero.cost.network import Topology
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.prediction_range import step_range
from hetero.data import shipped_profiles
from hetero.data.sailor import MODELS
from hetero.spec.profile import LayerKind, LayerTime, Profile, ProfileStore
from tests.helpers.cost_comparison import PredictedRun
from tests.helpers.published_runs.opt350m import published_model

COVERED = 0.9
"""Share of the cases that a range is to hold."""


def run_errors(runs: Sequence[PredictedRun]) -> Mapping[Confidence, list[float]]:
    """Logarithms of predicted over measured steps, by the worst that a step's layers rest on."""
    errors: dict[Confidence, list[float]] = {confidence: [] for confidence in Confidence}
    for each in runs:
        errors[each.simulation.confidence].append(each.log_error)
    return errors


def order_errors(runs: Sequence[PredictedRun]) -> list[float]:
    """Logarithms of predicted over measured ratios of two plans that answer one question."""
    return [
        a.log_error - b.log_error
        for a, b in itertools.combinations(runs, 2)
        if a.run.question == b.run.question and a.simulation.confidence == b.simulation.confidence
    ]


def within_range(each: PredictedRun) -> bool:
    """Whether a run was measured within the range of its prediction."""
    found = step_range(each.simulation, Topology(each.run.cluster), each.costs)
    return found.low_s <= each.run.step_s <= found.high_s


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
        others = [other for other in store if other.model != profile.model]
        if any(other.device == profile.device for other in others):
            errors[Confidence.ESTIMATED] += _model_errors(profile, others)
        elsewhere = [other for other in store if other.device != profile.device]
        errors[Confidence.DATA_SHEET] += _model_errors(profile, elsewhere)
    return errors


def _left_out_sizes(profile: Profile) -> Iterator[tuple[Confidence, float]]:
    """Of blocks. Nobody asks for less than the smallest size, which is one sample in all profiles."""
    for tp in profile.tps("block"):
        times = profile.times_of("block", tp=tp)
        for left_out in times[1:]:
            size = left_out.micro_batch_size
            cost = _at(profile, [time for time in times if time != left_out], size)
            yield cost.confidence, math.log(_seconds(cost) / _seconds(_at(profile, times, size)))


def _at(profile: Profile, times: Sequence[LayerTime], micro_batch_size: int) -> LayerCost:
    cost = interpolate(times, micro_batch_size=micro_batch_size, isolation_s=profile.isolation_s)
    assert cost is not None, "there are times"
    return cost


def _seconds(cost: LayerCost) -> float:
    return cost.forward_s + cost.backward_s


def _model_errors(profile: Profile, others: Sequence[Profile]) -> Iterator[float]:
    """Of all layers of the model together, where all of them were measured, as the profile has them, on its links."""
    name = next(key for key, (known, _, _) in MODELS.items() if known == profile.model)
    model = published_model(name)
    costs = CostModel(
        model=model,
        seq_length=profile.seq_length,
        precision=profile.precision,
        profiles=ProfileStore(others, all_reduce={profile.device: profile.all_reduce}),
        runtime=DEEPSPEED,
        arithmetic=profile.arithmetic,
        data_sheets=True,
    )
    counts: dict[LayerKind, int] = {"block": model.num_layers}
    if profile.head_has_projection:
        counts["head"] = 1
    measured = {(time.kind, time.tp, time.micro_batch_size): time for time in profile.times}
    for tp, size in sorted({(time.tp, time.micro_batch_size) for time in profile.times}):
        if any((kind, tp, size) not in measured for kind in counts):
            continue
        measured_s = predicted_s = 0.0
        for kind, count in counts.items():
            measured_s += count * _seconds(_at(profile, profile.times_of(kind, tp=tp), size))
            predicted_s += count * _seconds(costs.layer(kind, device=profile.device, tp=tp, micro_batch_size=size))
        yield math.log(predicted_s / measured_s)


def layer_factors() -> Mapping[Confidence, float]:
    """The factor of each sort of basis; what is measured less is not taken to be more certain."""
    errors, factors, largest = layer_errors(), {Confidence.MEASURED: 1.0}, 1.0
    for confidence in sorted(Confidence)[1:]:
        factors[confidence] = largest = max(largest, factor(errors[confidence]))
    return factors


def factor(log_errors: Sequence[float]) -> float:
    """The factor within which ``COVERED`` of the cases lie, rounded up to two digits behind the point.

    It is the quantile of the errors' sizes, by straight lines between them in order; no distribution is assumed.
    """
    sizes = sorted(abs(error) for error in log_errors)
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} cases are too few for a range")
    cuts = quantiles(sizes, n=100, method="inclusive")
    return math.ceil(100 * math.exp(cuts[round(100 * COVERED) - 1])) / 100
