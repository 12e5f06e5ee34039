"""How long a step takes on four processes with unequal shares of a core, beside its prediction and the uniform plan.

python -m tests.bench.bench_unequal_cpus FOLDER
python -m tests.bench.bench_unequal_cpus FOLDER --cores 0.2 0.2 0.5 0.5 --batch 32 --rounds 2

The whole chain, as a user would go it: discover, profile, plan, launch. Nothing is emulated: each process is a node in
a control group with a quota of processor time (tests/helpers/cpu_quotas.py says what that asks for), and is measured by
the clock. The devices have the names that discovery gives them, and nobody has heard of them before: their profiles,
and their links over gloo, are measured in those groups. Files of the chain stay in FOLDER. It takes seven minutes.
"""

import argparse
import os
import re
import statistics
import sys
import time
from pathlib import Path

from hetero.plan.ir import Plan
from hetero.serialization import load
from hetero.spec.profile import Profile
from tests.helpers.commands import Finished
from tests.helpers.cpu_quotas import mechanism, quotas
from tests.helpers.models import gpt2_model
from tests.helpers.unequal_cpus import NO_DROPOUT, UnequalCpus, with_links

MODEL = gpt2_model(
    num_layers=8,
    hidden_size=256,
    kv_channels=64,
    num_attention_heads=4,
    num_query_groups=4,
    ffn_hidden_size=1024,
    vocab_size=509,
    padded_vocab_size=512,
    max_position_embeddings=128,
)
"""6.5 million parameters. A pass of a layer takes several times the period of a quota on the smallest share."""

TRAINING = "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --num-workers 0 --log-interval 1"
NOT_COUNTED = 2
"""Steps at the beginning, in which torch allocates and connections are made."""


def measured_steps(run: Finished) -> list[float]:
    """Seconds of each step that counts, as the log has them."""
    found = [float(ms) / 1e3 for ms in re.findall(r"\| step time ([\d.]+) ms", run.stdout)]
    return found[NOT_COUNTED:]


def predicted_s(plan: Path) -> float:
    """As the plan says it, which ``hetero plan`` has written there."""
    provenance = load(Plan, plan).provenance
    assert provenance is not None
    return provenance.prediction.step_s


def told_profiles(profiles: list[Path]) -> None:
    for path in profiles:
        profile = load(Profile, path)
        blocks = ", ".join(
            f"{each.micro_batch_size}: {each.forward_s * 1e3:.0f} + {each.backward_s * 1e3:.0f}"
            for each in sorted(profile.times, key=lambda each: each.micro_batch_size)
            if each.kind == "block"
        )
        print(f"{profile.device}: forward + backward of a block in ms, by samples: {blocks}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--cores", type=float, nargs="+", default=[0.2, 0.2, 0.5, 0.5], help="of each process, those alike side by side"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="launches of each plan, in turns")
    parser.add_argument("--budget-seconds", type=float, default=60.0, help="of the profiles")
    args = parser.parse_args()
    by = mechanism()
    if by is None:
        sys.exit("this user may make no control group with a quota of processor time: run it as root, on Linux")
    args.folder.mkdir(parents=True, exist_ok=True)
    print(f"{by}, {args.cores} cores of {os.cpu_count()}; load {os.getloadavg()[0]:.1f} before", flush=True)
    with quotas(args.cores) as nodes:
        chain = UnequalCpus(folder=args.folder, nodes=nodes, model=MODEL)
        cluster = chain.discover()
        print(f"found: {', '.join(f'{each.count} x {each.device}' for each in cluster.node_types)}", flush=True)
        sizes = ("--micro-batch-size", "1", "2", "4", "8", "--recompute", "none")
        limit_s = args.budget_seconds + 300
        profiles, links = chain.profile(cluster, *sizes, budget_s=args.budget_seconds, link_s=20, timeout_s=limit_s)
        told_profiles(profiles)
        for each in links.between_nodes:
            print(f"{' and '.join(each.devices)}: {each.link.bandwidth_gb_per_s} GB/s, {each.link.latency_us} us")
        plans = chain.plan(with_links(cluster, links), profiles, batch=args.batch, limit_s=20)
        flags = [*TRAINING.split(), "--train-iters", str(args.steps), *NO_DROPOUT, "--distributed-backend", "gloo"]
        seconds: dict[Path, list[float]] = {plan: [] for plan in plans}
        for number in range(args.rounds):
            for plan, steps in seconds.items():
                began_s = time.monotonic()
                found = measured_steps(chain.launch(plan, *flags))
                steps += found
                print(
                    f"round {number + 1}, {plan.stem}: {', '.join(f'{each:.2f}' for each in found)} s; load "
                    f"{os.getloadavg()[0]:.1f}, the launch took {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
    for plan, steps in seconds.items():
        median_s, said_s = statistics.median(steps), predicted_s(plan)
        low, high = min(steps), max(steps)
        print(
            f"{plan.stem}: measured {median_s:.3f} s ({low:.3f} to {high:.3f}, {len(steps)} steps), predicted "
            f"{said_s:.3f} s, off by {said_s / median_s - 1:+.1%}"
        )
    best, uniform = (statistics.median(steps) for steps in seconds.values())
    print(f"the plan against the uniform one: {uniform / best:.3f}x")


if __name__ == "__main__":
    main()
