"""Seconds of layers and stages, from measured profiles where they reach and from estimates where they do not.

Inside a profile, times are straight lines between the measured microbatch sizes. More samples never take less time:
where a measurement says so, the smaller microbatch was disturbed, and the larger one's time stands for both.

Half a layer, its attention or its MLP, was never measured alone. It takes the share of the block's forward, and of its
backward, that the fit of :mod:`.throughput_fit` gives its part of the work; of the update, that of its parameters.
Such seconds are an estimate, but the two halves of a layer always add up to the whole.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.parameter_counts import LayerSizes
from hetero.cost.layers.reference_profiles import ReferenceProfiles
from hetero.cost.layers.stage_modules import HALVES, Half, Part, modules_of, parts_of
from hetero.cost.layers.throughput_fit import ComputePass, Throughput
from hetero.cost.layers.work import Work, layer_work, parameters_of
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.plan.ir import Precision, Recompute, Stage
from hetero.schedule.actions import ActionKind
from hetero.spec.model import ModelSpec
from hetero.spec.profile import LAYER_KINDS, Arithmetic, LayerKind, LayerShape, LayerTime, Profile, ProfileStore
from hetero.units import BYTES_OF_PRECISION

DIRECTIONS: tuple[ComputePass, ...] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of one layer, or half of one, for one microbatch on each of its tensor-parallel ranks."""

    forward_s: float
    backward_s: float
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of one stage: a forward and a backward of one microbatch, and one update of its weights.

    backward_s contains what is computed again under recomputation. weight_s is the part of it that a split backward
    leaves for later, 0 where the backward is whole. ``confidence`` is that of forward and backward.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    update_s: float
    confidence: Confidence

    @property
    def microbatch_s(self) -> float:
        """t_s of the steady-period formula."""
        return self.forward_s + self.backward_s

    @property
    def at_once_s(self) -> float:
        """Of a B or an I: the backward without what a split one leaves for later."""
        return self.backward_s - self.weight_s

    def seconds_of(self, kind: ActionKind) -> float:
        """Of one compute of this kind."""
        match kind:
            case ActionKind.F | ActionKind.R:
                return self.forward_s
            case ActionKind.W:
                return self.weight_s
            case _:
                return self.at_once_s


class CostModel:
    """Costs of one model's layers on any device. Holds no plan and no cluster; answers are remembered.

    Args:
        profiles: what was measured.
        runtime: the runtime to predict.
        arithmetic: of fp32 matrix products in estimates, "fp32" or "tf32"; by default what most profiles of a device
            have. A profile of exactly these layers always wins.
        data_sheets: price devices without any profile by their data sheets, instead of refusing them.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        seq_length: int,
        precision: Precision,
        profiles: ProfileStore,
        runtime: RuntimeModel = HETERO,
        arithmetic: Arithmetic | None = None,
        data_sheets: bool = False,
    ) -> None:
        self.model = model
        self.seq_length = seq_length
        self.precision = precision
        self.runtime = runtime
        self.shape = LayerShape.of(model)
        self.sizes = LayerSizes(model)
        self.element_bytes = BYTES_OF_PRECISION[precision]
        # Half-precision weights have gradients, master weights and moments in fp32.
        self.gradient_bytes = max(self.element_bytes, BYTES_OF_PRECISION["fp32"])
        self._profiles = profiles
        self._references = ReferenceProfiles(
            profiles, precision=precision, arithmetic=arithmetic, data_sheets=data_sheets
        )
        self._layers: dict[tuple[Part, str, int, int], LayerCost] = {}
        self._stages: dict[tuple[object, ...], StageCost] = {}

    def profile_of(self, device: str) -> Profile | None:
        """The profile of exactly this model's blocks on ``device``, if there is one."""
        return self._profiles.find(self.shape, device=device, seq_length=self.seq_length, precision=self.precision)

    def work(self, kind: Part, *, tp: int, micro_batch_size: int) -> Work:
        """Operations and bytes of one forward of a layer."""
        return layer_work(
            kind,
            self.shape,
            tp=tp,
            micro_batch_size=micro_batch_size,
            seq_length=self.seq_length,
            element_bytes=self.element_bytes,
        )

    def layer(self, kind: Part, *, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        """Seconds of one layer or half of one.

        Raises:
            ConfigError: ``device`` has no profile of any model, and data sheets are not allowed.
        """
        key = kind, device, tp, micro_batch_size
        if key not in self._layers:
            match kind:
                case "attention" | "mlp":
                    self._layers[key] = self._half(kind, device, tp, micro_batch_size)
                case _:
                    known = self._measured(kind, device, tp, micro_batch_size)
                    self._layers[key] = known or self._estimated(kind, device, tp, micro_batch_size)
        return self._layers[key]

    def stage(
        self,
        *,
        device: str,
        first_layer: float,
        end_layer: float,
        tp: int,
        micro_batch_size: int,
        recompute: Recompute = "none",
        recompute_num_layers: int | None = None,
        splits_backward: bool = False,
    ) -> StageCost:
        """Seconds of layers ``[first_layer, end_layer)``, with the embedding before layer 0 and the head at the end.

        An edge at half a layer is the cut between its attention and its MLP. A split backward computes the weights'
        gradients of its layers later; embedding and head stay whole.

        Raises:
            ConfigError: as :meth:`layer`.
        """
        has_embedding, has_head = first_layer == 0, end_layer == self.model.num_layers
        held = end_layer - first_layer, first_layer % 1, has_embedding, has_head
        key = device, held, tp, micro_batch_size, recompute, recompute_num_layers, splits_backward
        if key not in self._stages:
            modules = modules_of(first_layer, end_layer)
            kinds = list(modules)
            kinds += ["embedding"] if has_embedding else []
            kinds += ["head"] if has_head else []
            costs = [self.layer(kind, device=device, tp=tp, micro_batch_size=micro_batch_size) for kind in kinds]
            recomputed = Counter(modules[: recompute_num_layers or len(modules)] if recompute != "none" else [])
            again_s = sum(
                count * self._again_s(kind, device, tp, micro_batch_size, recompute)
                for kind, count in recomputed.items()
            )
            is_divided = recompute == "selective" or splits_backward
            weight_s = 0.0
            if splits_backward:
                weight_s = sum(
                    count * self._weight_s(kind, device, tp, micro_batch_size)
                    for kind, count in Counter(modules).items()
                )
            updates = [self.update(kind, device=device, tp=tp) for kind in kinds]
            self._stages[key] = StageCost(
                forward_s=sum(cost.forward_s for cost in costs),
                backward_s=sum(cost.backward_s for cost in costs) + again_s,
                weight_s=weight_s,
                update_s=sum(seconds for seconds, _ in updates),
                confidence=max([cost.confidence for cost in costs] + [Confidence.ESTIMATED] * is_divided),
            )
        return self._stages[key]

    def of(self, stage: Stage) -> StageCost:
        """Seconds of a plan's stage on its own device type."""
        return self.stage(
            device=stage.device,
            first_layer=stage.start,
            end_layer=stage.end,
            tp=stage.tp,
            micro_batch_size=stage.micro_batch_size,
            recompute=stage.recompute,
            recompute_num_layers=stage.recompute_num_layers,
            splits_backward=stage.wgrad_delay is not None,
        )

    def update(self, kind: Part, *, device: str, tp: int) -> tuple[float, Confidence]:
        """Seconds of the optimizer's update of one layer, or half of one, on each of its tensor-parallel ranks.

        Measured, or in proportion to the parameters as in other layers of the device, or 28 bytes per parameter over
        the data sheet's memory bandwidth.
        """
        if kind == "attention" or kind == "mlp":
            block_s, rests_on = self.update("block", device=device, tp=tp)
            part, whole = (parameters_of(each, self.shape, tp=tp) for each in (kind, "block"))
            return block_s * part / whole, max(rests_on, Confidence.ESTIMATED)
        profile = self.profile_of(device)
        measured = profile.update_of(kind, tp=tp) if profile is not None and self._prices(profile, kind) else None
        if profile is not None and measured is not None:
            return max(0.0, measured - profile.isolation_s), Confidence.MEASURED
        rate, confidence = self._references.update_s_per_parameter(device)
        return rate * parameters_of(kind, self.shape, tp=tp), confidence

    def _measured(self, kind: LayerKind, device: str, tp: int, micro_batch_size: int) -> LayerCost | None:
        profile = self.profile_of(device)
        if profile is None or not self._prices(profile, kind):
            return None
        return interpolate(
            profile.times_of(kind, tp=tp), micro_batch_size=micro_batch_size, isolation_s=profile.isolation_s
        )

    def held_parameters(self, *, device: str, first_layer: float, end_layer: float, tp: int) -> int:
        """Elements of the weights of layers ``[first_layer, end_layer)`` on one of ``tp`` ranks."""
        profile = self.profile_of(device) if self.runtime.runs_profiled_layers else None
        memory = profile.memory if profile is not None else ()
        theirs: dict[Part, int] = {m.kind: m.parameters for m in memory if m.tp == tp}
        if len(theirs) < len(LAYER_KINDS):
            return self.sizes.held(first_layer=first_layer, end_layer=end_layer, tp=tp)
        theirs |= {half: self.sizes.local(half, tp) for half in HALVES}
        parts = parts_of(first_layer, end_layer, num_layers=self.model.num_layers)
        return sum(count * theirs[part] for part, count in parts.items())

    def _prices(self, profile: Profile, kind: LayerKind) -> bool:
        """Whether ``profile``, whose blocks are this model's, also has this model's layer of ``kind``."""
        if kind == "head" and not (profile.head_has_projection or self.runtime.runs_profiled_layers):
            return False
        return kind == "block" or profile.shape.vocabulary == self.shape.vocabulary

    def _half(self, half: Half, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        block = self.layer("block", device=device, tp=tp, micro_batch_size=micro_batch_size)
        works = [self.work(kind, tp=tp, micro_batch_size=micro_batch_size) for kind in (half, "block")]
        shares: dict[ComputePass, float] = {}
        confidence = max(block.confidence, Confidence.ESTIMATED)
        for direction in DIRECTIONS:
            throughput, rests_on = self._references.throughput(device, "block", direction)
            shares[direction] = throughput.share(*works, tp=tp)
            confidence = max(confidence, rests_on)
        return LayerCost(block.forward_s * shares["forward"], block.backward_s * shares["backward"], confidence)

    def _estimated(self, kind: LayerKind, device: str, tp: int, micro_batch_size: int) -> LayerCost:
        seconds: dict[ComputePass, float] = {}
        confidence = Confidence.ESTIMATED
        for direction in DIRECTIONS:
            throughput, rests_on = self._references.throughput(device, kind, direction)
            work = self.work(kind, tp=tp, micro_batch_size=micro_batch_size)
            scale = self._agreement(kind, device, tp, micro_batch_size, direction, throughput)
            seconds[direction] = scale * throughput.seconds(work, tp=tp)
            confidence = max(confidence, rests_on)
        return LayerCost(seconds["forward"], seconds["backward"], confidence)

    def _agreement(
        self,
        kind: LayerKind,
        device: str,
        tp: int,
        micro_batch_size: int,
        direction: ComputePass,
        throughput: Throughput,
    ) -> float:
        """Measured over estimated seconds at the nearest tp at which this very layer was measured; 1 if none was."""
        profile = self.profile_of(device)
        if profile is None:
            return 1.0
        for measured_tp in sorted(profile.tps(kind), key=lambda other: abs(other - tp)):
            cost = self._measured(kind, device, measured_tp, micro_batch_size)
            work = self.work(kind, tp=measured_tp, micro_batch_size=micro_batch_size)
            estimated_s = throughput.seconds(work, tp=measured_tp)
            if cost is not None and estimated_s > 0:
                return (cost.forward_s if direction == "forward" else cost.backward_s) / estimated_s
        return 1.0

    def _again_s(self, kind: Part, device: str, tp: int, micro_batch_size: int, recompute: Recompute) -> float:
        """Seconds that the backward of a block, or of half of one, spends on its forward a second time."""
        if recompute == "full":
            return self.layer(kind, device=device, tp=tp, micro_batch_size=micro_batch_size).forward_s
        if kind == "mlp":
            return 0.0
        forward_s = self.layer("block", device=device, tp=tp, micro_batch_size=micro_batch_size).forward_s
        throughput, _ = self._references.throughput(device, "block", "forward")
        work = self.work("block", tp=tp, micro_batch_size=micro_batch_size)
        return forward_s * min(1.0, throughput.core_attention_s(work) / throughput.seconds(work, tp=tp))

    def _weight_s(self, kind: Part, device: str, tp: int, micro_batch_size: int) -> float:
        """Seconds of the weights' gradients in the backward of a block, or of half of one: the share of their products,

            w = b  a (operations - attention operations) / 2  /  t

        with b the backward's seconds of the whole block, measured or not, and a and t of :mod:`.throughput_fit`
        for backwards; the operations are those of ``kind``.
        """
        backward_s = self.layer("block", device=device, tp=tp, micro_batch_size=micro_batch_size).backward_s
        throughput, _ = self._references.throughput(device, "block", "backward")
        work, block = (self.work(each, tp=tp, micro_batch_size=micro_batch_size) for each in (kind, "block"))
        return backward_s * throughput.weight_gradients_s(work) / throughput.seconds(block, tp=tp)


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
