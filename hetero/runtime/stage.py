"""Builds pipeline stages: megatron-core's ``GPTModel`` with exactly the layers that the plan gives it.

Tensor shapes: S sequence rows on this rank, B samples of a microbatch, H hidden size, V vocabulary rows on this rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from hetero.distributed.process_groups import ParallelContext, StageContext
from hetero.plan.ir import Stage
from hetero.runtime import cpu_backend, mcore
from hetero.runtime.delayed_wgrad import DelayedWeightGradients, delay_weight_gradients
from hetero.runtime.dtypes import DTYPES
from hetero.runtime.initial_weights import draw_weights
from hetero.runtime.layer_choice import LayerChoice, choose_layers
from hetero.runtime.layer_spec import activation_function, stage_spec
from hetero.runtime.main_grad import (
    add_weight_gradient,
    can_fuse_accumulation,
    let_embedding_accumulate,
    let_transformer_engine_accumulate,
    look_up_rows,
)
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.named_parameters import canonical_parameters
from hetero.runtime.options import StageOptions
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import Parameter


class MaskedVocabularyGPT(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """A GPTModel whose padding rows of the vocabulary take no part in the softmax."""

    num_padding_logits = 0
    """How many of the last logits of this rank are padding."""

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """labels: [B, S of the whole sequence]; logits: [S of the whole sequence, B, V] -> loss per token [B, S]."""
        if self.num_padding_logits:
            # Autograd, if it knew, would copy the whole gradient to put zeros here. The softmax yields them already.
            with torch.no_grad():
                logits[..., -self.num_padding_logits :] = torch.finfo(logits.dtype).min
        losses: torch.Tensor = super().compute_language_model_loss(labels, logits)
        return losses


@dataclass(frozen=True, slots=True)
class StageModel:
    """The module of one rank and its parameters by canonical name.

    choice: whose layers they are, and by which kernels they compute.
    delayed: the weights' gradients that a split backward has left for later; ``None`` where backwards are whole.
    """

    module: MaskedVocabularyGPT
    parameters: dict[str, tuple[Parameter, torch.nn.Parameter]]
    dtype: torch.dtype
    choice: LayerChoice
    delayed: DelayedWeightGradients | None

    def forward(self, input_SBH: torch.Tensor | None, batch: Microbatch | None) -> torch.Tensor:
        """Activations [S, B, H] for the next stage, or on the last stage the loss of every token [B, S].

        ``input_SBH`` is ``None`` on the first stage, ``batch`` on stages that are neither first nor last.
        """
        if input_SBH is not None:
            self.module.set_input_tensor(input_SBH)
        is_last = self.module.post_process
        output: torch.Tensor = self.module(
            batch.tokens_BS if batch is not None else None,
            batch.position_ids_BS if batch is not None else None,
            None,
            labels=batch.labels_BS if batch is not None and is_last else None,
        )
        return output


def build_stages(context: ParallelContext, *, options: StageOptions, seed: int) -> list[StageModel]:
    """Build this rank's parts of the model with their initial weights; megatron-core's globals become its groups.

    One for each of the stages that the rank holds, in their order. Its generators of dropout serve them all, and are
    the same whether weights are drawn or not.

    Raises:
        ConfigError: TransformerEngine, fp8 or a fused loss is asked for and cannot be used.
    """
    cpu_backend.install()
    mcore.add_weight_gradients_by(add_weight_gradient)
    mcore.look_up_embeddings_by(look_up_rows)
    if context.plan.precision == "fp64":
        mcore.keep_float64_logits()
        mcore.keep_float64_router_scores()
    models = [_build_stage(context, work, options=options, seed=seed) for work in context.stages]
    if context.work is not None:
        mcore.seed_dropout(seed, work=context.work)
    return models


def _build_stage(context: ParallelContext, work: StageContext, *, options: StageOptions, seed: int) -> StageModel:
    plan, model, stage = context.plan, context.plan.model, work.stage
    num_stages = len(plan.replicas[work.placement.replica].stages)
    collection = mcore.process_group_collection(work, num_stages=num_stages)
    mcore.install_parallel_state(collection)
    scaling = model.rotary_scaling
    choice = choose_layers(plan, stage, options, device=context.device)
    if choice.fp8 is not None:
        mcore.reduce_amax_over_tensor_parallel_ranks()
    if choice.bias_activation and model.num_experts is not None:
        mcore.compile_experts_once()
    with _NothingDrawn():
        module = MaskedVocabularyGPT(
            config=_transformer_config(context, work, options, choice),
            transformer_layer_spec=stage_spec(model, stage, choice),
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=work.is_first,
            post_process=work.is_last,
            share_embeddings_and_output_weights=model.tied_embeddings,
            position_embedding_type=model.position_embedding,
            rotary_percent=model.rotary_percent,
            rotary_base=model.rotary_base,
            seq_len_interpolation_factor=scaling.factor if scaling is not None and scaling.kind == "linear" else None,
            pg_collection=collection,
        )
    if scaling is not None and scaling.kind == "llama3":
        mcore.stretch_wavelengths(module.rotary_pos_emb, scaling)
    dtype = DTYPES[plan.precision]
    if choice.transformer_engine is not None and _adds_by_itself(stage, choice):
        let_transformer_engine_accumulate(module)
    if work.is_first and options.gradient_accumulation_fusion and _sums_on_device(stage):
        let_embedding_accumulate(
            module.embedding.word_embeddings.weight, head_accumulates=module.config.gradient_accumulation_fusion
        )
    # Stock norms and position embeddings ignore params_dtype.
    module.to(dtype=dtype)
    if _begins_on_host(stage):
        _move_buffers(module, context.device)
    else:
        module.to(device=context.device)
    module.num_padding_logits = _padding_logits(model, tp=stage.tp, tp_rank=work.placement.tp_rank)

    parameters = canonical_parameters(module, model=model, stage=stage)
    if options.init_method_std is not None:
        draw_weights(
            parameters,
            model=model,
            tp=stage.tp,
            tp_rank=work.placement.tp_rank,
            seed=seed,
            std=options.init_method_std,
        )
    delayed = None
    if stage.wgrad_delay is not None:
        delayed = delay_weight_gradients(module, fp8=choice.fp8 is not None)
    return StageModel(module, parameters, dtype, choice, delayed)


class _NothingDrawn(TorchFunctionMode):
    """Keeps torch's own modules from drawing weights, as ``perform_initialization=False`` keeps megatron-core's."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.nn.init.normal_:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def _begins_on_host(stage: Stage) -> bool:
    """Whether weights are made on the host, from where each goes to its place in the buckets by itself.

    On the device they would be there twice while they move, which a stage has room for in that of its gradients, and
    one that leaves these to its host has not; and weights that live on the host would be there once.
    """
    return stage.offload.gradients_from is not None


def _move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    for each in module.modules():
        for name, buffer in list(each.named_buffers(recurse=False)):
            setattr(each, name, buffer.to(device))


def _adds_by_itself(stage: Stage, choice: LayerChoice) -> bool:
    """Return whether the product that is a weight's gradient may add it to ``main_grad``.

    It marks the weight, which a backward does not see itself where saved tensors go through hooks.
    """
    return choice.gradient_accumulation and stage.offload.activations_until is None and _sums_on_device(stage)


def _sums_on_device(stage: Stage) -> bool:
    """Return whether there is a ``main_grad`` on the device: gradients may add up on the host instead."""
    return stage.offload.gradients_from is None


def _padding_logits(model: ModelSpec, *, tp: int, tp_rank: int) -> int:
    rows = model.padded_vocab_size // tp
    real = model.vocab_size - tp_rank * rows
    return rows - min(max(real, 0), rows)


def _transformer_config(
    context: ParallelContext, work: StageContext, options: StageOptions, choice: LayerChoice
) -> TransformerConfig:
    plan, model, stage = context.plan, context.plan.model, work.stage
    replica = plan.replicas[work.placement.replica]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.is_gated,
        activation_func=activation_function(model, fused=choice.bias_activation),
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_layernorm,
        attention_dropout=options.attention_dropout,
        hidden_dropout=options.hidden_dropout,
        init_method=_leave,
        output_layer_init_method=_leave,
        perform_initialization=False,
        use_cpu_initialization=_begins_on_host(stage),
        params_dtype=DTYPES[plan.precision],
        pipeline_dtype=DTYPES[plan.precision],
        bf16=plan.precision == "bf16",
        fp16=plan.precision == "fp16",
        tensor_model_parallel_size=stage.tp,
        pipeline_model_parallel_size=len(replica.stages),
        pipeline_model_parallel_layout=mcore.StageLayout(replica, work.placement.stage),
        sequence_parallel=stage.splits_sequence,
        # The head's, too, which is never TransformerEngine's.
        gradient_accumulation_fusion=_adds_by_itself(stage, choice)
        and can_fuse_accumulation(plan.precision, context.device),
        attention_backend=AttnBackend[options.attention_backend],
        masked_softmax_fusion=options.masked_softmax_fusion,
        bias_activation_fusion=choice.bias_activation,
        bias_dropout_fusion=choice.bias_dropout,
        persist_layer_norm=options.persist_layer_norm,
        apply_rope_fusion=choice.rope,
        cross_entropy_loss_fusion=choice.cross_entropy,
        # With the cache megatron-core hands on ``is_first_microbatch``, and TransformerEngine (2.11, linear.py:833-838)
        # has the backward of the first microbatch overwrite ``main_grad``, whatever others have added to it before; and
        # fp8 copies of weights outlive an update unless somebody marks the microbatch behind it as the first.
        disable_parameter_transpose_cache=True,
        **_recompute_settings(work),
        **_fp8_settings(choice, options),
        **_moe_settings(context, options),
    )


def _recompute_settings(work: StageContext) -> dict[str, object]:
    stage = work.stage
    match stage.recompute:
        case "none":
            return {}
        case "selective":
            return {"recompute_granularity": "selective"}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": stage.recompute_num_layers or len(stage.layer_numbers),
            }


def _fp8_settings(choice: LayerChoice, options: StageOptions) -> dict[str, object]:
    """Products in fp8; weights and gradients stay what they are without it."""
    if choice.fp8 is None:
        return {}
    fp8_format, recipe = choice.fp8
    return {
        "fp8": fp8_format,
        "fp8_recipe": recipe,
        "fp8_param": False,
        "fp8_amax_history_len": options.fp8_amax_history_len,
        "fp8_amax_compute_algo": options.fp8_amax_compute_algo,
        "tp_only_amax_red": True,
    }


def _moe_settings(context: ParallelContext, options: StageOptions) -> dict[str, object]:
    model = context.plan.model
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.moe_router_topk,
        # A softmax over the one expert that was chosen would be 1, and the router would learn nothing.
        "moe_router_pre_softmax": model.moe_router_topk == 1,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_router_load_balancing_type": options.moe_router_load_balancing,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        # The all-to-all dispatcher needs CUDA streams; with one expert-parallel rank neither sends anything.
        "moe_token_dispatcher_type": "allgather",
        "moe_router_dtype": "fp64" if context.plan.precision == "fp64" else None,
    }


def _leave(_: torch.Tensor) -> None:
    """Init method for megatron-core: weights are drawn by name after the module is built."""
