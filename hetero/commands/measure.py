"""``hetero simulate --measure`` runs a plan on an emulated cluster, to lay it beside its prediction."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.status import Status

from hetero.commands.console import console
from hetero.cost.simulation.simulator import Simulation
from hetero.emulation.options import EmulationOptions
from hetero.emulation.records import EmulatedRun
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.serialization import load

DEFAULT_STEPS = 2

DEFAULTS = EmulationOptions()

SLOWEST = 30.0
"""Wall seconds per emulated second that a machine may choose for itself before it counts as hanging."""


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Add ``--measure`` and the flags that go with it."""
    parser.add_argument(
        "--measure",
        action="store_true",
        help="run the plan on this machine's processor as well, at the cluster's emulated pace, and compare",
    )
    parser.add_argument(
        "--measure-steps", type=int, metavar="N", help=f"with --measure: emulated steps (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--time-scale",
        type=float,
        metavar="X",
        help="with --measure: wall seconds per emulated second (default: 1, or more if this machine is too slow)",
    )
    parser.add_argument(
        "--measure-seq-length",
        type=int,
        metavar="N",
        help=f"with --measure: tokens of a sample that are really computed (default: {DEFAULTS.seq_length})",
    )


def check_measure(args: argparse.Namespace) -> None:
    """Check the flags of :func:`add_measure` before anything is computed.

    Raises:
        ConfigError: a flag has no effect or a wrong value, or what it needs is not installed.
    """
    given = {"--measure-steps": args.measure_steps, "--time-scale": args.time_scale}
    given["--measure-seq-length"] = args.measure_seq_length
    for flag, value in given.items():
        if value is not None and not args.measure:
            raise ConfigError(f"{flag} {value:g} has no effect without --measure: add that, or leave {flag} out")
        if value is not None and value <= 0:
            raise ConfigError(f"{flag} is {value:g}, must be above 0")
    if args.measure:
        require("train", asked_by="--measure")


def measured(args: argparse.Namespace, simulation: Simulation) -> EmulatedRun:
    """Run the plan of a ``hetero simulate`` command line.

    Raises:
        ConfigError: it cannot be emulated, or this machine cannot keep up.
    """
    num_steps = args.measure_steps or DEFAULT_STEPS
    # Three times what is predicted; the emulation adds what starting takes.
    timeout_s = 3 * (args.time_scale or SLOWEST) * simulation.step_s * (num_steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-W", "ignore", "-m", "hetero.emulation", *_flags(args), "--out", str(out)]
        command += ["--steps", str(num_steps), "--timeout", str(timeout_s)]
        command += ["--time-scale", str(args.time_scale)] if args.time_scale else []
        with Status("running it at the emulated pace ...", console=console(stderr=True)):
            process = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if process.returncode:
            # Other ranks may have said before how the first one's end became theirs.
            *_, said = process.stderr.strip().splitlines() or [f"the emulation ended with {process.returncode}"]
            raise ConfigError(said)
        return load(EmulatedRun, out)


def _flags(args: argparse.Namespace) -> Sequence[str]:
    profiles = [text for path in args.profile for text in ("--profile", str(path))]
    switches = ["--data-sheets"] if args.data_sheets else []
    return [
        *("--plan", str(args.plan), "--cluster", str(args.cluster)),
        *("--sequence", str(args.measure_seq_length or DEFAULTS.seq_length)),
        *profiles,
        *switches,
    ]
