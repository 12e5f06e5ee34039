"""Runs a plan on an emulated cluster and writes down what happened; ``hetero simulate --measure`` calls it.

On stdout it says how many of the emulated steps are done, a number per line.

A process of its own: the ranks are forked from it before torch has done anything, and ``hetero`` itself needs no torch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

# The processor computes, also on a host with GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from hetero.data.cost_models import plan_costs
from hetero.runtime import cpu_backend

# Before megatron.core is imported by anyone.
cpu_backend.install()

from hetero.cost.runtime_model import HETERO  # noqa: E402
from hetero.emulation.options import EmulationOptions  # noqa: E402
from hetero.emulation.ranks.local_launch import EmulatedLaunch, run_emulated  # noqa: E402
from hetero.errors import HeteroError  # noqa: E402
from hetero.plan.ir import Plan  # noqa: E402
from hetero.plan.validate import validate  # noqa: E402
from hetero.printable import printable_output  # noqa: E402
from hetero.runtime.options import DataParallelOptions  # noqa: E402
from hetero.serialization import load, save  # noqa: E402
from hetero.spec.cluster import ClusterSpec  # noqa: E402


@printable_output()
def main(argv: Sequence[str]) -> int:
    """Exit code 0, or 2 after an error that stderr tells."""
    parser = argparse.ArgumentParser(prog="python -m hetero.emulation", description=__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--cluster", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", type=Path, action="append", default=[])
    parser.add_argument("--data-sheets", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--time-scale", type=float)
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    args = parser.parse_args(argv)
    try:
        save(run_emulated(_emulated(args), timeout_s=args.timeout, on_step=_say_step), args.out)
    except HeteroError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _say_step(done: int) -> None:
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


def _emulated(args: argparse.Namespace) -> EmulatedLaunch:
    plan = load(Plan, args.plan)
    validate(plan)
    cluster = load(ClusterSpec, args.cluster)
    return EmulatedLaunch(
        plan=plan,
        cluster=cluster,
        costs=plan_costs(plan, cluster, profiles=args.profile, data_sheets=args.data_sheets),
        options=EmulationOptions(time_scale=args.time_scale, seq_length=args.sequence),
        data_parallel=DataParallelOptions(bucket_numel=HETERO.bucket_numel),
        num_steps=args.steps,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
