"""``hetero simulate --measure`` runs a plan on an emulated cluster, to lay it beside its prediction."""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.command_line import ABOVE_0, COUNT
from hetero.console import console
from hetero.cost.simulation.simulator import Simulation
from hetero.emulation.options import EmulationOptions
from hetero.emulation.records import EmulatedRun
from hetero.errors import ConfigError
from hetero.extras import require
from hetero.progress import WorkProgress
from hetero.serialization import load, read_text

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
        "--measure-steps", type=COUNT, metavar="N", help=f"with --measure: emulated steps (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--time-scale",
        type=ABOVE_0,
        metavar="X",
        help="with --measure: wall seconds per emulated second (default: 1, or more if this machine is too slow)",
    )
    parser.add_argument(
        "--measure-seq-length",
        type=COUNT,
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
    if args.measure:
        require("train", asked_by="--measure")


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedPlan:
    """A plan in a file, and how it is to be emulated.

    step_s: the predicted seconds of a step, by which a run that hangs is told from one that is slow.
    num_steps: emulated steps.
    time_scale, seq_length: as :class:`hetero.emulation.options.EmulationOptions` has them.
    """

    plan: Path
    cluster: Path
    step_s: float
    num_steps: int
    time_scale: float | None
    seq_length: int
    profiles: tuple[Path, ...]
    data_sheets: bool


def measured(args: argparse.Namespace, simulation: Simulation) -> EmulatedRun:
    """Run the plan of a ``hetero simulate`` command line.

    Raises:
        ConfigError: it cannot be emulated, or this machine cannot keep up.
    """
    asked = EmulatedPlan(
        plan=args.plan,
        cluster=args.cluster,
        step_s=simulation.step_s,
        num_steps=args.measure_steps or DEFAULT_STEPS,
        time_scale=args.time_scale,
        seq_length=args.measure_seq_length or DEFAULTS.seq_length,
        profiles=tuple(args.profile),
        data_sheets=args.data_sheets,
    )
    # The step to warm up counts: it takes as long as the others.
    total = 1 + asked.num_steps
    with WorkProgress("measuring", total=total, text="starting", console=console(stderr=True)) as progress:
        return emulated_run(
            asked,
            on_step=lambda done: progress.show(1 + done, f"{done} of {asked.num_steps} steps at the emulated pace"),
        )


def emulated_run(asked: EmulatedPlan, *, on_step: Callable[[int], None] = lambda _: None) -> EmulatedRun:
    """Run a plan at the emulated pace of its cluster, in processes of their own.

    Args:
        on_step: called after each step, with the number of emulated steps that are done: 0 after the one to warm up.

    Raises:
        ConfigError: it cannot be emulated, or this machine cannot keep up.
    """
    # Three times what is predicted; the emulation adds what starting takes.
    timeout_s = 3 * (asked.time_scale or SLOWEST) * asked.step_s * (asked.num_steps + 1)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-W", "ignore", "-m", "hetero.emulation", *_flags(asked), "--out", str(out)]
        command += ["--steps", str(asked.num_steps), "--timeout", str(timeout_s)]
        command += ["--time-scale", str(asked.time_scale)] if asked.time_scale else []
        errors = Path(folder) / "stderr"
        with (
            errors.open("w") as stderr,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
        ):
            try:
                for line in process.stdout or ():
                    if line.strip().isdecimal():
                        on_step(int(line))
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            # Other ranks may have said before how the first one's end became theirs.
            told = read_text(errors).strip().splitlines()
            *_, said = told or [f"the emulation ended with {process.returncode}"]
            raise ConfigError(said)
        return load(EmulatedRun, out)


def _flags(asked: EmulatedPlan) -> Sequence[str]:
    profiles = [text for path in asked.profiles for text in ("--profile", str(path))]
    switches = ["--data-sheets"] if asked.data_sheets else []
    return [
        *("--plan", str(asked.plan), "--cluster", str(asked.cluster), "--sequence", str(asked.seq_length)),
        *profiles,
        *switches,
    ]
