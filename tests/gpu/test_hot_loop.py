"""On a GPU: the loop over microbatches waits for the device nowhere, and fused sums and early copies change nothing."""

import dataclasses
import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.plan.ir import Plan, Precision
from hetero.runtime.microbatch import DataPrefetcher
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from tests.helpers.layouts import STYLES
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import ADAM, data_of, microbatches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@contextmanager
def one_rank(made: Plan) -> Iterator[ParallelContext]:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        yield create_groups(made, device=torch.device("cuda", 0))
    finally:
        dist.destroy_process_group()


def one_stage(style: str, precision: Precision, **options: Any) -> Plan:
    made = plan(STYLES[style](), [replica(stage(layers=(0, 6), ranks=(0,), mbs=2, **options), num_samples=8)])
    return dataclasses.replace(made, precision=precision)


def trainer_of(context: ParallelContext, *, bucket_numel: int = 3000, **options: Any) -> Trainer:
    return Trainer(
        context,
        options=StageOptions(init_method_std=0.1, **options),
        adam=ADAM,
        seed=7,
        data_parallel=DataParallelOptions(bucket_numel=bucket_numel),
    )


@pytest.mark.parametrize("delay", [None, 1])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("style", ["gpt2-tied", "llama-gqa", "llama-qk-norm"])
def test_no_microbatch_waits_for_the_device(
    style: str, precision: Precision, recompute: Any, delay: int | None
) -> None:
    """From the first microbatch to the summed gradients, in the first step after the warm-up and in the next."""
    if recompute == "full" and delay is not None:
        pytest.skip("a stage that recomputes all has no split backward")
    with one_rank(one_stage(style, precision, recompute=recompute, delay=delay)) as context:
        session = TrainingSession(
            context, trainer_of(context, attention_dropout=0.1, hidden_dropout=0.1), data=data_of(context)
        )
        for _ in range(2):
            torch.cuda.set_sync_debug_mode("error")
            try:
                session.compute_gradients()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            session.update()


ROUNDING_BYTES = 64 * 2**20
"""By which torch's allocator may take more than it is asked for, in segments of 20 MiB; buckets are few and large."""


def test_memory_at_the_start_is_that_of_a_step() -> None:
    """Weights that were moved leave nothing behind that torch keeps. There are more of them than may be rounded up."""
    model = llama_model(hidden_size=768, num_attention_heads=12, kv_channels=64, ffn_hidden_size=3072)
    made = plan(model, [replica(stage(layers=(0, 6), ranks=(0,)), num_samples=1)])
    with one_rank(dataclasses.replace(made, precision="bf16")) as context:
        before = reserved_without_workspaces()
        trainer = trainer_of(context, bucket_numel=10**9)
        weights, gradients, state = trainer.static_bytes()
        assert weights > ROUNDING_BYTES
        assert reserved_without_workspaces() - before < weights + gradients + state + ROUNDING_BYTES


def reserved_without_workspaces() -> int:
    """Return the bytes that torch has taken, without cuBLAS's: 32 MiB for each thread and stream on Hopper."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("style", ["gpt2-tied", "llama-gqa", "moe"])
def test_fused_accumulation_gives_the_losses_without_it(style: str, precision: Precision) -> None:
    """By whatever is installed; where nothing is, both are the same."""
    losses = []
    for fusion in (True, False):
        with one_rank(one_stage(style, precision)) as context:
            session = TrainingSession(
                context, trainer_of(context, gradient_accumulation_fusion=fusion), data=data_of(context)
            )
            losses.append([session.step().loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if precision == "fp32" else 2e-2)


def test_prefetched_microbatches_are_those_that_were_read() -> None:
    """While the device is busy, so that copies that came too late or too early would be seen."""
    made = one_stage("llama-gqa", "fp32")
    data = DataPrefetcher((microbatches(made, 0, step=step) for step in range(8)), torch.device("cuda", 0))
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for _ in range(8):
        batches = data.take()
        busy = busy @ busy / 64
        sums.append(torch.stack([batch.tokens_BS.double().sum() for batch in batches]).sum())
        data.fetch()
        del batches
        torch.cuda.current_stream().synchronize()
    expected = [sum(b.tokens_BS.double().sum().item() for b in microbatches(made, 0, step=step)) for step in range(8)]
    assert [each.item() for each in sums] == expected
