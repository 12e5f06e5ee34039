"""Weights and gradients of Hugging Face's GPT-2, Llama and its kin under this project's canonical names.

Needs no ``transformers``: a model of theirs is known by its named tensors only, so that ranks need not import it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hetero.checkpoint.interchange.families import join, rows
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import DataParallelOptions, StageOptions
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
    gradients = {name: tensor.grad.numpy().copy() for name, (_, tensor) in trainer.parameters.items()}
    return Outcome(trainer.update().loss, gradients, tp, tp_rank)


def canonical_tensors(model: ModelSpec, theirs: Tensors) -> dict[str, torch.Tensor]:
    """Their tensors, weights or gradients, as full tensors under canonical names; padding rows are zero."""
    files = dict(_as_in_files(theirs))
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
