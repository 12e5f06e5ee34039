"""Declares the flags of ``hetero doctor``, for the command and for the process that looks."""

import argparse
from pathlib import Path

LINK_SECONDS = 20.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--plan", type=Path, metavar="FILE", help="under torchrun: send a first message over each channel of this plan"
    )
    parser.add_argument(
        "--link-seconds",
        type=float,
        default=LINK_SECONDS,
        metavar="SECONDS",
        help=f"under torchrun: measure links for so long, 0 for not at all (default: {LINK_SECONDS:g})",
    )
    # Written by `hetero doctor --etcd`, which has looked at the job itself.
    parser.add_argument("--job-findings", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--share-devices",
        action="store_true",
        help="under torchrun: let more ranks than GPUs of a host share them, in turns (NCCL 2.30 or newer)",
    )


def words_of(args: argparse.Namespace) -> list[str]:
    """The flags again, as they are typed."""
    return [
        *(["--plan", str(args.plan)] if args.plan is not None else []),
        *("--link-seconds", str(args.link_seconds)),
        *(["--share-devices"] if args.share_devices else []),
        *(["--job-findings", str(args.job_findings)] if args.job_findings is not None else []),
    ]
