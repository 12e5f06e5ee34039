"""Sets megatron-core's module globals and reaches its private names, for all others.

Its layers take their groups from a ``ProcessGroupCollection``, except for the few getters listed at
:func:`install_parallel_state`. Lines that are cited are those of 0.16.1.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from hetero.distributed.process_groups import StageContext
from hetero.plan.ir import Placement, Replica
from hetero.runtime.version_differences import bind_missing_gemm, clear_moe_losses
from hetero.spec.model import RotaryScaling

_APEX_EXTENSION = getattr(layers, "fused_weight_gradient_mlp_cuda", None)
"""apex's extension, which megatron-core's linear layers have imported; ``None`` where it is not installed."""


_Linear: Any = layers.LinearWithGradAccumulationAndAsyncCommunication
"""megatron-core's own autograd function of linear layers, whose place :class:`_AddingLinear` takes."""


class PipelinePosition:
    """Stands for a pipeline group: megatron-core's modules ask it for nothing but its rank and size."""

    def __init__(self, *, stage: int, num_stages: int) -> None:
        self._stage = stage
        self._num_stages = num_stages

    def rank(self) -> int:
        return self._stage

    def size(self) -> int:
        return self._num_stages


class StageLayout(PipelineParallelLayerLayout):  # type: ignore[misc]  # megatron-core has no types
    """The layer layout of one replica, bound to one of its stages.

    The stock class asks ``parallel_state`` for the pipeline rank, and transformer_block.py:91 and
    transformer_layer.py:51 never pass it. Nor does it know half layers: there a layer is counted where its attention
    is, while each of two stages that share it builds a layer of that number.
    """

    def __init__(self, replica: Replica, stage: int) -> None:
        rows = [["decoder"] * (len(s.layer_numbers) - s.starts_with_mlp) for s in replica.stages]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, len(rows))
        self._layer_numbers = replica.stages[stage].layer_numbers

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        assert layer_type == LayerType.decoder, layer_type
        return len(self._layer_numbers)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        assert layer_type == LayerType.decoder, layer_type
        return self._layer_numbers.start


def process_group_collection(work: StageContext, *, num_stages: int) -> ProcessGroupCollection:
    """The groups that megatron-core's modules see: real tensor parallelism, everything else this rank alone.

    Pipeline and data parallelism are this project's own; context and expert parallelism are one.
    """
    tp, alone = work.tp, work.alone
    collection = ProcessGroupCollection(
        tp=tp,
        mp=tp,
        tp_cp=tp,
        expt_tp=tp,
        tp_ep=tp,
        tp_ep_pp=tp,
        tp_dp_cp=tp,
        cp=alone,
        ep=alone,
        dp=alone,
        dp_cp=alone,
        expt_dp=alone,
        intra_dp_cp=alone,
        intra_expt_dp=alone,
        embd=None,
        pos_embd=None,
        hcp=None,
        inter_dist_opt=None,
        intra_dist_opt=None,
    )
    collection.pp = PipelinePosition(stage=work.placement.stage, num_stages=num_stages)
    return collection


def install_parallel_state(collection: ProcessGroupCollection) -> None:
    """Point the ``parallel_state`` globals of this process at its own groups.

    Still asked for although a collection was given: the memory buffer (dot_product_attention.py:189,
    layers.py:482,519, mappings.py:139,179), the tensor-parallel group, rank and size (cross_entropy.py:131-157),
    and whether model parallelism is initialised at all (utils.py:496). All stages of a rank have the same groups. The
    data-parallel group stays unset: no single group is right, so whoever asks fails instead of getting a wrong answer.
    Nor is any position in the pipeline right for a rank of several stages; modules ask their collection for theirs.
    """
    values = {
        "_TENSOR_MODEL_PARALLEL_GROUP": collection.tp,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": dist.get_process_group_ranks(collection.tp),
        "_MODEL_PARALLEL_GROUP": collection.mp,
        "_CONTEXT_PARALLEL_GROUP": collection.cp,
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": collection.tp_cp,
        "_EXPERT_MODEL_PARALLEL_GROUP": collection.ep,
        "_EXPERT_TENSOR_PARALLEL_GROUP": collection.expt_tp,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": collection.tp_ep,
    }
    for name, value in values.items():
        assert hasattr(parallel_state, name), f"megatron-core renamed parallel_state.{name}"
        setattr(parallel_state, name, value)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    bind_missing_gemm(moe_utils)


def forget_groups() -> None:
    """Let go of what :func:`install_parallel_state` has put into globals, which outlive the groups otherwise."""
    parallel_state.destroy_model_parallel()


def reduce_amax_over_tensor_parallel_ranks() -> None:
    """Let fp8 agree on its scales among the tensor-parallel ranks, whose products go together, and nobody else.

    fp8_utils.py:622 asks for the group only if model parallelism is initialised, for which the data-parallel group
    would have to be set. Otherwise TransformerEngine takes the world, in which ranks without fp8 would be missing.
    """
    parallel_state.model_parallel_is_initialized = lambda: True


def seed_dropout(seed: int, *, work: StageContext) -> None:
    """Seed the generators of dropout: other values in every replica, stage, data- and tensor-parallel rank.

    The seeds of two places differ as long as their stages are below 100 and their replicas too (:func:`_stage_seed`).
    Beyond that, places draw the same values that lie so far apart; they train as well, with correlated dropout.

    Args:
        work: the first stage of a rank, whose generators go on through all its stages.
    """
    place = work.placement
    model_parallel_cuda_manual_seed(
        _stage_seed(seed, place), tp_rank=place.tp_rank, ep_rank=0, etp_rank=place.tp_rank, force_reset_rng=True
    )


def _stage_seed(seed: int, place: Placement) -> int:
    """A heuristic as Megatron-LM's own, 100 from one pipeline stage to the next: megatron-core adds ``tp_rank`` to it.

    One seed per place while ``tp_rank``, ``stage`` and ``replica`` are below 100.
    """
    return seed + 100 * place.stage + 10_000 * place.replica + 1_000_000 * place.dp_rank


def dropout_state() -> dict[str, torch.Tensor]:
    """The generators that dropout draws from, by name: torch's own and those of megatron-core's tracker."""
    states = {f"tracker/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
    states["cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.clone() for name, state in states.items()}


def restore_dropout_state(states: Mapping[str, torch.Tensor]) -> None:
    """Let dropout go on where :func:`dropout_state` was called."""
    tracked = {name.removeprefix("tracker/"): state for name, state in states.items() if name.startswith("tracker/")}
    get_cuda_rng_tracker().set_states(tracked)
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def scale_auxiliary_losses(scale: float, *, device: torch.device) -> None:
    """Set what backwards multiply auxiliary losses by, in float64; autograd converts it to the type of the loss.

    megatron-core's own setter would round it to float32 after a first backward without a scale (moe_utils.py:268,286).
    """
    # A tensor of a Python number would be copied to the device, and the host would wait for that.
    value = torch.full((), scale, dtype=torch.float64, device=device)
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = value


def clear_auxiliary_losses() -> None:
    """Forget what megatron-core has added up of auxiliary losses for a log."""
    clear_moe_losses(moe_utils)


class CompiledForAnyRows:
    """A compiled function that torch compiles once, whatever the number of rows of its arguments.

    Left to itself, torch's compiler makes graphs of their own for 0 rows, for 1 row, for the first other number and for
    all others, each at its first call. It makes one for a dimension whose size it may not ask for.

    Arguments are detached: of a view the compiler also asks for the size of its base, and a tensor that autograd
    follows gets another graph than one that it does not. A second graph is made where the first view does not begin at
    the start of its memory and a later one does (findings/torch_compile_asks_where_a_view_begins.sh). Every warm-up has
    both, as the first expert's view always begins there.

    Args:
        function: called without autograd, on tensors with one number of rows.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        # The compiler takes 0.2 s to import, and most ranks compile no experts.
        from torch._dynamo.decorators import mark_unbacked  # noqa: PLC0415

        self._function = function
        self._hide_size = mark_unbacked

    def __call__(self, *tensors: torch.Tensor) -> Any:
        arguments = [tensor.detach() for tensor in tensors]
        for argument in arguments:
            self._hide_size(argument, 0)
        return self._function(*arguments)


def compile_experts_once() -> None:
    """Let experts' fused activation be compiled once for all numbers of tokens. Safe to call again.

    SwiGLU is the only one that is fused for experts (mlp.py:186-206; a model's experts have no biases).
    """
    for name in ("weighted_swiglu", "weighted_swiglu_back"):
        function = getattr(fused_bias_swiglu, name)
        if not isinstance(function, CompiledForAnyRows):
            setattr(fused_bias_swiglu, name, CompiledForAnyRows(function))


def keep_float64_logits() -> None:
    """Let the loss keep float64 logits: cross_entropy.py:28 rounds them to float32.

    For runs in fp64 only, which exist to tell a logic error from rounding.
    """

    def logits_max(vocab_parallel_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        is_float64 = vocab_parallel_logits.dtype == torch.float64
        logits = vocab_parallel_logits if is_float64 else vocab_parallel_logits.float()
        return logits, logits.max(dim=-1)[0]

    VocabParallelCrossEntropy.calculate_logits_max = staticmethod(logits_max)


def keep_float64_router_scores() -> None:
    """Let auxiliary losses keep float64 scores: moe_utils.py:781 computes them in float32, whatever the router's dtype.

    Their gradients are then rounded to float32, at another place for each size of microbatch. For runs in fp64 only.
    """

    def scores_for_aux_loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, *args, **kwargs)
        return routing_map, torch.softmax(logits, dim=-1) if logits.dtype == torch.float64 else scores

    router.compute_routing_scores_for_aux_loss = scores_for_aux_loss


def apex_weight_gradient() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] | None:
    """Return apex's kernel that adds the gradient of a weight to a float32 sum on CUDA, ``None`` where it is missing.

    Called with the layer's input [N, I], the gradient of its output [N, O] and the sum [O, I], all contiguous.
    """
    return getattr(_APEX_EXTENSION, "wgrad_gemm_accum_fp32", None)


def add_weight_gradients_by(add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]) -> None:
    """Let ``add`` take the place of apex's kernel in linear layers that add to ``main_grad`` themselves.

    Called as :func:`apex_weight_gradient` (layers.py:569). Without the flag the layers cannot be built (layers.py:924).
    """

    def add_to(rows: torch.Tensor, output_gradient: torch.Tensor, summed: "torch.Tensor | _Float64Sum") -> None:
        add(rows, output_gradient, summed.tensor if isinstance(summed, _Float64Sum) else summed)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add_to)
    layers._grad_accum_fusion_available = True
    layers.get_dummy_wgrad = _ignored_gradient
    layers.LinearWithGradAccumulationAndAsyncCommunication = _AddingLinear


def _ignored_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return what a layer leaves to autograd once it has added its gradient.

    TransformerEngine's function for that, which layers.py:590,602 prefer, keeps one tensor of each shape for good: of a
    head with 128,256 x 4,096 elements 1 GiB.
    """
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=torch.cuda.current_device())


def look_up_embeddings_by(look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Let ``look_up`` take the place of ``F.embedding`` in vocabulary-parallel embeddings (layers.py:287).

    Called with tokens [B, S] and the weight [V, H]; returns rows [B, S, H].
    """
    layers.F = SimpleNamespace(embedding=look_up)


class _Float64Sum(NamedTuple):
    """Float64 ``main_grad`` as megatron-core's backward may see it, which refuses to add to float64 (layers.py:568)."""

    tensor: torch.Tensor
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape


class _AddingLinear(_Linear):  # type: ignore[misc]  # megatron-core has no types
    """Linear layer's autograd function that adds to a ``main_grad`` in fp64 too, and needs none."""

    @staticmethod
    def backward(ctx: Any, output_gradient: torch.Tensor) -> Any:
        summed = ctx.main_grad
        if summed is None:
            # layers.py:564 assigns it to the weight otherwise, and reads its dtype.
            ctx.gradient_accumulation_fusion = False
        if summed is None or summed.dtype != torch.float64:
            return _Linear.backward(ctx, output_gradient)
        ctx.main_grad = _Float64Sum(summed)
        try:
            return _Linear.backward(ctx, output_gradient)
        finally:
            # The backward has assigned what it saw.
            ctx.main_grad = ctx.saved_tensors[1].main_grad = summed


def stretch_wavelengths(rotary: RotaryEmbedding, scaling: RotaryScaling) -> None:
    """Stretch rotary wavelengths as Llama 3.1 does, before the first forward.

    ``GPTModel`` hands on the factor alone and fixes the other three numbers.
    The frequencies are no buffer of the module: they stay in float32, and in no checkpoint.
    """
    rotary.inv_freq = rotary._apply_scaling(
        rotary.inv_freq,
        factor=scaling.factor,
        low_freq_factor=scaling.low_freq_factor,
        high_freq_factor=scaling.high_freq_factor,
        original_max_position_embeddings=scaling.original_max_position_embeddings,
    )
