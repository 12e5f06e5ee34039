"""Tiny random models of Hugging Face's ``transformers`` in float64, made from a ``config.json`` alone."""

# Classes of transformers in annotations would load it, which takes seconds, where tests are only collected.
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from hetero.plan.ir import Plan
from tests.helpers.huggingface import canonical_tensors
from tests.helpers.training import sample

Config = Mapping[str, Any]

_ROTARY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": 48,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OPT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "activation_function": "gelu_new",
    "dropout": 0.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SMALL: Mapping[str, Config] = {
    "llama": {key: value for key, value in _ROTARY.items() if key != "sliding_window"},
    "mistral": _ROTARY,
    "qwen2": _ROTARY,
    "qwen3": {**_ROTARY, "head_dim": 16},
    "mixtral": {**_ROTARY, "num_local_experts": 4},
    "gpt2": _GPT2,
    "opt": _OPT,
}
"""By family, what a file has to say for a tiny model."""


def config_json(family: str, **changes: Any) -> dict[str, Any]:
    """The content of a ``config.json``."""
    return {"model_type": family, **SMALL[family], **changes}


LINEAR = {"type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    # Of the four wavelengths of a head of 8, from 6 to 200, one is kept, one is interpolated, two are stretched.
    "rope_theta": 100.5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

_ROPES = (
    LINEAR,
    LLAMA3,
    {**LINEAR, "rope_theta": 1234.5},
    {**LINEAR, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 1234.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    {"factor": 2.0},
)
_PROBES: Mapping[str, tuple[Any, ...]] = {
    "vocab_size": (62,),
    "hidden_size": (64,),
    "n_embd": (64,),
    "intermediate_size": (80,),
    "ffn_dim": (80,),
    "n_inner": (80, None),
    "num_hidden_layers": (2,),
    "n_layer": (2,),
    "num_attention_heads": (2,),
    "n_head": (2, 5),
    "num_key_value_heads": (1, 4, None),
    "head_dim": (6, None),
    "max_position_embeddings": (32,),
    "n_positions": (32,),
    "n_ctx": (32, 64),
    "num_local_experts": (3,),
    "num_experts_per_tok": (1, 3),
    "word_embed_proj_dim": (16, 32),
    "rms_norm_eps": (0.01,),
    "layer_norm_epsilon": (0.01,),
    "sliding_window": (8, 64, 100),
    "max_window_layers": (0, 3),
    "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 3),
    "rope_theta": (1234.5, 7),
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "partial_rotary_factor": (0.5, 1.0),
    "architectures": (["NoSuchModel"],),
    "per_layer_config": ({1: {"num_attention_heads": 2}},),
    "dtype": ("float32",),
    "torch_dtype": ("float32",),
    "id2label": ({"0": "a", "1": "b", "2": "c"},),
    "label2id": ({"a": 0, "b": 1, "c": 2},),
    "problem_type": ("regression",),
    "summary_type": ("mean",),
    "summary_activation": ("tanh",),
    "quantization_config": ({"bits": 4},),
    "transformers_version": ("4.0.0",),
    "_name_or_path": ("somewhere",),
    "model_type": (),
    "return_dict": (),  # their models fail without
}
"""Values other than those of the tiny models, of keys for which no such value is found by type."""

_TOGETHER = (
    {"sliding_window": 8, "use_sliding_window": False},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
    {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
    {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 3},
    {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
    {"attention_bias": True, "mlp_bias": True},
    {"rope_scaling": LINEAR, "rope_theta": 1234.5},
    {"rope_scaling": LINEAR, "rope_parameters": LLAMA3},
    {"rope_theta": 1234.5, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
)

_NO_FIELDS = (
    "torch_dtype quantization_config rope_theta rope_scaling partial_rotary_factor per_layer_config "
    "tie_last_hidden_states attention_bias mlp_bias use_sliding_window sliding_window layer_types n_ctx "
    "activation_dropout is_decoder add_cross_attention use_mrope"
)
"""Keys that are in files, or that transformers takes besides the fields of its classes."""


def keys_of(family: str) -> set[str]:
    """All keys that the family's class has or takes."""
    config = transformers.CONFIG_MAPPING[family](**SMALL[family])
    fields = {field.name for field in dataclasses.fields(config)}
    return fields | set(config.to_dict()) | set(transformers.GenerationConfig._get_default_generation_params())


def probes(family: str) -> Iterator[dict[str, Any]]:
    """Changes of the tiny model's file: of one key after the other, and of some that go together."""
    there = transformers.CONFIG_MAPPING[family](**SMALL[family]).to_dict()
    for key in sorted(keys_of(family) | set(_NO_FIELDS.split())):
        for value in _probes_of(key, there.get(key)):
            yield {key: value}
    yield from _TOGETHER


def _probes_of(key: str, there: Any) -> tuple[Any, ...]:
    """Values that ``key`` may have instead of ``there``."""
    if key in ("hidden_act", "activation_function"):
        with_weights = ("prelu", "xielu")
        return tuple(name for name in transformers.activations.ACT2FN if name not in with_weights)
    return _PROBES.get(key, _others(there))


def _others(value: Any) -> tuple[Any, ...]:
    match value:
        case bool():
            return (not value,)
        case int():
            return (value + 1,)
        case float():
            return (0.25,)
        case _:
            return (3,)


def float64_model(config: Config) -> transformers.PreTrainedModel:
    """Their model of this file, every parameter random, the norms and biases too.

    Attention is torch's fused one: their own rounds the softmax to float32. Their default for experts multiplies all at
    once, which takes no float64.
    """
    theirs = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    theirs._attn_implementation = "sdpa"
    theirs._experts_implementation = "eager"
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(theirs).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_unrounded_rms_norm, module)
    return model


def _unrounded_rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Their RMSNorm without its cast to float32 (arXiv 1910.07467, equation 4)."""
    epsilon = norm.variance_epsilon
    assert isinstance(epsilon, float)
    return norm.get_parameter("weight") * hidden / (hidden.square().mean(-1, keepdim=True) + epsilon).sqrt()


def loss_of(theirs: transformers.PreTrainedModel, plan: Plan) -> torch.Tensor:
    """Their loss over the first global batch of ``plan``. Their own function rounds to float32, so it is not used."""
    samples = [
        sample(i, seq_length=plan.seq_length, vocab_size=plan.model.vocab_size) for i in range(plan.global_batch_size)
    ]
    tokens, labels, mask = (torch.stack(column) for column in zip(*samples, strict=True))
    logits = theirs(input_ids=tokens).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()


def canonical_weights(theirs: transformers.PreTrainedModel, plan: Plan) -> dict[str, Any]:
    """Their weights under our names, as arrays."""
    weights = canonical_tensors(plan.model, dict(theirs.named_parameters()))
    return {name: tensor.detach().contiguous().numpy() for name, tensor in weights.items()}
