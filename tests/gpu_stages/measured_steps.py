"""Prints step time and memory of one rank and their prediction, each row as it is measured.

python -m tests.gpu_stages.measured_steps [--device cpu]
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence

from hetero.plan.ir import Precision
from hetero.units import GIB
from tests.gpu.measured_step import Workload, measured_step
from tests.gpu_stages.target import Target, add_target_options, target_of
from tests.helpers.gpu_ranks import run_on

WORKLOAD_LIMIT_S = 60

_TINY = Workload(
    precision="fp32", num_layers=2, hidden_size=64, seq_length=16, micro_batch_size=1, num_microbatches=2, num_steps=2
)
"""Of a rehearsal on a CPU."""


def list_workloads(target: Target) -> Iterator[Workload]:
    """Yield what is measured: half precision, wider and with all recomputed, and fp32."""
    half: Precision = target.half
    if target.device == "cpu":
        yield _TINY
        yield dataclasses.replace(_TINY, recompute="full")
        return
    yield Workload(precision=half)
    yield Workload(precision=half, hidden_size=2048, seq_length=2048)
    yield Workload(precision=half, recompute="full")
    yield Workload(precision="fp32")


def measured_row(target: Target, workload: Workload) -> str:
    """Return the row of one workload.

    Raises:
        AssertionError: a rank failed.
    """
    (found,) = run_on(target.device, measured_step, 1, target.device, workload, timeout_s=WORKLOAD_LIMIT_S)
    cells = (
        *(workload.precision, workload.recompute),
        f"{workload.num_layers} x {workload.hidden_size}, sequence {workload.seq_length}",
        f"{workload.num_microbatches} of {workload.micro_batch_size}",
        f"{found.step_s:.4f}",
        f"{found.predicted_s:.4f}" if found.predicted_s is not None else "-",
        *(f"{found.peak_bytes / GIB:.2f}", f"{found.predicted_bytes / GIB:.2f}"),
    )
    return f"| {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit code 1 if a workload could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target_options(parser)
    target = target_of(parser.parse_args(argv))
    print("| precision | recompute | layers | microbatches | step s | predicted s | reserved GiB | predicted GiB |")
    print("|---|---|---|---|--:|--:|--:|--:|", flush=True)
    failed = False
    for workload in list_workloads(target):
        try:
            print(measured_row(target, workload), flush=True)
        except AssertionError as error:
            failed = True
            print(
                f"\n**{workload.precision}, {workload.recompute}: {str(error).splitlines()[-1][:200]}**\n", flush=True
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
