"""Declares the flags of ``hetero profile run``, for the command and for the process that measures."""

import argparse
from pathlib import Path

from hetero.errors import ConfigError
from hetero.plan.ir import DEFAULT_DROPOUT
from hetero.units import BYTES_OF_PRECISION

BUDGET_S = 600.0
LINK_SECONDS = 20.0
MICRO_BATCH_SIZES = (1, 2, 4, 8)
TPS = (1, 2, 4, 8)
RECOMPUTES = ("none", "selective", "full")
LAYERS = ("auto", "local", "transformer_engine")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        metavar="MODEL",
        help="model.yaml, or a Hugging Face model: its config.json, its folder, or its name in the local cache",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="write profiles here, and go on with those there are"
    )
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample (default: the model's most)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument(
        "--device-type",
        metavar="NAME",
        help="what the cluster file calls the device (default: by what CUDA calls it; processors are all cpu)",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="CLUSTER",
        help="cluster.yaml, whose names of devices profiles get: by the node's name where the file has it, else rank "
        "by rank, in the order of the file",
    )
    parser.add_argument(
        "--tp", type=int, nargs="+", metavar="N", help=f"default: those of {TPS} that the model can be cut into"
    )
    parser.add_argument(
        "--micro-batch-size", type=int, nargs="+", default=list(MICRO_BATCH_SIZES), metavar="N", help="default: 1 2 4 8"
    )
    parser.add_argument(
        "--recompute", nargs="+", choices=RECOMPUTES, default=list(RECOMPUTES), help="default: all of them"
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=list(BYTES_OF_PRECISION),
        help="a profile each; default: what a config.json says, else fp32",
    )
    parser.add_argument(
        "--transformer-impl",
        nargs="+",
        choices=LAYERS,
        default=["auto"],
        help="whose layers, a profile each; default: auto, those that a training would have",
    )
    dropouts = {"--hidden-dropout": "outputs of attention and MLP", "--attention-dropout": "attention weights"}
    for flag, dropped in dropouts.items():
        parser.add_argument(
            flag,
            type=float,
            default=DEFAULT_DROPOUT,
            metavar="P",
            help=f"share of {dropped} that is dropped, as hetero plan has it (default: %(default)s)",
        )
    parser.add_argument(
        "--budget-seconds",
        type=float,
        default=BUDGET_S,
        metavar="S",
        help=f"the most telling points come first; what there is no time for is left out (default: {BUDGET_S:g})",
    )
    parser.add_argument(
        "--link-seconds",
        type=float,
        default=LINK_SECONDS,
        metavar="S",
        help=f"on several ranks: measure links for so long, 0 for not at all (default: {LINK_SECONDS:g})",
    )
    parser.add_argument(
        "--share-devices",
        action="store_true",
        help="on several ranks: let more ranks than GPUs of a host share them, to try a launch out; the times mean "
        "nothing (NCCL 2.30 or newer)",
    )


def check_run_options(args: argparse.Namespace) -> None:
    """Check the flags of :func:`add_run_options`, and sort the lists.

    Raises:
        ConfigError: a value is out of its range.
    """
    for flag in ("--tp", "--micro-batch-size"):
        values = getattr(args, flag[2:].replace("-", "_"))
        if values is not None:
            if min(values) < 1:
                raise ConfigError(f"{flag} has {min(values)}, must be at least 1")
            setattr(args, flag[2:].replace("-", "_"), sorted(set(values)))
    if args.seq_length is not None and args.seq_length < 1:
        raise ConfigError(f"--seq-length is {args.seq_length}, must be at least 1")
    for flag in ("--hidden-dropout", "--attention-dropout"):
        share = getattr(args, flag[2:].replace("-", "_"))
        if not 0 <= share < 1:
            raise ConfigError(f"{flag} is {share:g}, must be at least 0 and below 1")
    if not args.budget_seconds > 0:
        raise ConfigError(f"--budget-seconds is {args.budget_seconds:g}, must be above 0")
    if not args.link_seconds >= 0:
        raise ConfigError(f"--link-seconds is {args.link_seconds:g}, must be at least 0")
    if args.cluster is not None and args.device_type is not None:
        raise ConfigError(f"--cluster and --device-type {args.device_type} exclude each other: leave one out")
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {args.out}: it is a file; name a folder, into which a profile of each precision goes")


def words_of_run(args: argparse.Namespace) -> list[str]:
    """The flags again, as they are typed."""
    words = ["--model", str(args.model), "--out", str(args.out)]
    for flag in ("--seq-length", "--device", "--device-type", "--cluster"):
        value = getattr(args, flag[2:].replace("-", "_"))
        words += [flag, str(value)] if value is not None else []
    for flag in ("--tp", "--micro-batch-size", "--recompute", "--precision", "--transformer-impl"):
        values = getattr(args, flag[2:].replace("-", "_"))
        words += [flag, *map(str, values)] if values is not None else []
    for flag in ("--hidden-dropout", "--attention-dropout", "--budget-seconds", "--link-seconds"):
        words += [flag, f"{getattr(args, flag[2:].replace('-', '_')):g}"]
    return words + ["--share-devices"] * args.share_devices
