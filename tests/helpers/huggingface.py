"""Weights and gradients of Hugging Face's GPT-2, OPT, Llama and its kin under this project's canonical names.

Needs no ``transformers``: a model of theirs is known by its named tensors only, so that ranks need not import it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero.checkpoint.interchange.families import join, rows
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.main_grad import main_grad
from hetero.runtime.named_parameters import take_shard
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
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
    trainer = Trainer(
        context, options=StageOptions(), adam=ADAM, seed=0, data_parallel=DataParallelOptions(bucket_numel=3000)
    )
    for name, (parameter, tensor) in trainer.parameters.items():
        shard = take_shard(
            torch.from_numpy(full_weights[name]), parameter, shard_intervals(parameter, tp=tp, tp_rank=tp_rank)
        )
        assert tensor.dtype == shard.dtype, name
        tensor.data.copy_(shard)
    trainer.compute_gradients(microbatches(plan, rank, step=0) if reads_data(context) else None)
    gradients = {name: main_grad(tensor).numpy().copy() for name, (_, tensor) in trainer.parameters.items()}
    return Outcome(trainer.update().loss, gradients, tp, tp_rank)


def losses(rank: int, cases: Sequence[tuple[Plan, Mapping[str, np.ndarray]]]) -> list[float]:
    """The loss of the first global batch of each plan, under weights given by canonical name."""
    return [loss_and_gradients(rank, plan, full_weights).loss for plan, full_weights in cases]


def canonical_tensors(model: ModelSpec, theirs: Tensors) -> dict[str, torch.Tensor]:
    """Their tensors, weights or gradients, as full tensors under canonical names; padding rows are zero."""
    files = dict(_opt_as_gpt2(theirs) if any(".fc1." in name for name in theirs) else _as_in_files(theirs))
    return {row.ours: join(model, row.layout, [files[name] for name in row.theirs]) for row in rows(model)}


def _as_in_files(theirs: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """``transformers`` stacks Mixtral's experts in memory; its files have them one by one."""
    for name, tensor in theirs.items():
        moe, _, own = name.partition(".mlp.")
        prefix = f"{moe}.block_sparse_moe"
        match own:
            case "gate.weight":
                yield f"{prefix}.gate.weight", tensor
            case "experts.gate_up_proj":
                for expert, gate_up in enumerate(tensor):
                    gate, up = gate_up.chunk(2)
                    yield f"{prefix}.experts.{expert}.w1.weight", gate
                    yield f"{prefix}.experts.{expert}.w3.weight", up
            case "experts.down_proj":
                for expert, down in enumerate(tensor):
                    yield f"{prefix}.experts.{expert}.w2.weight", down
            case _:
                yield name, tensor


_GPT2_NAMES = {
    "self_attn_layer_norm": "ln_1",
    "self_attn.out_proj": "attn.c_proj",
    "final_layer_norm": "ln_2",
    "fc1": "mlp.c_fc",
    "fc2": "mlp.c_proj",
}


def _opt_as_gpt2(theirs: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """OPT is GPT-2 with three matrices for attention, weights as [output, input], and two more positions, unused."""
    for name, tensor in theirs.items():
        own = name.removeprefix("model.decoder.")
        match own.split("."):
            case ["embed_tokens", _]:
                yield "transformer.wte.weight", tensor
            case ["embed_positions", _]:
                yield "transformer.wpe.weight", tensor[2:]
            case ["final_layer_norm", kind]:
                yield f"transformer.ln_f.{kind}", tensor
            case ["layers", layer, "self_attn", "q_proj", kind]:
                parts = [theirs[name.replace("q_proj", f"{which}_proj")] for which in "qkv"]
                yield f"transformer.h.{layer}.attn.c_attn.{kind}", torch.cat(parts).t()
            case ["layers", layer, "self_attn", "k_proj" | "v_proj", _]:
                continue
            case ["layers", layer, *module, kind]:
                yield (
                    f"transformer.h.{layer}.{_GPT2_NAMES['.'.join(module)]}.{kind}",
                    tensor.t() if "norm" not in own else tensor,
                )
            case _:
                yield name, tensor
