"""What a rank saves that builds its model to load it: seconds to build with initial weights and without, in turns.

python -m tests.bench.bench_building               a model of 124 million parameters on one rank
python -m tests.bench.bench_building --layers 2    a smaller one

The machine has to be quiet.
"""

import argparse
import statistics
import time

import torch

from hetero.distributed.process_groups import create_groups
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.training import build_trainer
from tests.helpers.commands import command_line
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks


def measure(rank: int, layers: int, turns: int) -> tuple[list[float], list[float], int]:
    """Seconds of each build with and without drawing, and the number of parameters."""
    model = gpt2_model(
        num_layers=layers,
        hidden_size=768,
        ffn_hidden_size=3072,
        num_attention_heads=12,
        num_query_groups=12,
        kv_channels=64,
        vocab_size=50257,
        padded_vocab_size=50304,
        max_position_embeddings=1024,
    )
    made = plan(model, [replica(stage(layers=(0, layers), ranks=(0,)))])
    config = parse_args(command_line(hetero_plan="given.json", global_batch_size=str(made.global_batch_size)))
    context = create_groups(made, device=torch.device("cpu"))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    size = 0
    for turn in range(2 * turns):
        draws = turn % 2 == 0
        began_s = time.perf_counter()
        trainer = build_trainer(config, context, draws_weights=draws)
        seconds[draws].append(time.perf_counter() - began_s)
        size = sum(tensor.numel() for _, tensor in trainer.parameters.values())
        del trainer
    return seconds[True], seconds[False], size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    (found,) = run_ranks(measure, 1, args.layers, args.turns)
    drawn, loaded, size = found
    ratio = statistics.median(a / b for a, b in zip(drawn, loaded, strict=True))
    print(f"{size / 1e6:.0f} million parameters, median of {args.turns} turns, seconds to build:")
    print(
        f"with initial weights {statistics.median(drawn):.2f}, without {statistics.median(loaded):.2f}: {ratio:.1f} x"
    )


if __name__ == "__main__":
    main()
