"""Finds the parameters of a stage under their canonical names, and draws their initial values.

A weight is drawn for the full tensor from a seed made of its name, then cut: no plan, placement or layer spec
changes it.
"""

import hashlib
import math
import re
from collections.abc import Mapping

import torch
from megatron.core.models.gpt import GPTModel

from hetero.plan.ir import Stage
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING, Parameter, ShardInterval, shard_intervals, stage_parameters

_RENAMED = (
    # TransformerEngine fuses a norm into the linear layer behind it, and an MoE layer's experts into one module.
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$"), r"input_layernorm.\1"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_(weight|bias)$"), r"pre_mlp_layernorm.\1"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.\1.weight"),
)


def canonical_parameters(
    module: GPTModel, *, model: ModelSpec, stage: Stage
) -> dict[str, tuple[Parameter, torch.nn.Parameter]]:
    """Every parameter of a stage's module with its description, in the order of the forward.

    The names and shapes that the plan counts on are checked against the module's.
    """
    found = {}
    for name, tensor in module.named_parameters():
        found[_canonical_name(name, first_layer=stage.first_layer, tied=model.tied_embeddings)] = tensor
    expected = stage_parameters(model, first_layer=stage.start, end_layer=stage.end)
    assert found.keys() == {p.name for p in expected}, found.keys() ^ {p.name for p in expected}
    for parameter in expected:
        assert found[parameter.name].shape == parameter.local_shape(stage.tp), parameter
    return {parameter.name: (parameter, found[parameter.name]) for parameter in expected}


def _canonical_name(name: str, *, first_layer: int, tied: bool) -> str:
    if name == "output_layer.weight" and tied:
        return EMBEDDING
    if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
        name = f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}"
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def draw_weights(
    parameters: Mapping[str, tuple[Parameter, torch.nn.Parameter]],
    *,
    model: ModelSpec,
    tp: int,
    tp_rank: int,
    seed: int,
    std: float,
) -> None:
    """Set the initial values: normal with ``std``, divided by sqrt(2 L) before the residual sums (GPT-2)."""
    for parameter, tensor in parameters.values():
        full = _full_tensor(parameter, seed=seed, std=std, num_layers=model.num_layers)
        with torch.no_grad():
            tensor.copy_(take_shard(full, parameter, shard_intervals(parameter, tp=tp, tp_rank=tp_rank)))


def _full_tensor(parameter: Parameter, *, seed: int, std: float, num_layers: int) -> torch.Tensor:
    match parameter.init:
        case "zeros":
            return torch.zeros(parameter.shape)
        case "ones":
            return torch.ones(parameter.shape)
        case "scaled_normal":
            std = std / math.sqrt(2.0 * num_layers)
    digest = hashlib.sha256(f"{seed}:{parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(parameter.shape).normal_(std=std, generator=generator)


def take_shard(full: torch.Tensor, parameter: Parameter, intervals: tuple[ShardInterval, ...]) -> torch.Tensor:
    """The part of a full tensor that a rank with these ``intervals`` holds."""
    if parameter.shard_dim is None:
        return full
    parts = [full.narrow(parameter.shard_dim, i.global_start, i.length) for i in intervals]
    return torch.cat(parts, dim=parameter.shard_dim)
