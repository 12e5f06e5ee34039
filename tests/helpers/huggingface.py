"""Weights and gradients of Hugging Face's GPT-2, Llama and its kin under this project's canonical names.

Needs no ``transformers``: a model of theirs is known by its named tensors only, so that ranks need not import it.
The map from their tensors to ours is linear, a rearrangement, and so serves gradients as it serves weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from hetero.runtime.weights import take_shard
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import shard_intervals
from tests.helpers.training import ADAM, microbatches

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """Mean token loss of the global batch, and this rank's shards of the summed gradients by canonical name."""

    loss: float
    gradients: dict[str, np.ndarray]
    tp: int
    tp_rank: int


def loss_and_gradients(rank: int, plan: Plan, full_weights: Mapping[str, np.ndarray]) -> Outcome:
    """On every rank of ``plan``: the first global batch under weights given by canonical name. No rank may idle."""
    context = create_groups(plan, device=torch.device("cpu"))
    work = context.work
    assert work is not None
    tp, tp_rank = work.stage.tp, work.placement.tp_rank
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=0, bucket_numel=3000)
    for name, (parameter, tensor) in trainer.parameters.items():
        shard = take_shard(
            torch.from_numpy(full_weights[name]), parameter, shard_intervals(parameter, tp=tp, tp_rank=tp_rank)
        )
        assert tensor.dtype == shard.dtype, name
        tensor.data.copy_(shard)
    trainer.compute_gradients(microbatches(plan, rank, step=0) if reads_data(context) else None)
    gradients = {name: tensor.grad.numpy().copy() for name, (_, tensor) in trainer.parameters.items()}
    return Outcome(trainer.update().loss, gradients, tp, tp_rank)


def canonical_tensors(model: ModelSpec, theirs: Tensors) -> dict[str, torch.Tensor]:
    """Their tensors, weights or gradients, as full tensors under canonical names; padding rows are zero."""
    convert = _gpt2 if model.position_embedding == "learned_absolute" else _llama
    return dict(convert(model, theirs))


def _llama(model: ModelSpec, theirs: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Llama's names; Qwen3 adds one head's norms of queries and keys, Mixtral stacks experts in place of the MLP."""
    yield "embedding.word_embeddings.weight", _padded(model, theirs["model.embed_tokens.weight"])
    for layer in range(model.num_layers):
        ours, its = f"decoder.layers.{layer}", f"model.layers.{layer}"
        attention = f"{its}.self_attn"
        query_key_value = [theirs[f"{attention}.{which}_proj.weight"] for which in "qkv"]
        yield f"{ours}.input_layernorm.weight", theirs[f"{its}.input_layernorm.weight"]
        yield f"{ours}.self_attention.linear_qkv.weight", _fused_qkv(model, query_key_value)
        if model.qk_layernorm:
            yield f"{ours}.self_attention.q_layernorm.weight", theirs[f"{attention}.q_norm.weight"]
            yield f"{ours}.self_attention.k_layernorm.weight", theirs[f"{attention}.k_norm.weight"]
        yield f"{ours}.self_attention.linear_proj.weight", theirs[f"{attention}.o_proj.weight"]
        yield f"{ours}.pre_mlp_layernorm.weight", theirs[f"{its}.post_attention_layernorm.weight"]
        if model.num_experts is None:
            gate, up = (theirs[f"{its}.mlp.{which}_proj.weight"] for which in ("gate", "up"))
            yield f"{ours}.mlp.linear_fc1.weight", torch.cat([gate, up])
            yield f"{ours}.mlp.linear_fc2.weight", theirs[f"{its}.mlp.down_proj.weight"]
            continue
        yield f"{ours}.mlp.router.weight", theirs[f"{its}.mlp.gate.weight"]
        for expert in range(model.num_experts):
            its_expert = f"{ours}.mlp.experts.local_experts.{expert}"
            yield f"{its_expert}.linear_fc1.weight", theirs[f"{its}.mlp.experts.gate_up_proj"][expert]
            yield f"{its_expert}.linear_fc2.weight", theirs[f"{its}.mlp.experts.down_proj"][expert]
    yield "decoder.final_layernorm.weight", theirs["model.norm.weight"]
    if not model.tied_embeddings:
        yield "output_layer.weight", _padded(model, theirs["lm_head.weight"])


def _gpt2(model: ModelSpec, theirs: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """GPT-2's names. Its linear layers (``Conv1D``) keep weights as [input, output]."""
    yield "embedding.word_embeddings.weight", _padded(model, theirs["transformer.wte.weight"])
    yield "embedding.position_embeddings.weight", theirs["transformer.wpe.weight"]
    for layer in range(model.num_layers):
        ours, its = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for kind in ("weight", "bias"):
            qkv, proj, fc1, fc2 = (
                theirs[f"{its}.{name}.{kind}"].T if kind == "weight" else theirs[f"{its}.{name}.{kind}"]
                for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            )
            yield f"{ours}.input_layernorm.{kind}", theirs[f"{its}.ln_1.{kind}"]
            yield f"{ours}.self_attention.linear_qkv.{kind}", _fused_qkv(model, qkv.chunk(3))
            yield f"{ours}.self_attention.linear_proj.{kind}", proj
            yield f"{ours}.pre_mlp_layernorm.{kind}", theirs[f"{its}.ln_2.{kind}"]
            yield f"{ours}.mlp.linear_fc1.{kind}", fc1
            yield f"{ours}.mlp.linear_fc2.{kind}", fc2
    for kind in ("weight", "bias"):
        yield f"decoder.final_layernorm.{kind}", theirs[f"transformer.ln_f.{kind}"]


def _fused_qkv(model: ModelSpec, query_key_value: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Megatron's order of output features: per query group its queries, then its key, then its value."""
    groups = [tensor.reshape(model.num_query_groups, -1, *tensor.shape[1:]) for tensor in query_key_value]
    return torch.cat(groups, dim=1).flatten(0, 1)


def _padded(model: ModelSpec, rows: torch.Tensor) -> torch.Tensor:
    padding = rows.new_zeros(model.padded_vocab_size - rows.shape[0], *rows.shape[1:])
    return torch.cat([rows, padding])
