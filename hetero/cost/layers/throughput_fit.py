"""Fits the seconds of a device's kernels to the layers that were measured on it, to estimate those that were not.

A pass of a layer is modelled as

    t = x1 products + x2 attention + x3 rows + x4 collectives                       but at least the host's launches

with the seconds of :mod:`.layer_kernels` and multiples x_i that are fitted, per device, kind of layer and pass, to all
its measured times: 1 where the device does what was published of its kind, more where these layers do it worse.
Profiles of one model cannot tell the multiples apart, since all parts grow alike; the fit therefore leans towards equal
ones:

    minimise  mean((t_fit / t_measured - 1)^2) + LEANING sum_i (x_i / x - 1)^2      x_i >= 0

where x is the single multiple of the first three that fits best. Collectives lean towards 1.

**Launches.** Small layers take as long as the host needs to launch their kernels. In a profile that is the least time
of a series that does not grow with the microbatch; where no profile of the device shows it, it is counted
(:mod:`.launches`). A host needs as many times as long for a block with experts as this has more launches than a dense
one. Without tensor parallelism a layer takes the larger of both. The
ranks of a tensor-parallel group wait for one another's hosts in every collective; there the two add up like

    sqrt(device^2 + host^2)

a heuristic, which explains why layers in a running step are up to an eighth slower, where both are about equal, than
timed alone (docs/cost_model.md).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero.cost.layers.kernels import Kernels
from hetero.cost.layers.launches import counted_launches_s, over_dense
from hetero.cost.layers.layer_kernels import ComputePass, KernelSeconds, LayerConfig, kernel_seconds
from hetero.spec.devices import DataSheet
from hetero.spec.profile import AttentionKernel, LayerKind, LayerTime, ModuleKind, Profile, have_like_costs
from hetero.units import BYTES_OF_PRECISION

LEANING = 0.01
"""Weight of the leaning against the measurements. A heuristic; errors hardly change between 0.001 and 0.1."""

MOST_HOST_S = 3e-3
"""No host takes longer: times that do not grow with the microbatch above it are something else, as collectives over a
bus. A heuristic."""

GENERATOR_S = 4e-4
"""Seconds in which Megatron-LM exchanges the state of the CUDA generator for that of its tensor-parallel rank and back,
around the dropout of a block's attention (``CudaRNGStatesTracker.fork``). Calibrated on its runs on GH200 with
microbatches of one sample, which are bound by launches."""

LAUNCH_BOUND = 1.2
"""A series is bound by launches at its smallest microbatch if that takes so many times the seconds that its samples
take in the largest."""

NOMINAL_HOST = DataSheet(
    memory_gb_per_s=10.0,
    fp64_tflops=0.05,
    fp32_tflops=0.1,
    bf16_tflops=0.1,
    fp16_tflops=0.1,
    source="ten fp32 operations per byte",
)
"""Stands in for the host CPU, which has no data sheet. The fit scales both figures, so that only their ratio counts."""

SCALED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput:
    """What a device takes for one pass of layers of one kind.

    linear, attention, rows, collectives: multiples of the kernels' seconds.
    measured_attention: the attention that its multiple was fitted to. Another one takes the products' multiple.
    host_s: seconds of the launches of one dense block as measured on the device, where the ends of a model have none to
        speak of; ``None`` counts the launches of each layer.
    most_host_s: no dense layer's launches take longer, since a block was measured that took no more.
    """

    kernels: Kernels
    compute_pass: ComputePass
    linear: float = 1.0
    attention: float = 1.0
    rows: float = 1.0
    collectives: float = 1.0
    measured_attention: AttentionKernel | None = None
    host_s: float | None = None
    most_host_s: float = math.inf

    def seconds(self, layer: LayerConfig, *, linear_speedup: float = 1.0) -> float:
        """Estimate the seconds of ``layer`` in a running step, with products of weights faster by a factor."""
        device_s = self.device_s(layer) - (1 - 1 / linear_speedup) * self.linear_s(layer)
        if layer.kind != "block" and self.host_s is not None:
            return device_s
        more_s = more_host_s(layer) if layer.kind == "block" and self.compute_pass == "forward" else 0.0
        return in_a_step_s(device_s, self._launches_s(layer) + more_s, tp=layer.tp)

    def device_s(self, layer: LayerConfig) -> float:
        """Seconds of the kernels of ``layer``, or of half of one. Those of the halves add up to those of the block."""
        parts = self._parts(layer)
        return (
            self.linear * parts.linear_s
            + self._attention_multiple(layer) * parts.attention_s
            + self.rows * (parts.rows_s + parts.gradient_sums_s)
            + self.collectives * parts.collectives_s
        )

    def core_attention_s(self, layer: LayerConfig) -> float:
        """Seconds of the part that selective recomputation repeats: from queries and keys to the context."""
        return self._attention_multiple(layer) * self._parts(layer).attention_s

    def linear_s(self, layer: LayerConfig) -> float:
        """Seconds of the products with weights, attention's own without."""
        return self.linear * self._parts(layer).linear_s

    def weight_gradients_s(self, layer: LayerConfig) -> float:
        """Seconds, in a backward, of the products of input and output's gradient and of adding them to their sums; 0 in
        a forward."""
        parts = self._parts(layer)
        return self.linear * parts.weight_gradients_s + self.rows * parts.gradient_sums_s

    def _launches_s(self, layer: LayerConfig) -> float:
        """Seconds of the host for one pass of ``layer``."""
        times = over_dense(layer, self.compute_pass)
        if self.host_s is not None:
            return times * self.host_s
        if self.kernels.is_host:
            return 0.0
        return min(times * self.most_host_s, counted_launches_s(layer, self.compute_pass))

    def _attention_multiple(self, layer: LayerConfig) -> float:
        is_fitted = have_like_costs(layer.implementation.attention, self.measured_attention)
        return self.attention if is_fitted else self.linear

    def _parts(self, layer: LayerConfig) -> KernelSeconds:
        return kernel_seconds(self.kernels, layer, self.compute_pass)


def more_host_s(layer: LayerConfig) -> float:
    """Seconds that the host takes longer for a forward than it takes for one without dropout on one rank."""
    return GENERATOR_S if layer.implementation.dropout and layer.tp > 1 else 0.0


def in_a_step_s(device_s: float, host_s: float, *, tp: int) -> float:
    """Seconds of a block in a running step from those of its kernels and of their launches, as above."""
    return max(device_s, host_s) if tp == 1 else math.hypot(device_s, host_s)


def launches_s(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The host's seconds that a series of times in ascending size shows, 0 if it shows none."""
    if not sizes:
        return 0.0
    per_sample = min(each / size for size, each in zip(sizes, seconds, strict=True))
    return min(seconds) if min(seconds) >= LAUNCH_BOUND * per_sample * sizes[0] else 0.0


def fit(
    profiles: Sequence[Profile], kernels: Kernels, *, kind: LayerKind, compute_pass: ComputePass
) -> Throughput | None:
    """Multiples for the device of ``profiles``, which share precision, arithmetic and implementation.

    Returns:
        ``None`` if no profile has a time of this kind and pass.
    """
    host_s, least_s = _launches_of(profiles, compute_pass)
    rows: list[list[float]] = []
    measured: list[float] = []
    device_bound: list[bool] = []
    for profile in profiles:
        if kind == "head" and not profile.head_has_projection:
            continue
        for time in profile.times:
            seconds = _seconds(time, compute_pass) - profile.isolation_s
            if time.kind == kind and seconds > 0:
                rows.append(_features(profile, time, kernels, compute_pass))
                measured.append(seconds * profile.in_a_step)
                launched_s = (host_s or 0.0) * _over_dense(profile, compute_pass) if kind == "block" else 0.0
                device_bound.append(measured[-1] > LAUNCH_BOUND * launched_s)
    if not rows:
        return None
    chosen = device_bound if any(device_bound) else [True] * len(rows)
    fitted = _fit_near_one(np.array(rows)[chosen], np.array(measured)[chosen])
    return Throughput(
        kernels=kernels,
        compute_pass=compute_pass,
        linear=float(fitted[0]),
        attention=float(fitted[1]),
        rows=float(fitted[2]),
        collectives=float(fitted[3]),
        measured_attention=profiles[0].implementation.attention,
        host_s=host_s,
        most_host_s=least_s,
    )


def nominal(kernels: Kernels, compute_pass: ComputePass, profiles: Sequence[Profile]) -> Throughput:
    """What the kernels take as published, with the launches that ``profiles`` of the device show."""
    host_s, least_s = _launches_of(profiles, compute_pass)
    return Throughput(kernels=kernels, compute_pass=compute_pass, host_s=host_s, most_host_s=least_s)


def _launches_of(profiles: Sequence[Profile], compute_pass: ComputePass) -> tuple[float | None, float]:
    """The least seconds of launches of a dense block on several ranks that a series shows, else on one, ``None`` where
    none does; and the least seconds that a block took. Those of blocks with experts are scaled to a dense block's."""
    shown: dict[bool, list[float]] = {True: [], False: []}
    least_s = math.inf
    for profile in profiles:
        times = _over_dense(profile, compute_pass)
        for tp in profile.tps("block"):
            series = profile.times_of("block", tp=tp)
            seconds = [max(0.0, _seconds(time, compute_pass) - profile.isolation_s) / times for time in series]
            least_s = min(least_s, *seconds)
            launches = launches_s([time.micro_batch_size for time in series], seconds)
            shown[tp > 1] += [launches] * (0 < launches < MOST_HOST_S)
    return min(shown[True] or shown[False], default=None), least_s


def _over_dense(profile: Profile, compute_pass: ComputePass) -> float:
    return over_dense(measured_config(profile, "block", tp=1, micro_batch_size=1), compute_pass)


def _seconds(time: LayerTime, compute_pass: ComputePass) -> float:
    return time.forward_s if compute_pass == "forward" else time.backward_s


def measured_config(profile: Profile, kind: ModuleKind, *, tp: int, micro_batch_size: int) -> LayerConfig:
    """A layer as ``profile`` has it."""
    return LayerConfig(
        kind=kind,
        shape=profile.shape,
        seq_length=profile.seq_length,
        element_bytes=BYTES_OF_PRECISION[profile.precision],
        implementation=profile.implementation,
        tp=tp,
        micro_batch_size=micro_batch_size,
        all_reduce=profile.all_reduce,
    )


def _features(profile: Profile, time: LayerTime, kernels: Kernels, compute_pass: ComputePass) -> list[float]:
    layer = measured_config(profile, time.kind, tp=time.tp, micro_batch_size=time.micro_batch_size)
    parts = kernel_seconds(kernels, layer, compute_pass)
    return [parts.linear_s, parts.attention_s, parts.rows_s + parts.gradient_sums_s, parts.collectives_s]


def _fit_near_one(features: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    """The multiples that minimise the sum at the head of this file."""
    parts = features / measured[:, None]
    scalable = parts[:, :SCALED].sum(axis=1)
    scale = float(scalable.sum() / (scalable @ scalable)) if scalable.any() else 1.0
    target = np.array([scale] * SCALED + [1.0] * (features.shape[1] - SCALED))
    weighted = np.vstack([parts / np.sqrt(len(measured)), np.sqrt(LEANING) * np.diag(1 / target)])
    wanted = np.concatenate(
        [np.full(len(measured), 1 / np.sqrt(len(measured))), np.full(len(target), np.sqrt(LEANING))]
    )
    return _least_squares(weighted, wanted)


def _least_squares(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """The x >= 0 that minimises |matrix x - wanted|: the best over all sets of columns that are not held at 0."""
    columns = matrix.shape[1]
    best = np.zeros(columns)
    least = float("inf")
    for size in range(1, columns + 1):
        for chosen in map(list, itertools.combinations(range(columns), size)):
            solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
            error = float(np.sum((matrix[:, chosen] @ solution - wanted) ** 2))
            if (solution >= 0).all() and error < least - 1e-12:
                best = np.zeros(columns)
                best[chosen] = solution
                least = error
    return best
