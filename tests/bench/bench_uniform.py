"""Step time on uniform plans: this runtime against stock megatron-core, on CPU and gloo.

    python -m tests.bench.bench_uniform [--layers 8 --hidden 256 --seq 256 --microbatches 4 --steps 1]

Both train the same model on the same data in the same processes and take turns of a few steps each, so that whatever
else the machine does weighs on both alike. The figure to read is the ratio of neighbouring turns: below 1, this
runtime is faster. "best" is the ratio of the two fastest turns, "cpu" that of all processor time, which other
programs disturb least but in which waiting for another rank costs nothing. Plans of more ranks than cores say less.

Stock gets torch's fused Adam, as it would get Apex's or TransformerEngine's on a GPU, and overlaps its gradient
reduction wherever there is more than one replica.
"""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.models import llama_model
from tests.helpers.ranks import run_ranks
from tests.helpers.stock_megatron import StockOptions, StockTrainer, stand_ins

ADAM = AdamOptions(lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0)
SEED, STD = 7, 0.02
VOCAB_SIZE = 1024

PLANS = {
    "1 rank": (1, {}),
    "dp2": (2, {}),
    "pp2": (2, {"pp": 2}),
    "pp2 interleaved": (2, {"pp": 2, "stages_per_rank": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
    "dp2 pp2": (4, {"pp": 2}),
}


@dataclass(frozen=True)
class Turns:
    """Seconds per step of each turn, seconds of processor time of this rank over all turns, and the last losses,
    which tell that both did the same work."""

    ours_s: list[float]
    stock_s: list[float]
    our_processor_s: float
    stock_processor_s: float
    our_loss: float
    stock_loss: float

    @property
    def ratios(self) -> list[float]:
        return [ours / stock for ours, stock in zip(self.ours_s, self.stock_s, strict=True)]


def main() -> None:
    arguments = _arguments()
    table = Table(
        title=f"{arguments.layers} layers, hidden {arguments.hidden}, sequence {arguments.seq}",
        caption="* more ranks than cores",
    )
    for column in ("plan", "ours ms", "stock ms", "ratio", "min..max", "best", "cpu", "losses"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for name in arguments.plans:
        world_size, degrees = PLANS[name]
        plan = _plan(arguments, world_size, degrees)
        ranks = run_ranks(
            measure,
            world_size,
            plan,
            arguments.steps,
            arguments.turns,
            DataParallelOptions(
                bucket_numel=arguments.bucket_numel,
                overlap_param_gather=arguments.distributed_optimizer,
            ),
            timeout_s=1800,
        )
        turns = ranks[-1]
        ratios = turns.ratios
        oversubscribed = world_size > (os.cpu_count() or 1)
        table.add_row(
            f"{name} *" if oversubscribed else name,
            f"{1e3 * statistics.median(turns.ours_s):.0f}",
            f"{1e3 * statistics.median(turns.stock_s):.0f}",
            f"{statistics.median(ratios):.3f}",
            f"{min(ratios):.3f}..{max(ratios):.3f}",
            f"{min(turns.ours_s) / min(turns.stock_s):.3f}",
            f"{sum(r.our_processor_s for r in ranks) / sum(r.stock_processor_s for r in ranks):.3f}",
            f"{turns.our_loss:.5f} {turns.stock_loss:.5f}",
        )
    Console(width=120).print(table)


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
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), metavar="PLAN")
    return parser.parse_args()


def _plan(arguments: argparse.Namespace, world_size: int, degrees: dict[str, int]) -> Plan:
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
            device="cpu",
            distributed_optimizer=arguments.distributed_optimizer,
            **degrees,
        )
    )


def measure(rank: int, plan: Plan, num_steps: int, num_turns: int, options: DataParallelOptions) -> Turns:
    """On every rank: both sides, turn by turn, after one step of each to warm up."""
    with stand_ins():
        return _measured(rank, plan, num_steps, num_turns, options)


def _measured(rank: int, plan: Plan, num_steps: int, num_turns: int, options: DataParallelOptions) -> Turns:
    batches = _batches(plan, rank)
    stock = _stock(plan, rank, options, batches)
    ours = _ours(plan, options, batches)
    seconds: dict[Callable[[], float], list[float]] = {ours: [], stock: []}
    processor_s = dict.fromkeys(seconds, 0.0)
    losses = {step: step() for step in seconds}
    for turn in range(num_turns):
        # Who goes first changes, so that a steady drift favours nobody.
        for step in list(seconds)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            start, processor_start = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                losses[step] = step()
            processor_s[step] += time.process_time() - processor_start
            dist.barrier()
            seconds[step].append((time.perf_counter() - start) / num_steps)
    return Turns(seconds[ours], seconds[stock], processor_s[ours], processor_s[stock], losses[ours], losses[stock])


def _ours(plan: Plan, data_parallel: DataParallelOptions, batches: list[Microbatch]) -> Callable[[], float]:
    context = create_groups(plan, device=torch.device("cpu"))
    trainer = Trainer(
        context,
        options=StageOptions(init_method_std=STD),
        adam=ADAM,
        seed=SEED,
        data_parallel=data_parallel,
    )
    session = TrainingSession(context, trainer, data=itertools.repeat(batches) if reads_data(context) else None)
    return lambda: session.step().loss


def _stock(plan: Plan, rank: int, data_parallel: DataParallelOptions, batches: list[Microbatch]) -> Callable[[], float]:
    options = StockOptions(
        # Every microbatch has equally many tokens, so the cheaper mean of means is the same.
        calculate_per_token_loss=False,
        overlap_grad_reduce=len(plan.replicas) > 1,
        bucket_size=data_parallel.bucket_numel,
        use_distributed_optimizer=plan.distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
        fused_adam=True,
    )
    trainer = StockTrainer(plan, rank, adam=ADAM, seed=SEED, std=STD, options=options)
    return lambda: trainer.step(batches)[0]


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
