"""Chooses the modules of megatron-core that a stage's layers are made of on this device."""

import copy
import dataclasses
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from hetero.plan.ir import Stage
from hetero.runtime.attention import ScaledDotProductAttention
from hetero.runtime.delayed_wgrad import SplitColumnParallelLinear, SplitRowParallelLinear
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.version_differences import submodules_of
from hetero.spec.model import ModelSpec


class Norm(torch.nn.Module):
    """Makes torch's LayerNorm or RMSNorm, for the local spec.

    The stock ``WrappedTorchNorm`` refuses sequence parallelism (torch_norm.py:32), whose only effect on a norm is
    that its gradient is partial; :mod:`.gradient_groups` accounts for that by the parameter's name.
    """

    def __new__(  # type: ignore[misc]  # a spec names a class, which makes one of torch's
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> torch.nn.Module:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        return kind(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())


def stage_spec(model: ModelSpec, stage: Stage, choice: LayerChoice) -> TransformerBlockSubmodules:
    """The modules of the layers of ``stage`` and, after the last one of the model, its final norm."""
    splits_backward = stage.wgrad_delay is not None
    if choice.transformer_engine is not None:
        layer, norm = _transformer_engine_layer(model, splits_backward=splits_backward), LayerNormImpl
    else:
        norm = FusedLayerNorm if choice.apex_norm else Norm
        layer = _local_layer(model, norm)
        if splits_backward:
            _split_linear_layers(layer)
    attention = layer.submodules.self_attention.submodules
    if choice.torch_attention:
        attention.core_attention = ScaledDotProductAttention
    if model.proj_bias:
        attention.linear_proj = _with_bias(attention.linear_proj)
    layers = [layer for _ in stage.layer_numbers]
    if stage.starts_with_mlp:
        layers[0] = _without_attention(layer)
    if stage.ends_with_attention:
        layers[-1] = _without_mlp(layer)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _without_attention(layer: ModuleSpec) -> ModuleSpec:
    """The MLP half of a layer: its norm, which TransformerEngine fuses into the first linear layer, MLP, and sum."""
    return _replaced(layer, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp)


def _without_mlp(layer: ModuleSpec) -> ModuleSpec:
    """The attention half of a layer: its norm, which TransformerEngine fuses as well, attention, and residual sum."""
    return _replaced(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)


def _replaced(layer: ModuleSpec, **modules: type) -> ModuleSpec:
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, **modules))


def _transformer_engine_layer(model: ModelSpec, *, splits_backward: bool) -> ModuleSpec:
    """Experts multiply in one call, but not where backwards are split.

    There, TransformerEngine's grouped layer hands tensors that nobody has written to autograd as weights' gradients
    (grouped_linear.py:414-490), for whoever adds them up.
    """
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=model.num_experts,
        moe_grouped_gemm=model.num_experts is not None and not splits_backward,
        qk_layernorm=model.qk_layernorm,
    )


def _local_layer(model: ModelSpec, norm: type) -> ModuleSpec:
    layer = copy.deepcopy(
        get_gpt_layer_local_spec(
            num_experts=model.num_experts, qk_layernorm=model.qk_layernorm, normalization=model.normalization
        )
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if model.qk_layernorm:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def _with_bias(linear: type) -> type:
    """``linear`` with a bias, whatever megatron-core asks for: one of its settings serves this layer and the MLP."""

    class WithBias(linear):  # type: ignore[misc]  # known only when the layer is built
        def __init__(self, *args: object, bias: bool, **options: object) -> None:
            super().__init__(*args, bias=True, **options)

    return WithBias


def _split_linear_layers(layer: ModuleSpec) -> None:
    """Let the linear layers of ``layer`` leave the gradients of their weights for later."""
    attention, mlp = layer.submodules.self_attention.submodules, submodules_of(layer.submodules.mlp)
    attention.linear_qkv, attention.linear_proj = SplitColumnParallelLinear, SplitRowParallelLinear
    parts = submodules_of(mlp.experts) if hasattr(mlp, "experts") else mlp
    parts.linear_fc1, parts.linear_fc2 = SplitColumnParallelLinear, SplitRowParallelLinear


def activation_function(model: ModelSpec, *, fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The MLP's activation; ``fused`` if megatron-core will replace it by its kernel for bias and activation.

    That kernel computes the tanh form for ``F.gelu``, so without it the tanh form has to be asked for.
    """
    if model.is_gated:
        return F.silu
    if model.activation == "relu":
        return F.relu
    return F.gelu if fused else partial(F.gelu, approximate="tanh")
