"""What previewing and committing an update on the host costs over a direct one, by threads and size of chunks.

python tests/bench/bench_host_adamw.py                        powers of two up to all cores
python tests/bench/bench_host_adamw.py --threads 8 --seconds 60

A direct update changes the state and lets the weights leave. A preview leaves the state and lets the weights leave, the
commit behind it changes the state alone: together they do what the direct one does, and the ratio is their price. The
three take turns, so that what else the machine does meets all of them; it should do nothing else.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from hetero.profiling.host_hardware import processor_name, usable_cores
from hetero.profiling.host_rates import UPDATE, UPDATE_NUMEL, thread_counts
from hetero.runtime.host_adamw import BoundThreads, HostAdamW

CHUNKS = (2**14, 2**16, 2**18, 2**20)

LEAST_ROUNDS = 3


def measure(threads: BoundThreads, chunk_numel: int, numel: int, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of direct updates, and of a preview with its commit, round by round."""
    host = HostAdamW(torch.full((numel,), 0.01), threads, previews=True, chunk_numel=chunk_numel)
    gradients, weights = torch.full((numel,), 0.001), torch.empty(numel, dtype=torch.bfloat16)
    direct_s: list[float] = []
    previewed_s: list[float] = []
    end_s = time.perf_counter() + seconds
    # The first round warms up.
    while len(direct_s) < 1 + LEAST_ROUNDS or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        host.commit(gradients, UPDATE, weights=weights)
        direct_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        host.preview(gradients, UPDATE, weights=weights)
        if not host.commit(gradients, UPDATE, weights=weights):
            raise AssertionError("the preview was right")
        previewed_s.append(time.perf_counter() - began_s)
    return direct_s[1:], previewed_s[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, action="append", help="may be given several times")
    parser.add_argument("--numel", type=int, default=UPDATE_NUMEL, help="parameters of the range")
    parser.add_argument("--seconds", type=float, default=30.0, help="shared by all rows")
    args = parser.parse_args()
    cores = usable_cores()
    counts = args.threads or thread_counts(len(cores))
    print(f"{processor_name()}, {len(cores)} usable cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    print(f"{args.numel} parameters, fp32 state, bf16 weights, clipped; medians")
    print("threads   chunk  direct 1e6/s  preview+commit 1e6/s  ratio  quartiles of it  rounds")
    for num_threads in counts:
        with BoundThreads(cores[:num_threads]) as threads:
            for chunk_numel in CHUNKS:
                share_s = args.seconds / len(counts) / len(CHUNKS)
                direct_s, previewed_s = measure(threads, chunk_numel, args.numel, share_s)
                ratios = [both / alone for both, alone in zip(previewed_s, direct_s, strict=True)]
                first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
                rates = [args.numel / statistics.median(each) / 1e6 for each in (direct_s, previewed_s)]
                print(
                    f"{num_threads:7} {chunk_numel:7}  {rates[0]:12.0f}  {rates[1]:20.0f}  {median:5.2f}"
                    f"  {first:.2f} to {third:.2f}     {len(ratios):6}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
