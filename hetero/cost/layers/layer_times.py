"""Seconds of one layer, from measured profiles where they reach and from estimates where they do not.

Inside a profile, times are straight lines between the measured microbatch sizes. More samples never take less time:
where a measurement says so, the smaller microbatch was disturbed, and the larger one's time stands for both.

Half a layer, its attention or its MLP, was never measured alone. It takes the share of the block's forward, and of its
backward, that the fit of :mod:`.throughput_fit` gives its part of the work; of the update, that of its parameters.
Such seconds are an estimate, but the two halves of a layer always add up to the whole.

In fp8 nothing was measured. There the products of the linear layers, in both passes, take as much less time as the
data sheet's peaks of bf16 and fp8 say, and everything else, attention among it, what it takes in bf16. That is an
estimate, and a hopeful one: the casts to fp8 are not counted, and products in fp8 reach less of their peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.reference_profiles import ReferenceProfiles
from hetero.cost.layers.stage_modules import Half, ModuleKind
from hetero.cost.layers.throughput_fit import ComputePass, Throughput
from hetero.cost.layers.work import Work, layer_work, parameters_of
from hetero.plan.ir import Precision, Recompute
from hetero.spec.profile import LayerKind, LayerShape, LayerTime, Profile, ProfileStore
from hetero.units import BYTES_OF_PRECISION

PASSES: tuple[ComputePass, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer, or half of one, for one microbatch on each of its tensor-parallel ranks."""

    forward_s: float
    backward_s: float
    confidence: Confidence


class LayerTimes:
    """Seconds of the layers of one shape on any device; answers are remembered.

    Args:
        profiles: what was measured.
        references: throughputs to estimate from what was not.
        runs_profiled_layers: a profile's head counts as the model's even if it was measured without its projection.
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        seq_length: int,
        precision: Precision,
        profiles: ProfileStore,
        references: ReferenceProfiles,
        runs_profiled_layers: bool,
    ) -> None:
        self._shape = shape
        self._seq_length = seq_length
        self._precision = precision
        self._profiles = profiles
        self._references = references
        self._runs_profiled_layers = runs_profiled_layers
        self._known: dict[tuple[ModuleKind, str, int, int, bool], LayerCost] = {}

    def profile_of(self, device: str) -> Profile | None:
        """The profile of exactly these blocks on ``device``, if there is one."""
        return self._profiles.find(self._shape, device=device, seq_length=self._seq_length, precision=self._precision)

    def work(self, kind: ModuleKind, *, tp: int, micro_batch_size: int) -> Work:
        """Operations and bytes of one forward of a layer."""
        return layer_work(
            kind,
            self._shape,
            tp=tp,
            micro_batch_size=micro_batch_size,
            seq_length=self._seq_length,
            element_bytes=BYTES_OF_PRECISION[self._precision],
        )

    def of(self, kind: ModuleKind, *, device: str, tp: int, micro_batch_size: int, fp8: bool = False) -> LayerCost:
        """Seconds of one layer or half of one; embedding and head have no part in fp8.

        Raises:
            ConfigError: ``device`` has no profile of any model, and data sheets are not allowed, or with ``fp8`` it has
                no data sheet.
        """
        key = kind, device, tp, micro_batch_size, fp8
        if key not in self._known:
            match kind:
                case "attention" | "mlp" | "block" if fp8:
                    self._known[key] = self._in_fp8(kind, device, tp, micro_batch_size)
                case "attention" | "mlp":
                    self._known[key] = self._half(kind, device, tp, micro_batch_size)
                case _:
                    measured = self._measured(kind, device, tp, micro_batch_size)
                    self._known[key] = measured or self._estimated(kind, device, tp, micro_batch_size)
        return self._known[key]

    def update(self, kind: ModuleKind, *, device: str, tp: int) -> tuple[float, Confidence]:
        """Seconds of the optimizer's update of one layer, or half of one, on each of its tensor-parallel ranks.

        Measured, or in proportion to the parameters as in other layers of the device, or 28 bytes per parameter over
        the data sheet's memory bandwidth.
        """
        if kind == "attention" or kind == "mlp":
            block_s, confidence = self.update("block", device=device, tp=tp)
            half, whole = (parameters_of(each, self._shape, tp=tp) for each in (kind, "block"))
            return block_s * half / whole, max(confidence, Confidence.ESTIMATED)
        profile = self.profile_of(device)
        measured = profile.update_of(kind, tp=tp) if profile is not None and self._has(profile, kind) else None
        if profile is not None and measured is not None:
            return max(0.0, measured - profile.isolation_s), Confidence.MEASURED
        rate, confidence = self._references.update_s_per_parameter(device)
        return rate * parameters_of(kind, self._shape, tp=tp), confidence

    def recompute_s(
        self, kind: ModuleKind, *, device: str, tp: int, micro_batch_size: int, recompute: Recompute, fp8: bool
    ) -> float:
        """Seconds that the backward of a block, or of half of one, spends on its forward a second time.

        Full recomputation repeats all of it. Selective recomputation repeats the attention between queries and context
        (arXiv 2205.05198), which takes an estimated share of the forward.
        """
        if recompute == "full":
            return self.of(kind, device=device, tp=tp, micro_batch_size=micro_batch_size, fp8=fp8).forward_s
        if kind == "mlp":
            return 0.0
        forward_s = self.of("block", device=device, tp=tp, micro_batch_size=micro_batch_size).forward_s
        throughput, _ = self._references.throughput(device, "block", "forward")
        work = self.work("block", tp=tp, micro_batch_size=micro_batch_size)
        return forward_s * min(1.0, throughput.core_attention_s(work) / throughput.seconds(work, tp=tp))

    def weight_gradients_s(self, kind: ModuleKind, *, device: str, tp: int, micro_batch_size: int, fp8: bool) -> float:
        """Seconds of the weights' gradients in the backward of a block, or of half of one.

        An estimate, their share of the products: each linear layer has two in a backward, one for them and one for the
        gradient of the input.

            w = b  a (operations - attention operations) / 2  /  t

        with b the backward's seconds of the whole block, measured or not, and a and t of :mod:`.throughput_fit`
        for backwards; the operations are those of ``kind``. In fp8 as much less as the peaks say.
        """
        backward_s = self.of("block", device=device, tp=tp, micro_batch_size=micro_batch_size).backward_s
        throughput, _ = self._references.throughput(device, "block", "backward")
        work, block = (self.work(each, tp=tp, micro_batch_size=micro_batch_size) for each in (kind, "block"))
        weights_s = backward_s * throughput.weight_gradients_s(work) / throughput.seconds(block, tp=tp)
        return weights_s / self._references.data_sheet(device).fp8_speedup if fp8 else weights_s

    def _has(self, profile: Profile, kind: LayerKind) -> bool:
        """Whether ``profile``, whose blocks are this model's, also has this model's layer of ``kind``."""
        if kind == "head" and not (profile.head_has_projection or self._runs_profiled_layers):
            return False
        return kind == "block" or profile.shape.vocabulary == self._shape.vocabulary

    def _measured(self, kind: LayerKind, device: str, tp: int, micro_batch_size: int) -> LayerCost | None:
        profile = self.profile_of(device)
        if profile is None or not self._has(profile, kind):
            return None
        return interpolate(
            profile.times_of(kind, tp=tp), micro_batch_size=micro_batch_size, isolation_s=profile.isolation_s
        )

    def _half(self, half: Half, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        """The share of a block's seconds that half of it takes, by the fit."""
        block = self.of("block", device=device, tp=tp, micro_batch_size=micro_batch_size)
        works = [self.work(kind, tp=tp, micro_batch_size=micro_batch_size) for kind in (half, "block")]
        shares: dict[ComputePass, float] = {}
        confidence = max(block.confidence, Confidence.ESTIMATED)
        for compute_pass in PASSES:
            throughput, of_fit = self._references.throughput(device, "block", compute_pass)
            shares[compute_pass] = throughput.share(*works, tp=tp)
            confidence = max(confidence, of_fit)
        return LayerCost(block.forward_s * shares["forward"], block.backward_s * shares["backward"], confidence)

    def _in_fp8(self, kind: Half | LayerKind, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        """A block or half of one, with the share of the linear layers, by the fit, as much faster as the peaks say."""
        cost, whole = (
            self.of(each, device=device, tp=tp, micro_batch_size=micro_batch_size) for each in (kind, "block")
        )
        work, block = (self.work(each, tp=tp, micro_batch_size=micro_batch_size) for each in (kind, "block"))
        saved = 1 - 1 / self._references.data_sheet(device).fp8_speedup
        linear: dict[ComputePass, float] = {}
        for compute_pass in PASSES:
            throughput, _ = self._references.throughput(device, "block", compute_pass)
            linear[compute_pass] = throughput.linear_s(work) / throughput.seconds(block, tp=tp)
        return LayerCost(
            cost.forward_s - saved * linear["forward"] * whole.forward_s,
            cost.backward_s - saved * linear["backward"] * whole.backward_s,
            max(cost.confidence, Confidence.DATA_SHEET),
        )

    def _estimated(self, kind: LayerKind, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        """The seconds by the fit, scaled to what this layer took at another tp if it was measured there."""
        seconds: dict[ComputePass, float] = {}
        confidence = Confidence.ESTIMATED
        for compute_pass in PASSES:
            throughput, of_fit = self._references.throughput(device, kind, compute_pass)
            work = self.work(kind, tp=tp, micro_batch_size=micro_batch_size)
            scale = self._measured_over_fit(kind, device, tp, micro_batch_size, compute_pass, throughput)
            seconds[compute_pass] = scale * throughput.seconds(work, tp=tp)
            confidence = max(confidence, of_fit)
        return LayerCost(seconds["forward"], seconds["backward"], confidence)

    def _measured_over_fit(
        self,
        kind: LayerKind,
        device: str,
        tp: int,
        micro_batch_size: int,
        compute_pass: ComputePass,
        throughput: Throughput,
    ) -> float:
        """Measured over fitted seconds at the nearest tp at which this very layer was measured; 1 if none was."""
        profile = self.profile_of(device)
        if profile is None:
            return 1.0
        for measured_tp in sorted(profile.tps(kind), key=lambda other: abs(other - tp)):
            cost = self._measured(kind, device, measured_tp, micro_batch_size)
            work = self.work(kind, tp=measured_tp, micro_batch_size=micro_batch_size)
            fitted_s = throughput.seconds(work, tp=measured_tp)
            if cost is not None and fitted_s > 0:
                return (cost.forward_s if compute_pass == "forward" else cost.backward_s) / fitted_s
        return 1.0


def interpolate(times: Sequence[LayerTime], *, micro_batch_size: int, isolation_s: float) -> LayerCost | None:
    """The cost at ``micro_batch_size`` by straight lines through ``times``, one layer's at one tp in ascending size.

    Above the largest measured size the last line goes on; below the smallest its time stays. Both are extrapolated.

    Returns:
        ``None`` if ``times`` is empty.
    """
    if not times:
        return None
    sizes = [time.micro_batch_size for time in times]
    forward_s = _line(sizes, _undisturbed([t.forward_s for t in times], isolation_s), micro_batch_size)
    backward_s = _line(sizes, _undisturbed([t.backward_s for t in times], isolation_s), micro_batch_size)
    if micro_batch_size in sizes:
        confidence = Confidence.MEASURED
    elif sizes[0] < micro_batch_size < sizes[-1]:
        confidence = Confidence.INTERPOLATED
    else:
        confidence = Confidence.EXTRAPOLATED
    return LayerCost(forward_s, backward_s, confidence)


def _undisturbed(seconds: Sequence[float], isolation_s: float) -> list[float]:
    """Times in ascending size of the microbatch: none above a later one, and without what isolation adds."""
    least = float("inf")
    smoothed = []
    for value in reversed(seconds):
        least = min(least, value)
        smoothed.append(max(0.0, least - isolation_s))
    return smoothed[::-1]


def _line(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    if size <= sizes[0]:
        return seconds[0]
    if len(sizes) == 1:
        return seconds[0] * size / sizes[0]
    segments = list(pairwise(zip(sizes, seconds, strict=True)))
    (small, faster), (large, slower) = next((pair for pair in segments if size <= pair[1][0]), segments[-1])
    return faster + (slower - faster) * (size - small) / (large - small)
