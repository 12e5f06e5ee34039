"""Writes the command lines that measure a profile, and ask the same again with it."""

import argparse
import re
import shlex
from pathlib import Path

from hetero.cost.wanted_profile import WantedProfile
from hetero.plan.ir import DEFAULT_DROPOUT, Plan
from hetero.planner.problem import Problem
from hetero.printable import printable
from hetero.profiling.profile_file import model_name, profile_file_name

PRECISION, GOAL = "fp32", "time"
"""What ``hetero plan`` plans for if nothing is said."""

UNKNOWN_MODEL = "MODEL.yaml"
"""Stands for the file of a model whose plan does not say what it was made from."""


def plan_again(args: argparse.Namespace, wanted: WantedProfile) -> tuple[str, str]:
    """The command lines that measure a profile, and plan the same with it."""
    given = ["--cluster", args.cluster, "--model", args.model, "--global-batch-size", args.global_batch_size]
    given += [] if args.seq_length is None else ["--seq-length", args.seq_length]
    given += [] if args.precision == PRECISION else ["--precision", args.precision]
    switches = ("fp8", "use_distributed_optimizer", "no_split_backward", "no_interleave")
    given += [f"--{name.replace('_', '-')}" for name in switches if getattr(args, name)]
    given += [] if args.objective == GOAL else ["--objective", args.objective]
    given += [] if args.budget_per_hour is None else ["--budget-per-hour", f"{args.budget_per_hour:g}"]
    for dropout in ("hidden_dropout", "attention_dropout"):
        share = getattr(args, dropout)
        given += [] if share == DEFAULT_DROPOUT else [f"--{dropout.replace('_', '-')}", f"{share:g}"]
    given += [] if args.offload == Problem.offload else ["--offload", args.offload]
    given += [] if args.processes is None else ["--processes", args.processes]
    given += [] if args.host_memory_gib is None else ["--host-memory-gib", args.host_memory_gib]
    measuring, profile = profile_run(wanted, model=str(args.model))
    return measuring, shlex.join(["hetero", "plan", *map(str, given), *_profiles_again(args, profile)])


def simulate_again(args: argparse.Namespace, plan: Plan, wanted: WantedProfile) -> tuple[str, str]:
    """The command lines that measure a profile, and simulate the same with it."""
    measuring, profile = profile_run(wanted, model=model_of(plan))
    given = [str(args.plan), "--cluster", str(args.cluster)]
    return measuring, shlex.join(["hetero", "simulate", *given, *_profiles_again(args, profile)])


def profile_run(wanted: WantedProfile, *, model: str) -> tuple[str, Path]:
    """The command line that measures a profile on one of its devices, and the file that it writes."""
    folder = Path("profiles")
    given = ["--model", model, "--seq-length", wanted.seq_length, "--precision", wanted.precision]
    given += ["--device-type", wanted.device, "--tp", *wanted.tps, "--micro-batch-size", *wanted.micro_batch_sizes]
    given += ["--hidden-dropout", f"{wanted.hidden_dropout:g}", "--attention-dropout", f"{wanted.attention_dropout:g}"]
    line = shlex.join(["hetero", "profile", "run", *map(str, given), "--out", str(folder)])
    name = profile_file_name(
        model_name(Path(model)), device=wanted.device, precision=wanted.precision, layers=wanted.layers
    )
    return printable(f"{line}    # on one {wanted.device}"), folder / name


def model_of(plan: Plan) -> str:
    """The model that a plan was made from, as its maker typed it; :data:`UNKNOWN_MODEL` where the plan does not say."""
    command = plan.provenance.shown_command if plan.provenance is not None else ""
    found = re.search(r"\s--model[ =]('[^']+'|\S+)", command)
    return UNKNOWN_MODEL if found is None else found[1].strip("'")


def _profiles_again(args: argparse.Namespace, profile: Path) -> list[str]:
    flags = [text for path in (*args.profile, profile) for text in ("--profile", str(path))]
    return [*flags, *(["--data-sheets"] if args.data_sheets else [])]
