"""The cost model: seconds and bytes of a model's layers and stages on any device.

Seconds come from :mod:`.layer_times`, bytes from :mod:`.activation_memory` and :mod:`.parameter_counts`; a stage is the
sum of its layers.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from hetero.cost.layers.activation_memory import FP8_COPIES, MicrobatchShape, megatron_core_saved_bytes
from hetero.cost.layers.confidence import Confidence, LayerBasis
from hetero.cost.layers.layer_times import LayerCost, LayerPlacement, LayerTimes
from hetero.cost.layers.parameter_counts import ParameterCounts
from hetero.cost.layers.reference_profiles import ReferenceProfiles
from hetero.cost.layers.stage_modules import module_counts, modules_of
from hetero.cost.layers.work import Work
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.plan.device_rules import TRANSFORMER_ENGINE_PRECISIONS
from hetero.plan.ir import Precision, Recompute, Stage
from hetero.schedule.actions import ActionKind
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import HALVES, LAYER_KINDS, Arithmetic, LayerShape, ModuleKind, Profile, ProfileStore
from hetero.units import BYTES_OF_PRECISION


class StageConfig(NamedTuple):
    """What decides the seconds and the bytes of a stage on its own devices: layers, degrees, microbatch, recomputation,
    fp8.

    Layers are ``[first_layer, end_layer)``, with the embedding before layer 0 and the head at the end. An edge at half
    a layer is the cut between its attention and its MLP.
    """

    device: str
    first_layer: float
    end_layer: float
    tp: int
    micro_batch_size: int
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    recompute_num_layers: int | None = None
    splits_backward: bool = False
    fp8: bool = False

    @classmethod
    def of(cls, stage: Stage) -> "StageConfig":
        """Of a plan's stage, on its own device type."""
        return cls(
            stage.device,
            stage.start,
            stage.end,
            stage.tp,
            stage.micro_batch_size,
            stage.splits_sequence,
            stage.recompute,
            stage.recompute_num_layers,
            stage.wgrad_delay is not None,
            stage.fp8,
        )


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
    def undelayed_backward_s(self) -> float:
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
                return self.undelayed_backward_s


class CostModel:
    """Costs of one model's layers on any device. Holds no plan and no cluster; answers are remembered.

    Args:
        profiles: what was measured, and the links that carry the collectives of tensor parallelism.
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
        self.device_types = profiles.device_types
        self.shape = LayerShape.of(model)
        self.parameter_counts = ParameterCounts(model)
        self.element_bytes = BYTES_OF_PRECISION[precision]
        # Half-precision weights have master weights and moments in fp32, and in most runtimes gradients.
        self.state_bytes = max(self.element_bytes, BYTES_OF_PRECISION["fp32"])
        self.gradient_bytes = self.element_bytes if runtime.half_gradients else self.state_bytes
        self._arithmetic = arithmetic
        self._data_sheets = data_sheets
        self._references = ReferenceProfiles(
            profiles, precision=precision, arithmetic=arithmetic, data_sheets=data_sheets
        )
        self._times = LayerTimes(
            self.shape,
            seq_length=seq_length,
            precision=precision,
            references=self._references,
            implementation=runtime.implementation,
        )
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self._slower: Mapping[LayerBasis, float] = {}

    def on(self, cluster: ClusterSpec) -> "CostModel":
        """The same costs if tensor parallelism had the links of ``cluster``; as they are if they know of no cluster."""
        return CostModel(
            model=self.model,
            seq_length=self.seq_length,
            precision=self.precision,
            profiles=self._references.profiles.on_links(cluster.all_reduce_of_devices),
            runtime=self.runtime,
            arithmetic=self._arithmetic,
            data_sheets=self._data_sheets,
        )

    def slower(self, by: Mapping[LayerBasis, float]) -> "CostModel":
        """The same costs if layers that rest on such things took so many times their seconds."""
        other = copy.copy(self)
        other._slower, other._stages = by, {}
        return other

    def profile_of(self, device: str) -> Profile | None:
        """The profile of exactly this model's blocks on ``device``, if there is one."""
        return self._times.profile_of(device)

    def arithmetic_of(self, device: str) -> Arithmetic:
        """The number format of matrix products that seconds on ``device`` assume: in fp32 it may be TF32.

        Raises:
            ConfigError: as :meth:`layer`.
        """
        profile = self.profile_of(device)
        return self._references.arithmetic_of(device) if profile is None else profile.arithmetic

    def work(self, kind: ModuleKind, *, tp: int, micro_batch_size: int) -> Work:
        """Operations and bytes of one forward of a layer."""
        return self._times.work(kind, tp=tp, micro_batch_size=micro_batch_size)

    def layer(
        self,
        kind: ModuleKind,
        *,
        device: str,
        tp: int,
        micro_batch_size: int,
        sequence_parallel: bool = False,
        fp8: bool = False,
    ) -> LayerCost:
        """Seconds of one layer or half of one, with ``fp8`` as a stage in fp8 has it.

        Raises:
            ConfigError: ``device`` has no profile of any model, and data sheets are not allowed, or with ``fp8`` it has
                no data sheet.
        """
        cost = self._times.of(kind, LayerPlacement(device, tp, micro_batch_size, sequence_parallel, fp8))
        if not self._slower:
            return cost
        times = self._slower.get(LayerBasis(device, cost.confidence), 1.0)
        return dataclasses.replace(cost, forward_s=times * cost.forward_s, backward_s=times * cost.backward_s)

    def update(self, kind: ModuleKind, *, device: str, tp: int) -> tuple[float, Confidence]:
        """Seconds of the optimizer's update of one layer, or half of one, on each of its tensor-parallel ranks."""
        return self._times.update(kind, device=device, tp=tp)

    def stage(self, config: StageConfig) -> StageCost:
        """Seconds of a stage. A split backward leaves the weights' gradients of its layers for later; those of the
        embedding and the head stay in the backward.

        Raises:
            ConfigError: as :meth:`layer`.
        """
        device, first_layer, end_layer, tp, micro_batch_size = config[:5]
        sequence_parallel, recompute, recompute_num_layers, splits, fp8 = config[5:]
        has_embedding, has_head = first_layer == 0, end_layer == self.model.num_layers
        layers = end_layer - first_layer, first_layer % 1, has_embedding, has_head
        key = device, layers, *config[3:]
        if key not in self._stages:
            modules = modules_of(first_layer, end_layer)
            kinds = list(modules)
            kinds += ["embedding"] if has_embedding else []
            kinds += ["head"] if has_head else []
            on = LayerPlacement(device, tp, micro_batch_size, sequence_parallel, fp8)
            again_s = partial(self._times.recompute_s, on=on, recompute=recompute)
            weights_s = partial(self._times.weight_gradients_s, on=on)
            costs = [self._times.of(kind, on) for kind in kinds]
            recomputed = modules[: recompute_num_layers or len(modules)] if recompute != "none" else []
            recompute_s = sum(count * again_s(kind) for kind, count in Counter(recomputed).items())
            weight_s = sum(count * weights_s(kind) for kind, count in Counter(modules).items()) if splits else 0.0
            divides_layers = recompute == "selective" or splits
            times = self._times_slower(device, costs)
            self._stages[key] = StageCost(
                forward_s=times * sum(cost.forward_s for cost in costs),
                backward_s=times * (sum(cost.backward_s for cost in costs) + recompute_s),
                weight_s=times * weight_s,
                update_s=sum(self.update(kind, device=device, tp=tp)[0] for kind in kinds),
                confidence=max([cost.confidence for cost in costs] + [Confidence.ESTIMATED] * divides_layers),
            )
        return self._stages[key]

    def _times_slower(self, device: str, costs: Sequence[LayerCost]) -> float:
        """How many times the seconds of all ``costs`` together they take by :meth:`slower`."""
        total_s = sum(cost.forward_s + cost.backward_s for cost in costs)
        if not self._slower or total_s == 0:
            return 1.0
        slower_s = sum(
            self._slower.get(LayerBasis(device, cost.confidence), 1.0) * (cost.forward_s + cost.backward_s)
            for cost in costs
        )
        return slower_s / total_s

    def of(self, stage: Stage) -> StageCost:
        """Seconds of a plan's stage on its own device type."""
        return self.stage(StageConfig.of(stage))

    def layers(self, stage: Stage) -> Mapping[ModuleKind, tuple[int, LayerCost]]:
        """How many modules of each kind a plan's stage has, with the cost of one of them."""
        counts = module_counts(stage.start, stage.end, num_layers=self.model.num_layers)
        layer = partial(
            self.layer,
            device=stage.device,
            tp=stage.tp,
            micro_batch_size=stage.micro_batch_size,
            sequence_parallel=stage.splits_sequence,
            fp8=stage.fp8,
        )
        return {kind: (count, layer(kind)) for kind, count in counts.items()}

    def microbatch(
        self, *, tp: int, micro_batch_size: int, sequence_parallel: bool = False, fp8: bool = False
    ) -> MicrobatchShape:
        """What a tensor-parallel rank works on at a time."""
        return MicrobatchShape(
            micro_batch_size=micro_batch_size,
            seq_length=self.seq_length,
            element_bytes=self.element_bytes,
            tp=tp,
            sequence_ways=tp if sequence_parallel else 1,
            fp8=fp8,
            dropout=self.runtime.drops,
        )

    def may_have_transformer_engine(self, device: str) -> bool:
        """Layers on ``device`` are TransformerEngine's where that is installed: it has the precision and the device."""
        return self.precision in TRANSFORMER_ENGINE_PRECISIONS and self.device_types.of(device).has_transformer_engine

    def keeps_scores(self, device: str) -> bool:
        """Return whether attention on ``device`` keeps its scores for the backward."""
        return self.runtime.runs_profiled_layers or self._times.implementation_on(device).writes_scores

    def saved_bytes(
        self, kind: ModuleKind, microbatch: MicrobatchShape, *, device: str, recompute: Recompute = "none"
    ) -> int:
        """Bytes that one layer, or half of one, saves of one microbatch from forward to backward on one device."""
        profile = self.profile_of(device) if self.runtime.runs_profiled_layers else None
        if profile is not None and recompute == "none" and microbatch.sequence_ways == 1:
            # Halves were not measured alone.
            measured = profile.memory_of(kind, tp=microbatch.tp) if kind != "attention" and kind != "mlp" else None
            if measured is not None:
                return measured.saved_bytes * microbatch.micro_batch_size
        saved = megatron_core_saved_bytes(
            kind, self.shape, microbatch, recompute=recompute, flash_attention=not self.keeps_scores(device)
        )
        if microbatch.fp8 and recompute != "full" and kind not in ("embedding", "head"):
            saved += FP8_COPIES * (self.parameter_counts.sharded(kind) // microbatch.tp)
        return saved

    def parameters_per_rank(self, *, device: str, first_layer: float, end_layer: float, tp: int) -> int:
        """Elements of the weights of layers ``[first_layer, end_layer)`` on one of ``tp`` ranks."""
        profile = self.profile_of(device) if self.runtime.runs_profiled_layers else None
        memory = profile.memory if profile is not None else ()
        profiled: dict[ModuleKind, int] = {m.kind: m.parameters for m in memory if m.tp == tp}
        if len(profiled) < len(LAYER_KINDS):
            return self.parameter_counts.of_layers(first_layer=first_layer, end_layer=end_layer, tp=tp)
        profiled |= {half: self.parameter_counts.per_rank(half, tp) for half in HALVES}
        counts = module_counts(first_layer, end_layer, num_layers=self.model.num_layers)
        return sum(count * profiled[kind] for kind, count in counts.items())
