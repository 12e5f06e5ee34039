"""Writes the command line that asks the same again with one profile more, for whoever has measured something."""

import argparse
import shlex

from hetero.plan.ir import DEFAULT_DROPOUT
from hetero.planner.problem import Problem

PRECISION, GOAL = "fp32", "time"
"""What ``hetero plan`` plans for if nothing is said."""


def plan_again(args: argparse.Namespace, profile: str) -> str:
    """The command line that plans the same with one profile more."""
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
    given += [] if args.host_memory_gib is None else ["--host-memory-gib", args.host_memory_gib]
    return shlex.join(["hetero", "plan", *map(str, given), *_profiles_again(args, profile)])


def simulate_again(args: argparse.Namespace, profile: str) -> str:
    """The command line that simulates the same with one profile more."""
    return shlex.join(
        ["hetero", "simulate", str(args.plan), "--cluster", str(args.cluster), *_profiles_again(args, profile)]
    )


def _profiles_again(args: argparse.Namespace, profile: str) -> list[str]:
    flags = [text for path in (*args.profile, profile) for text in ("--profile", str(path))]
    return [*flags, *(["--data-sheets"] if args.data_sheets else [])]
