"""What copies cost: the median step with them against that without, in turns on the same ranks, and bytes per second.

python tests/bench/bench_copies.py                   two nodes of one rank
python tests/bench/bench_copies.py --hidden 512      more state for the same step
python tests/bench/bench_copies.py --device-ms 200   computing that leaves the processor free, as a GPU's does

Two ranks, a stage each, so that all of the state is fetched by the other node. The machine has to be quiet. On one of
two cores copies take time from the ranks' computing, which they do not with GPUs: there the processor waits for the
device. ``--device-ms`` has each step wait so long between the start of a copy and the update that waits for it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hetero.distributed.process_groups import create_groups
from hetero.elastic.records import RankAssignment
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.runtime.session import TrainingSession
from megatron.pretrain.checkpointing import RunStart
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.elastic import ElasticRank
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.training import build_trainer
from tests.helpers.commands import command_line
from tests.helpers.elastic import Run, nodes
from tests.helpers.models import gpt2_model
from tests.helpers.ranks import run_ranks
from tests.helpers.training import data_of

SHM = Path("/dev/shm")


def measure(
    rank: int, assignments: list[RankAssignment], argv: list[str], num_turns: int, num_steps: int, device_s: float
) -> tuple[list[float], list[float], int, list[float], list[float], int]:
    """Median step of each turn without and with copies; bytes, seconds to write and to fetch; the interval."""
    config = parse_args(argv)
    context = create_groups(assignments[rank].epoch.plan, device=torch.device("cpu"))
    trainer = build_trainer(config, context)
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    elastic = ElasticRank(assignments[rank], config, rank=rank)
    session = TrainingSession(context, trainer, data=data_of(context), schedule=scheduler)
    without: list[float] = []
    with_copies: list[float] = []
    write_s, fetch_s, step = [], [], 0
    num_bytes = sum(each.tensor.nbytes for each in trainer.optimizer.state(owner=rank))
    with elastic.copying(context, trainer, scheduler, start=RunStart()):
        copies = elastic._copies
        assert copies is not None
        for turn in range(2 * num_turns + 1):
            makes = turn % 2 == 0
            took = []
            for _ in range(num_steps):
                began_s = time.perf_counter()
                time.sleep(device_s)
                session.step()
                step += 1
                if makes:
                    elastic.after_step(step, is_last=False)
                took.append(time.perf_counter() - began_s)
                if makes and (in_hand := copies._in_hand) is not None and in_hand.is_whole:
                    write_s.append(in_hand.write_s)
                    fetch_s.append(in_hand.fetch_s)
            # The first turn warms up, and finds the interval.
            if turn > 0:
                (with_copies if makes else without).append(statistics.median(took))
    return without, with_copies, num_bytes, write_s, fetch_s, copies.every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device-ms", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="of a turn")
    args = parser.parse_args()
    model = gpt2_model(num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=8)
    plan = uniform_plan(
        UniformLayout(
            model=model,
            world_size=2,
            pp=2,
            micro_batch_size=2,
            global_batch_size=args.batch,
            seq_length=model.max_position_embeddings or 16,
            device="cpu",
        )
    )
    argv = command_line(global_batch_size=str(args.batch), hetero_plan="of-the-epoch.json", train_iters="100000")
    with tempfile.TemporaryDirectory(dir=SHM, prefix="bench-copies-") as folder, nodes(Path(folder), "a", "b") as made:
        run = Run(made)
        assignments = run.assignments(run.next_epoch(plan, {"a": (0,), "b": (1,)}))
        turns = args.turns, args.steps, args.device_ms / 1000
        measured = run_ranks(measure, 2, assignments, argv, *turns, timeout_s=900)
    for rank, (without, with_copies, num_bytes, write_s, fetch_s, every) in enumerate(measured):
        ratios = sorted(b / a for a, b in zip(without, with_copies, strict=True))
        mib = num_bytes / 2**20
        print(
            f"rank {rank}: {mib:.0f} MiB, step {statistics.median(without) * 1e3:.1f} ms without, "
            f"{statistics.median(with_copies) * 1e3:.1f} ms with copies after every {every}: "
            f"{statistics.median(ratios):.3f} times ({ratios[0]:.3f} to {ratios[-1]:.3f}); "
            f"writes {_rate(mib, write_s)}, fetches {_rate(mib, fetch_s)}"
        )


def _rate(mib: float, seconds: list[float]) -> str:
    """Of those copies that were whole at the end of a step."""
    return f"{mib / max(statistics.median(seconds), 1e-9):,.0f} MiB/s" if seconds else "longer than a step"


if __name__ == "__main__":
    main()
