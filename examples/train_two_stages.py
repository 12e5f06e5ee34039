"""Train two unequal stages by hand: six layers on rank 0, two on rank 1, and what a training run is made of.

    torchrun --rdzv-backend hetero-static --rdzv-endpoint localhost:0 --nproc-per-node 2 examples/train_two_stages.py

Two CPU processes over gloo; needs the extra `train`. What pretrain_gpt.py adds: flags, data files, checkpoints,
evaluation, and a failure detector that ends all ranks when one is lost.
"""

from pathlib import Path

from hetero.runtime import cpu_backend

cpu_backend.install()  # before anybody imports megatron.core, whose layers call CUDA

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import validate
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from hetero.serialization import load
from megatron.pretrain.data import microbatches

STEPS, SEQ_LENGTH = 20, 32
# The quick start's: Llama-style, 8 layers of hidden size 128, a vocabulary of bytes.
model = load(Plan, Path(__file__).parents[1] / "scripts/presets/plans/quickstart.json").model


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up, from tokens all over the vocabulary: the next token is the last one plus 1."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids, positions = (61 * index + torch.arange(SEQ_LENGTH + 1)) % model.vocab_size, torch.arange(SEQ_LENGTH)
        return {"tokens": ids[:-1], "labels": ids[1:], "position_ids": positions, "loss_mask": torch.ones(SEQ_LENGTH)}


# The first stage takes two samples at a time and the second one; two forwards may be ahead of their backwards.
first = Stage(first_layer=0, end_layer=6, ranks=(0,), device="cpu", micro_batch_size=2, in_flight=2)
last = Stage(first_layer=6, end_layer=8, ranks=(1,), device="cpu", micro_batch_size=1, in_flight=1)
replica = Replica(num_samples=8, stages=(first, last))
plan = Plan(model=model, seq_length=SEQ_LENGTH, global_batch_size=8, replicas=(replica,))
validate(plan)

dist.init_process_group("gloo")
context = create_groups(plan, device=torch.device("cpu"))
trainer = Trainer(
    context,
    options=StageOptions(),
    adam=AdamOptions(lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0),
    seed=7,
    data_parallel=DataParallelOptions(bucket_numel=40_000_000),
)
assert context.work is not None, "no rank of this plan is idle"
data = microbatches(Counting(), plan, context.work.placement, first_step=0, num_steps=STEPS, num_workers=0)
session = TrainingSession(context, trainer, data=data if reads_data(context) else None)
for step in range(1, STEPS + 1):
    result = session.step()
    if context.rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
print(f"rank {context.rank} holds {sum(weight.numel() for weight in session.weights().values()):,} weights")
dist.destroy_process_group()
