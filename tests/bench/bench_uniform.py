"""Step time on uniform plans: this runtime against stock megatron-core, on CPU and gloo, or on GPUs and NCCL.

    python -m tests.bench.bench_uniform [--layers 8 --hidden 256 --seq 256 --microbatches 4 --steps 1]
    python -m tests.bench.bench_uniform --device cuda --precision bf16 --layers 12 --hidden 1024 --seq 1024 --steps 5
    python -m tests.bench.bench_uniform --beside scores --seq 1024 --layers 4 --plans '1 rank'

Both train the same model on the same data in the same processes and take turns of a few steps each, so that whatever
else the machine does weighs on both alike. The figure to read is the ratio of neighbouring turns: below 1, this
runtime is faster. "best" is the ratio of the two fastest turns, "cpu" that of all processor time, which other
programs disturb least but in which waiting for another rank costs nothing. Plans of more ranks than cores say less.

"memory" is the most that a rank holds in a step: what building a side and its first step have left allocated, and the
most that a later step adds. torch's allocator counts it on a GPU. On a CPU the tensors that operators return are
counted, so what operators allocate inside themselves is missing there.

Stock gets torch's fused Adam, as it would get Apex's or TransformerEngine's on a GPU, and overlaps its gradient
reduction wherever there is more than one replica. Both have the same layers, on GPUs TransformerEngine's where it is
installed and the device can, else local ones with torch's attention; ranks that outnumber the GPUs share them, and are
no measure of speed.

``--beside scores`` takes stock's place by this runtime itself, with megatron-core's own attention in its local layers,
which keeps the scores: what torch's attention saves, and nothing else.
"""

import argparse
import gc
import importlib.util
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypedDict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.profiling.stage_part import allocated_bytes
from hetero.runtime import layer_spec
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from hetero.units import MIB
from tests.helpers.gpu_ranks import device_type_here, run_on, this_device
from tests.helpers.models import llama_model
from tests.helpers.stock_megatron import AttentionWithScores, StockOptions, StockTrainer, stand_ins

ADAM = AdamOptions(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0)
SEED, STD = 7, 0.02
VOCAB_SIZE = 1024


class Degrees(TypedDict, total=False):
    """Of a uniform plan, what is not 1 or left out."""

    tp: int
    pp: int
    stages_per_rank: int
    sequence_parallel: bool


PLANS: Mapping[str, tuple[int, Degrees]] = {
    "1 rank": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "pp2 interleaved": (2, {"pp": 2, "stages_per_rank": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2 pp2": (4, {"pp": 2}),
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What is trained, how often, on what, and beside what.

    transformer_engine: its layers, on both sides.
    scores: the other side is this runtime, with attention that keeps scores.
    """

    plan: Plan
    num_steps: int
    num_turns: int
    data_parallel: DataParallelOptions
    device: str = "cpu"
    transformer_engine: bool = False
    scores: bool = False


@dataclass(frozen=True)
class Turns:
    """Seconds per step of each turn, seconds of processor time of this rank over all turns, the last losses, which
    tell that both did the same work, and the most bytes that each side held at a time."""

    ours_s: list[float]
    other_s: list[float]
    our_processor_s: float
    other_processor_s: float
    our_loss: float
    other_loss: float
    our_peak_bytes: int
    other_peak_bytes: int

    @property
    def ratios(self) -> list[float]:
        return [ours / other for ours, other in zip(self.ours_s, self.other_s, strict=True)]


def main() -> None:
    arguments = _arguments()
    table = Table(
        title=(
            f"{arguments.layers} layers, hidden {arguments.hidden}, sequence {arguments.seq}, {arguments.precision} on "
            f"{device_type_here(arguments.device).name}"
        ),
        caption="* more ranks than cores or GPUs",
    )
    for column in (
        "plan",
        "ours ms",
        f"{arguments.beside} ms",
        "ratio",
        "min..max",
        "best",
        "cpu",
        "losses",
        "memory MiB",
    ):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name in arguments.plans:
        world_size, degrees = PLANS[name]
        plan = _plan(arguments, world_size, degrees)
        bench = Bench(
            plan=plan,
            num_steps=arguments.steps,
            num_turns=arguments.turns,
            data_parallel=DataParallelOptions(
                bucket_numel=arguments.bucket_numel,
                overlap_param_gather=arguments.distributed_optimizer,
            ),
            device=arguments.device,
            transformer_engine=_has_transformer_engine(arguments),
            scores=arguments.beside == "scores",
        )
        try:
            ranks = run_on(arguments.device, measure, world_size, bench, timeout_s=1800)
        except pytest.skip.Exception as skipped:
            table.add_row(name, *["-"] * 7, str(skipped))
            continue
        turns = ranks[-1]
        ratios = turns.ratios
        places = torch.cuda.device_count() if arguments.device == "cuda" else os.cpu_count()
        oversubscribed = world_size > (places or 1)
        table.add_row(
            f"{name} *" if oversubscribed else name,
            f"{1e3 * statistics.median(turns.ours_s):.0f}",
            f"{1e3 * statistics.median(turns.other_s):.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}..{max(ratios):.3f}",
            f"{min(turns.ours_s) / min(turns.other_s):.3f}",
            f"{sum(r.our_processor_s for r in ranks) / sum(r.other_processor_s for r in ranks):.3f}",
            f"{turns.our_loss:.5f} {turns.other_loss:.5f}",
            f"{max(r.our_peak_bytes for r in ranks) / MIB:.1f} {max(r.other_peak_bytes for r in ranks) / MIB:.1f}",
        )
    Console(width=140).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--microbatches", type=int, default=4, help="per replica")
    parser.add_argument("--steps", type=int, default=1, help="per turn")
    parser.add_argument("--turns", type=int, default=24, help="of each side")
    parser.add_argument("--bucket-numel", type=int, default=1_000_000, help="elements per gradient bucket, both sides")
    parser.add_argument(
        "--distributed-optimizer", action="store_true", help="on both sides, with overlapped reductions and gathers"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--transformer-impl", choices=("auto", "local"), default="auto", help="of both sides, on a GPU")
    parser.add_argument(
        "--beside",
        choices=("stock", "scores"),
        default="stock",
        help="stock megatron-core, or this runtime with local attention that keeps scores",
    )
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="PLAN")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace, world_size: int, degrees: Degrees) -> Plan:
    num_replicas = world_size // (degrees.get("tp", 1) * degrees.get("pp", 1))
    model = llama_model(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_query_groups=8,
        kv_channels=arguments.hidden // 8,
        ffn_hidden_size=arguments.hidden * 8 // 3 // 16 * 16,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
        max_position_embeddings=arguments.seq,
    )
    return uniform_plan(
        UniformLayout(
            model=model,
            world_size=world_size,
            micro_batch_size=1,
            global_batch_size=num_replicas * arguments.microbatches,
            seq_length=arguments.seq,
            device=device_type_here(arguments.device).name,
            precision=arguments.precision,
            distributed_optimizer=arguments.distributed_optimizer,
            **degrees,
        )
    )


def _has_transformer_engine(arguments: argparse.Namespace) -> bool:
    """Both sides have its layers: as this runtime chooses, in half precision."""
    return (
        arguments.device == "cuda"
        and arguments.precision == "bf16"
        and arguments.transformer_impl == "auto"
        and arguments.beside == "stock"
        and device_type_here("cuda").has_transformer_engine
        and importlib.util.find_spec("transformer_engine") is not None
    )


def measure(rank: int, bench: Bench) -> Turns:
    """On every rank: both sides, turn by turn, after two steps of each to warm up."""
    with stand_ins():
        return _measured(rank, bench)


def _measured(rank: int, bench: Bench) -> Turns:
    num_steps = bench.num_steps
    batches = _batches(bench.plan, rank)
    _allocate_workspace(bench)
    other, other_peak_bytes = _with_peak(
        lambda: _with_scores(bench, batches) if bench.scores else _stock(bench, rank, batches), bench
    )
    ours, our_peak_bytes = _with_peak(lambda: _ours(bench, batches), bench)
    seconds: dict[Callable[[], float], list[float]] = {ours: [], other: []}
    processor_s = dict.fromkeys(seconds, 0.0)
    losses = dict.fromkeys(seconds, math.nan)
    for turn in range(bench.num_turns):
        # Who goes first changes, so that a steady drift favours nobody.
        for step in list(seconds)[:: 1 if turn % 2 else -1]:
            _meet(bench.device)
            start, processor_start = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                losses[step] = step()
            processor_s[step] += time.process_time() - processor_start
            _meet(bench.device)
            seconds[step].append((time.perf_counter() - start) / num_steps)
    return Turns(
        ours_s=seconds[ours],
        other_s=seconds[other],
        our_processor_s=processor_s[ours],
        other_processor_s=processor_s[other],
        our_loss=losses[ours],
        other_loss=losses[other],
        our_peak_bytes=our_peak_bytes,
        other_peak_bytes=other_peak_bytes,
    )


def _allocate_workspace(bench: Bench) -> None:
    """Multiply once, so that cuBLAS's workspace, which both sides use, does not count for the one that is first."""
    square = torch.ones(64, 64, device=this_device(bench.device))
    torch.mm(square, square)


def _with_peak(make: Callable[[], Callable[[], float]], bench: Bench) -> tuple[Callable[[], float], int]:
    """Make a side and take two steps; return the function that takes one, and the most bytes that it holds."""
    made: list[Callable[[], float]] = []

    def build() -> None:
        made.append(make())
        made[0]()
        gc.collect()

    def step() -> None:
        made[0]()

    device = this_device(bench.device)
    kept = allocated_bytes(build, device).kept
    return made[0], kept + allocated_bytes(step, device).peak


def _meet(device: str) -> None:
    """Until all ranks have done everything that they began."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))


def _ours(bench: Bench, batches: list[Microbatch]) -> Callable[[], float]:
    context = create_groups(bench.plan, device=this_device(bench.device))
    trainer = Trainer(
        context,
        options=StageOptions(
            init_method_std=STD, transformer_impl="transformer_engine" if bench.transformer_engine else "local"
        ),
        adam=ADAM,
        seed=SEED,
        data_parallel=bench.data_parallel,
    )
    session = TrainingSession(context, trainer, data=itertools.repeat(batches) if reads_data(context) else None)
    return lambda: session.step().loss


def _with_scores(bench: Bench, batches: list[Microbatch]) -> Callable[[], float]:
    with mock.patch.object(layer_spec, "ScaledDotProductAttention", AttentionWithScores):
        return _ours(bench, batches)


def _stock(bench: Bench, rank: int, batches: list[Microbatch]) -> Callable[[], float]:
    plan, data_parallel = bench.plan, bench.data_parallel
    options = StockOptions(
        # Every microbatch has equally many tokens, so the cheaper mean of means is the same.
        calculate_per_token_loss=False,
        overlap_grad_reduce=len(plan.replicas) > 1,
        bucket_size=data_parallel.bucket_numel,
        use_distributed_optimizer=plan.distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
        fused_adam=True,
        transformer_engine=bench.transformer_engine,
        torch_attention=not bench.transformer_engine,
    )
    trainer = StockTrainer(plan, rank, adam=ADAM, seed=SEED, std=STD, options=options)
    device = this_device(bench.device)
    # Both sides bring the batch to the device in every step.
    return lambda: trainer.step([_on(batch, device) for batch in batches])[0]


def _on(batch: Microbatch, device: torch.device) -> Microbatch:
    tensors = (batch.tokens_BS, batch.position_ids_BS, batch.labels_BS, batch.loss_mask_BS)
    return Microbatch(*(tensor.to(device) for tensor in tensors))


def _batches(plan: Plan, rank: int) -> list[Microbatch]:
    """Random tokens, the same in every step, all of which count. Ranks of one replica draw the same ones."""
    place = plan.placement(rank)
    assert place is not None
    generator = torch.Generator().manual_seed(place.replica)
    shape = (1, plan.seq_length)
    positions = torch.arange(plan.seq_length).expand(shape)
    batches = []
    for _ in range(plan.replicas[place.replica].num_microbatches(place.stage)):
        tokens, labels = torch.randint(0, plan.model.vocab_size, (2, *shape), generator=generator)
        batches.append(Microbatch(tokens, positions, labels, torch.ones(shape)))
    return batches


if __name__ == "__main__":
    main()
