"""``hetero simulate --measure``: a plan on an emulated cluster, beside its prediction."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.status import Status

from hetero.commands.console import console
from hetero.cost.simulator import Simulation
from hetero.emulation.records import EmulatedRun
from hetero.errors import ConfigError
from hetero.serialization import load

FIXED_S = 120.0
"""Wall seconds that starting and warming up may take beside the emulated steps."""


def add_measure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the plan on this machine's processor as well, at the cluster's emulated pace, and compare",
    )
    parser.add_argument("--measure-steps", type=int, default=2, metavar="N", help="emulated steps (default: 2)")
    parser.add_argument(
        "--time-scale", type=float, default=1.0, metavar="X", help="wall seconds per emulated second (default: 1)"
    )
    parser.add_argument(
        "--measure-seq-length", type=int, default=32, metavar="N", help="tokens of a sample that are really computed"
    )


def measured(args: argparse.Namespace, simulation: Simulation) -> EmulatedRun:
    """Run the plan of a ``hetero simulate`` command line.

    Raises:
        ConfigError: it cannot be emulated, or this machine cannot keep up.
    """
    if args.measure_steps < 1:
        raise ConfigError(f"--measure-steps is {args.measure_steps}, must be at least 1")
    # Three times what is predicted, and the warm-up.
    timeout_s = FIXED_S + 3 * args.time_scale * simulation.step_s * (args.measure_steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-W", "ignore", "-m", "hetero.emulation", *_flags(args), "--out", str(out)]
        command += ["--timeout", str(timeout_s)]
        with Status("running it at the emulated pace ...", console=console(stderr=True)):
            process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if process.returncode:
            raise ConfigError(process.stderr.strip() or f"the emulation ended with exit code {process.returncode}")
        return load(EmulatedRun, out)


def _flags(args: argparse.Namespace) -> Sequence[str]:
    profiles = [text for path in args.profile for text in ("--profile", str(path))]
    switches = [
        flag
        for flag, given in (
            ("--data-sheets", args.data_sheets),
            ("--use-distributed-optimizer", args.use_distributed_optimizer),
        )
        if given
    ]
    return [
        *("--plan", str(args.plan), "--cluster", str(args.cluster)),
        *("--steps", str(args.measure_steps), "--time-scale", str(args.time_scale)),
        *("--sequence", str(args.measure_seq_length)),
        *profiles,
        *switches,
    ]
