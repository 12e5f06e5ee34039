"""An implementation that nobody here wrote computes the same loss and gradients: Hugging Face's ``transformers``.

Tiny random models are built from configurations alone and run in float64 in this process; ours runs with the same
weights, on one rank and on a plan that is uneven in every way.

What remains is the order of summation in float64, some 1e-15. That holds although both sides round the cosines and
sines of rotary positions to float32, because they round the same numbers; and although megatron-core fills masked
scores with -10000 instead of minus infinity, because exp(-10000) is 0 in float64 as well. Mixtral alone is farther
off, because its router's probabilities are rounded to float32 in ``transformers``.
"""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.runtime.weights import take_shard
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters, shard_intervals
from tests.helpers.huggingface import canonical_tensors, loss_and_gradients
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import sample

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FLOAT64, FLOAT32_ROUTER = 1e-12, 1e-6
"""Tolerances relative to the largest element of each tensor."""

SIZES = {"num_layers": 3, "num_query_groups": 2}
MODELS = {
    "llama": (llama_model(**SIZES), FLOAT64),
    "llama-tied": (llama_model(**SIZES, tied_embeddings=True, rotary_base=500_000), FLOAT64),
    "qwen2": (llama_model(**SIZES, qkv_bias=True), FLOAT64),
    "qwen3": (llama_model(**SIZES, qk_layernorm=True), FLOAT64),
    "gpt2": (gpt2_model(num_layers=3), FLOAT64),
    "mixtral": (moe_model(**SIZES), FLOAT32_ROUTER),
}


def one_process(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 3), ranks=(0,), mbs=2), num_samples=6)], precision="fp64")


def two_unlike_replicas(model: ModelSpec) -> Plan:
    """tp 2 | tp 1 beside tp 1, cut between other layers, with unequal shares and microbatches."""
    first = replica(
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True, mbs=2), stage(layers=(2, 3), ranks=(2,)), num_samples=4
    )
    return plan(model, [first, replica(stage(layers=(0, 3), ranks=(3,)), num_samples=2)], precision="fp64")


@pytest.mark.parametrize("build_plan", [one_process, two_unlike_replicas])
@pytest.mark.parametrize(("model", "tolerance"), MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_transformers(
    model: ModelSpec, tolerance: float, build_plan: Callable[[ModelSpec], Plan]
) -> None:
    plan = build_plan(model)
    validate(plan)
    theirs = float64_model(model)
    expected_loss, expected = reference(theirs, model, plan)
    weights = canonical_tensors(model, dict(theirs.named_parameters()))
    by_name = {parameter.name: parameter for parameter in parameters(model)}
    assert weights.keys() == by_name.keys()

    full_weights = {name: tensor.detach().contiguous().numpy() for name, tensor in weights.items()}
    seen = set()
    for rank, outcome in enumerate(run_ranks(loss_and_gradients, plan.world_size, plan, full_weights)):
        assert outcome.loss == pytest.approx(expected_loss, rel=tolerance)
        for name, gradient in outcome.gradients.items():
            intervals = shard_intervals(by_name[name], tp=outcome.tp, tp_rank=outcome.tp_rank)
            wanted = take_shard(expected[name], by_name[name], intervals).numpy()
            error = np.abs(gradient - wanted).max() / np.abs(wanted).max()
            assert gradient.shape == wanted.shape
            assert error <= tolerance, f"gradient of {name} on rank {rank} is off by {error:.1e}"
            seen.add(name)
    assert seen == by_name.keys()


def reference(
    theirs: transformers.PreTrainedModel, model: ModelSpec, plan: Plan
) -> tuple[float, dict[str, torch.Tensor]]:
    """Their loss over the whole global batch and its gradients. Their own loss rounds to float32, so it is not used."""
    samples = [
        sample(i, seq_length=plan.seq_length, vocab_size=model.vocab_size) for i in range(plan.global_batch_size)
    ]
    tokens, labels, mask = (torch.stack(column) for column in zip(*samples, strict=True))
    logits = theirs(input_ids=tokens).logits
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in theirs.named_parameters()}
    return loss.item(), canonical_tensors(model, gradients)


def float64_model(model: ModelSpec) -> transformers.PreTrainedModel:
    """Their model of this description, every parameter random, the norms and biases too."""
    torch.manual_seed(3)
    theirs = huggingface_model(model).double()
    with torch.no_grad():
        for tensor in theirs.parameters():
            tensor.add_(torch.randn_like(tensor), alpha=0.1)
    for module in theirs.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(unrounded_rms_norm, module)
    return theirs


def unrounded_rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Their RMSNorm without its cast to float32 (arXiv 1910.07467, equation 4)."""
    return norm.weight * hidden / (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def huggingface_model(model: ModelSpec) -> transformers.PreTrainedModel:
    """Attention is torch's fused one: their own rounds the softmax to float32."""
    if model.position_embedding == "learned_absolute":
        config = transformers.GPT2Config(
            vocab_size=model.vocab_size,
            n_positions=model.max_position_embeddings,
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_attention_heads,
            n_inner=model.ffn_hidden_size,
            activation_function="gelu_new",
            layer_norm_epsilon=model.norm_epsilon,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(model.rotary_base)},
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tied_embeddings,
        "attn_implementation": "sdpa",
    }
    if model.num_experts is not None:
        # Their default multiplies all experts at once, which takes no float64.
        experts = {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "experts_implementation": "eager",
        }
        sizes["intermediate_size"] = model.moe_ffn_hidden_size
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts))
    if model.qkv_bias:
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    if model.qk_layernorm:
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
