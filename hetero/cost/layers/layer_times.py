"""Seconds of one layer, from measured profiles where they reach and from estimates where they do not.

Inside a profile, times are straight lines between the measured microbatch sizes. More samples never take less time:
where a measurement says so, the smaller microbatch was disturbed, and the larger one's time stands for both. A layer
was timed alone; in a running step the ranks of a tensor-parallel group wait for one another's hosts
(:mod:`.throughput_fit`).

Where the runtime's layers are put together otherwise than those of the profile (attention without scores, collectives
beside products, a split sequence), or its tensor-parallel ranks are linked otherwise, the measured time is multiplied
by the ratio of both estimates, and is an estimate.

Half a layer, its attention or its MLP, takes the share of the block's forward, and of its backward, that it has in what
both halves took alone, where a profile has measured them so; else the share that the fit gives its kernels, which is an
estimate. Of the update it takes the share of its parameters. The two halves of a layer always add up to the whole. In
the same way recomputation takes the share of the forward, and a split backward leaves the share to the weights'
gradients, that the profile has measured at the nearest microbatch, if it has.

A profile that one device alone has measured has no collectives in its times (``tp_collectives_included``). They are
added by the ratio of the estimates with and without them on the links of the cluster, and the sum is an estimate.

In fp8 nothing was measured. There the products of the linear layers, in both passes, take as much less time as the
data sheet's peaks of bf16 and fp8 say, and everything else, attention among it, what it takes in bf16. That is an
estimate, and a hopeful one: the casts to fp8 are not counted, and products in fp8 reach less of their peak.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.layer_kernels import ComputePass, LayerConfig
from hetero.cost.layers.reference_profiles import ReferenceProfiles
from hetero.cost.layers.throughput_fit import (
    LAUNCH_BOUND,
    Throughput,
    in_a_step_s,
    launches_s,
    measured_config,
    more_host_s,
)
from hetero.cost.layers.work import Work, layer_work, parameters_of
from hetero.plan.ir import Precision, Recompute
from hetero.spec.profile import (
    HALVES,
    Half,
    LayerImplementation,
    LayerKind,
    LayerShape,
    LayerTime,
    ModuleKind,
    Profile,
    have_like_costs,
)
from hetero.units import BYTES_OF_PRECISION

PASSES: tuple[ComputePass, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer, or half of one, for one microbatch on each of its tensor-parallel ranks."""

    forward_s: float
    backward_s: float
    confidence: Confidence


class LayerPlacement(NamedTuple):
    """Where a layer runs, and what one of its tensor-parallel ranks computes of a microbatch at a time."""

    device: str
    tp: int
    micro_batch_size: int
    sequence_parallel: bool = False
    fp8: bool = False


class LayerTimes:
    """Seconds of the layers of one shape on any device; answers are remembered.

    Args:
        references: what was measured, and throughputs to estimate from what was not.
        implementation: of the layers that run; ``None`` for those that were profiled, whatever they are. Then a
            profile's head counts as the model's even if it was measured without its projection.
    """

    def __init__(
        self,
        shape: LayerShape,
        *,
        seq_length: int,
        precision: Precision,
        references: ReferenceProfiles,
        implementation: LayerImplementation | None,
    ) -> None:
        self._shape = shape
        self._seq_length = seq_length
        self._precision = precision
        self._references = references
        self._implementation = implementation
        self._known: dict[tuple[ModuleKind, LayerPlacement], LayerCost] = {}
        self._profiles: dict[str, Profile | None] = {}
        self._implementations: dict[str, LayerImplementation] = {}

    def profile_of(self, device: str) -> Profile | None:
        """The profile of exactly these blocks on ``device``, if there is one."""
        if device not in self._profiles:
            self._profiles[device] = self._references.profiles.find(
                self._shape, device=device, seq_length=self._seq_length, precision=self._precision
            )
        return self._profiles[device]

    def implementation_on(self, device: str) -> LayerImplementation:
        """Return how layers on ``device`` are put together: as the runtime does it, else as profiled.

        Which kernel of attention a device has, a plan does not say and the device does. A profile of these layers knows
        it where it has measured this project's own layers, or where its kernel costs as much as the runtime's.
        The host CPU adds weight gradients as its profile says: which of its products can, the runtime finds out there.
        """
        if device not in self._implementations:
            self._implementations[device] = self._find_implementation(device)
        return self._implementations[device]

    def _find_implementation(self, device: str) -> LayerImplementation:
        profile, runs = self.profile_of(device), self._implementation
        profiled = profile.implementation if profile is not None else LayerImplementation()
        if runs is None:
            return profiled
        of_own_layers = profile is not None and profile.layers is not None and not runs.writes_scores
        if of_own_layers or (profile is not None and have_like_costs(runs.attention, profiled.attention)):
            runs = dataclasses.replace(runs, attention=profiled.attention)
        is_host = self._references.profiles.device_types.of(device).is_host
        if is_host and runs.gradient_sums != "separate":
            runs = dataclasses.replace(runs, gradient_sums=profiled.gradient_sums)
        return runs

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

    def of(self, kind: ModuleKind, on: LayerPlacement) -> LayerCost:
        """Seconds of one layer or half of one; embedding and head have no part in fp8.

        Raises:
            ConfigError: the device has no profile of any model, and data sheets are not allowed, or with fp8 it has no
                data sheet.
        """
        key = kind, on
        if key not in self._known:
            match kind:
                case "attention" | "mlp" | "block" if on.fp8:
                    self._known[key] = self._in_fp8(kind, on)
                case "attention" | "mlp":
                    self._known[key] = self._half(kind, on)
                case _:
                    self._known[key] = self._measured(kind, on) or self._estimated(kind, on)
        return self._known[key]

    def update(self, kind: ModuleKind, *, device: str, tp: int) -> tuple[float, Confidence]:
        """Seconds of the optimizer's update of one layer, or half of one, on each of its tensor-parallel ranks.

        Measured, or in proportion to the parameters as in other layers of the device, or by the bytes that it moves.
        """
        if kind == "attention" or kind == "mlp":
            block_s, confidence = self.update("block", device=device, tp=tp)
            half, whole = (parameters_of(each, self._shape, tp=tp) for each in (kind, "block"))
            return block_s * half / whole, max(confidence, Confidence.ESTIMATED)
        profile = self.profile_of(device)
        measured = profile.update_of(kind, tp=tp) if profile is not None and self._has(profile, kind) else None
        if measured is not None:
            return measured, Confidence.MEASURED
        rate, confidence = self._references.update_s_per_parameter(device)
        return rate * parameters_of(kind, self._shape, tp=tp), confidence

    def recompute_s(self, kind: ModuleKind, *, on: LayerPlacement, recompute: Recompute) -> float:
        """Seconds that the backward of a block, or of half of one, spends on its forward a second time.

        Full recomputation repeats all of it. Selective recomputation repeats the attention between queries and context
        (arXiv 2205.05198), which takes an estimated share of the forward, unless either was measured.
        """
        if (kind == "block" or recompute == "selective") and kind != "mlp":
            profile = self._profile_of_these_layers(on.device)
            repeated = _recomputed_share(profile, recompute, on) if profile is not None else None
            if repeated is not None:
                return repeated * self.of("block", on).forward_s
        if recompute == "full":
            return self.of(kind, on).forward_s
        return 0.0 if kind == "mlp" else self._part_s(kind, on, "forward", Throughput.core_attention_s)

    def weight_gradients_s(self, kind: ModuleKind, *, on: LayerPlacement) -> float:
        """Seconds of the weights' gradients in the backward of a block, or of half of one.

        Their share of a split backward that was measured; else an estimate, the share of these products in the kernels
        of the block's backward. In fp8 as much less as the peaks say.
        """
        profile = self._profile_of_these_layers(on.device)
        split = _nearest(profile.split_backwards_of(tp=on.tp), on) if profile is not None else None
        if split is not None and not on.fp8:
            whole_s, part_s = (
                self._part_s(each, on, "backward", Throughput.weight_gradients_s) for each in ("block", kind)
            )
            of_block_s = split.weights_share * self.of("block", on).backward_s
            return of_block_s * (part_s / whole_s if whole_s > 0 else 1.0)
        weights_s = self._part_s(kind, on, "backward", Throughput.weight_gradients_s)
        return (
            weights_s / self._references.data_sheet(on.device, wanted="speed-up in fp8").fp8_speedup
            if on.fp8
            else weights_s
        )

    def _layer(self, kind: ModuleKind, on: LayerPlacement) -> LayerConfig:
        return LayerConfig(
            kind=kind,
            shape=self._shape,
            seq_length=self._seq_length,
            element_bytes=BYTES_OF_PRECISION[self._precision],
            implementation=self.implementation_on(on.device),
            tp=on.tp,
            micro_batch_size=on.micro_batch_size,
            sequence_parallel=on.sequence_parallel and on.tp > 1,
            all_reduce=self._references.profiles.all_reduce_of(on.device),
        )

    def _has(self, profile: Profile, kind: LayerKind) -> bool:
        """Whether ``profile``, whose blocks are this model's, also has this model's layer of ``kind``."""
        if kind == "head" and not (profile.head_has_projection or self._implementation is None):
            return False
        return kind == "block" or profile.shape.vocabulary == self._shape.vocabulary

    def _measured(self, kind: LayerKind, on: LayerPlacement) -> LayerCost | None:
        """The profile's seconds, scaled to how the layer is put together here."""
        profile = self.profile_of(on.device)
        if profile is None or not self._has(profile, kind):
            return None
        here = self._layer(kind, on)
        if not profile.all_reduce and profile.tp_collectives_included:
            # Nobody can tell collectives from the rest of a time that says nothing of them.
            here = dataclasses.replace(here, all_reduce=())
        alone = measured_config(profile, kind, tp=on.tp, micro_batch_size=on.micro_batch_size)
        if alone.implementation.gradient_sums is None:
            # It does not say what of its times are sums of gradients: as much as here, then.
            alone = alone.with_gradient_sums(here.implementation.gradient_sums)
        ratios: list[float] = [1.0, 1.0]
        if _differs(alone, here):
            throughputs = [self._references.throughput(on.device, kind, each)[0] for each in PASSES]
            ratios = [_ratio(each.device_s(here), each.device_s(alone)) for each in throughputs]
        cost = interpolate(
            profile.times_of(kind, tp=on.tp),
            micro_batch_size=on.micro_batch_size,
            isolation_s=profile.isolation_s,
            ratios=(ratios[0] * profile.in_a_step, ratios[1] * profile.in_a_step),
            more_host_s=more_host_s(here) - more_host_s(alone),
        )
        if cost is None:
            return None
        says = profile.implementation.gradient_sums is not None
        if kind == "embedding" and cost.backward_s == 0 and not says and here.implementation.gradient_sums is not None:
            # The published profiles have no backward of the embedding.
            throughput, confidence = self._references.throughput(on.device, kind, "backward")
            return LayerCost(cost.forward_s, throughput.seconds(here), max(cost.confidence, confidence))
        if ratios == [1.0, 1.0]:
            return cost
        return dataclasses.replace(cost, confidence=max(cost.confidence, Confidence.ESTIMATED))

    def _profile_of_these_layers(self, device: str) -> Profile | None:
        """The profile of these blocks, if they were put together as those that run: then proportions are the same."""
        profile = self.profile_of(device)
        if profile is None or self._implementation is None:
            return profile
        # Of proportions little depends on who adds the gradients.
        sums = profile.implementation.gradient_sums
        here = dataclasses.replace(self.implementation_on(device), gradient_sums=sums)
        return profile if here == profile.implementation else None

    def _half(self, half: Half, on: LayerPlacement) -> LayerCost:
        """The share of a block's seconds that half of it takes, as measured, else by its kernels."""
        block = self.of("block", on)
        profile = self._profile_of_these_layers(on.device)
        if profile is not None and (parts := _halves(profile, on)) is not None:
            mine = parts[half]
            forward_s, backward_s = (sum(getattr(each, name) for each in parts.values()) for name in _SECONDS)
            if forward_s > 0 and backward_s > 0:
                return LayerCost(
                    block.forward_s * mine.forward_s / forward_s,
                    block.backward_s * mine.backward_s / backward_s,
                    max(block.confidence, *(each.confidence for each in parts.values())),
                )
        fits = [self._references.throughput(on.device, "block", each)[1] for each in PASSES]
        confidence = max(block.confidence, Confidence.ESTIMATED, *fits)
        forward_s, backward_s = (self._part_s(half, on, each, Throughput.device_s) for each in PASSES)
        return LayerCost(forward_s, backward_s, confidence)

    def _part_s(
        self,
        kind: ModuleKind,
        on: LayerPlacement,
        compute_pass: ComputePass,
        part: Callable[[Throughput, LayerConfig], float],
    ) -> float:
        """Seconds of a part of a block: its share of the block's kernels, times the block's seconds.

        kind: the block, or the half of it whose part it is.
        """
        throughput, _ = self._references.throughput(on.device, "block", compute_pass)
        cost = self.of("block", on._replace(fp8=False))
        block_s = cost.forward_s if compute_pass == "forward" else cost.backward_s
        whole_s = throughput.device_s(self._layer("block", on))
        return block_s * part(throughput, self._layer(kind, on)) / whole_s

    def _in_fp8(self, kind: Half | LayerKind, on: LayerPlacement) -> LayerCost:
        """A block or half of one, whose linear layers are as much faster as the peaks say. Launches take as long."""
        plain = on._replace(fp8=False)
        cost, block = self.of(kind, plain), self.of("block", plain)
        forward_share, backward_share = (self._share_saved_by_fp8(kind, on, each) for each in PASSES)
        return LayerCost(
            cost.forward_s - forward_share * block.forward_s,
            cost.backward_s - backward_share * block.backward_s,
            max(cost.confidence, Confidence.DATA_SHEET),
        )

    def _share_saved_by_fp8(self, kind: ModuleKind, on: LayerPlacement, compute_pass: ComputePass) -> float:
        """Return the share of a block's seconds that its linear layers, or those of half of it, save in fp8."""
        speedup = self._references.data_sheet(on.device, wanted="speed-up in fp8").fp8_speedup
        throughput, _ = self._references.throughput(on.device, "block", compute_pass)
        part, block = self._layer(kind, on), self._layer("block", on)
        saved = 1 - throughput.seconds(block, linear_speedup=speedup) / throughput.seconds(block)
        return saved * throughput.linear_s(part) / throughput.linear_s(block)

    def _estimated(self, kind: LayerKind, on: LayerPlacement) -> LayerCost:
        """The seconds by the fit, scaled to what this layer took at another tp if it was measured there."""
        seconds: dict[ComputePass, float] = {}
        confidence = Confidence.ESTIMATED
        for compute_pass in PASSES:
            throughput, of_fit = self._references.throughput(on.device, kind, compute_pass)
            scale = self._measured_over_fit(kind, on, compute_pass, throughput)
            seconds[compute_pass] = scale * throughput.seconds(self._layer(kind, on))
            confidence = max(confidence, of_fit)
        return LayerCost(seconds["forward"], seconds["backward"], confidence)

    def _measured_over_fit(
        self, kind: LayerKind, on: LayerPlacement, compute_pass: ComputePass, throughput: Throughput
    ) -> float:
        """Measured over fitted seconds at the nearest tp at which this very layer was measured; 1 if none was."""
        profile = self.profile_of(on.device)
        if profile is None:
            return 1.0
        for measured_tp in sorted(profile.tps(kind), key=lambda other: abs(other - on.tp)):
            there = on._replace(tp=measured_tp)
            cost = self._measured(kind, there)
            fitted_s = throughput.seconds(self._layer(kind, there))
            if cost is not None and fitted_s > 0:
                return (cost.forward_s if compute_pass == "forward" else cost.backward_s) / fitted_s
        return 1.0


_SECONDS = ("forward_s", "backward_s")


class _OfMicrobatch(Protocol):
    """Was measured with microbatches of this size."""

    @property
    def micro_batch_size(self) -> int: ...


Measured = TypeVar("Measured", bound=_OfMicrobatch)


def _nearest(measured: Sequence[Measured], on: LayerPlacement) -> Measured | None:
    """That of the microbatch whose size is nearest, by the ratio of both; ``None`` of nothing."""
    return min(measured, key=lambda each: abs(math.log(each.micro_batch_size / on.micro_batch_size)), default=None)


def _recomputed_share(profile: Profile, recompute: Recompute, on: LayerPlacement) -> float | None:
    """What a block's backward takes longer with ``recompute``, in its forwards; ``None`` if nobody measured that."""
    found = _nearest(profile.recomputed_of(recompute, tp=on.tp), on)
    without = {each.micro_batch_size: each for each in profile.times_of("block", tp=on.tp)}
    if found is None or found.micro_batch_size not in without:
        return None
    plain = without[found.micro_batch_size]
    return max(0.0, found.backward_s - plain.backward_s) / plain.forward_s if plain.forward_s > 0 else None


def _halves(profile: Profile, on: LayerPlacement) -> dict[Half, LayerCost] | None:
    """What both halves of a block took alone, ``None`` unless both were measured at this tp."""
    found = {
        half: interpolate(
            profile.times_of(half, tp=on.tp), micro_batch_size=on.micro_batch_size, isolation_s=profile.isolation_s
        )
        for half in HALVES
    }
    known = {half: cost for half, cost in found.items() if cost is not None}
    return known if len(known) == len(HALVES) else None


def _differs(alone: LayerConfig, here: LayerConfig) -> bool:
    """Whether a layer runs otherwise than it was measured."""
    if alone.implementation.gradient_sums != here.implementation.gradient_sums:
        return True
    if alone.implementation != here.implementation and alone.kind in ("block", "attention"):
        same_attention = alone.implementation.attention == here.implementation.attention
        same_dropout = alone.implementation.dropout == here.implementation.dropout
        if here.tp > 1 or not (same_attention and same_dropout):
            return True
    return here.tp > 1 and (here.sequence_parallel or tuple(alone.all_reduce) != tuple(here.all_reduce))


def _ratio(here_s: float, there_s: float) -> float:
    return here_s / there_s if there_s > 0 else 1.0


def interpolate(
    times: Sequence[LayerTime],
    *,
    micro_batch_size: int,
    isolation_s: float,
    ratios: tuple[float, float] = (1.0, 1.0),
    more_host_s: float = 0.0,
) -> LayerCost | None:
    """The cost at ``micro_batch_size`` by straight lines through ``times``, one layer's at one tp in ascending size.

    Above the largest measured size the last line goes on; below the smallest its time stays. Both are extrapolated.

    Args:
        ratios: what the kernels of a forward and of a backward take here, in a step, over what they took there, alone.
        more_host_s: seconds that the launches of a forward take longer here.

    Returns:
        ``None`` if ``times`` is empty.
    """
    if not times:
        return None
    sizes = [time.micro_batch_size for time in times]
    forwards = _undisturbed([t.forward_s for t in times], isolation_s)
    backwards = _undisturbed([t.backward_s for t in times], isolation_s)
    forward_s, backward_s = (
        _in_a_step(times[0], sizes, seconds, micro_batch_size, ratio=ratio, more_host_s=more_s)
        for seconds, ratio, more_s in zip((forwards, backwards), ratios, (more_host_s, 0.0), strict=True)
    )
    if micro_batch_size in sizes:
        confidence = Confidence.MEASURED
    elif sizes[0] < micro_batch_size < sizes[-1]:
        confidence = Confidence.INTERPOLATED
    else:
        confidence = Confidence.EXTRAPOLATED
    return LayerCost(forward_s, backward_s, confidence)


def _in_a_step(
    time: LayerTime,
    sizes: Sequence[int],
    seconds: Sequence[float],
    size: int,
    *,
    ratio: float,
    more_host_s: float,
) -> float:
    """Seconds of a microbatch of ``size`` in a running step, from a series that was measured alone."""
    alone_s = _line(sizes, seconds, size)
    host_s = launches_s(sizes, seconds) if time.kind == "block" else 0.0
    if host_s == 0:
        return alone_s * ratio
    per_sample = min(each / each_size for each_size, each in zip(sizes, seconds, strict=True))
    device_s = alone_s if alone_s > LAUNCH_BOUND * host_s else per_sample * size
    return in_a_step_s(device_s * ratio, host_s + more_host_s, tp=time.tp)


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
