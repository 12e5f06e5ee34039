"""Finds the parameters of a stage under their canonical names, and cuts shards out of whole tensors."""

import re

import torch
from megatron.core.models.gpt import GPTModel

from hetero.plan.ir import Stage
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import EMBEDDING, Parameter, ShardInterval, stage_parameters

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


def take_shard(full: torch.Tensor, parameter: Parameter, intervals: tuple[ShardInterval, ...]) -> torch.Tensor:
    """The part of a full tensor that a rank with these ``intervals`` holds."""
    if parameter.shard_dim is None:
        return full
    parts = [full.narrow(parameter.shard_dim, i.global_start, i.length) for i in intervals]
    return torch.cat(parts, dim=parameter.shard_dim)
