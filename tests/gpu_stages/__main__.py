"""Runs the stages of a GPU run and prints its report. ``scripts/test_gpu.sh`` prepares the environment and calls it.

    python -m tests.gpu_stages --list
    python -m tests.gpu_stages --stages experts ramp-up --out runs/gpu
    python -m tests.gpu_stages --device cpu                 a rehearsal without a GPU

Exit code 1 if a stage failed or was over its limit, or if none ran; 2 for wrong options;
128 and its number after a signal.
"""

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.gpu_stages.stages import list_stages, select_stages
from tests.gpu_stages.target import add_target_options, target_of

MOST_TOGETHER = 6
"""Stages that share a device at most; each takes some GiB of its memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages that ``argv`` names."""
    arguments = _parser().parse_args(argv)
    target = target_of(arguments)
    try:
        stages = select_stages(list_stages(target, str(arguments.out)), arguments.stages)
    except ValueError as error:
        print(f"scripts: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        for stage in stages:
            print(f"{stage.name:18} {stage.limit_s:4g} s  {stage.shows}")
        return 0
    # Names of stages are checked before anything is installed.
    from tests.gpu_stages.run import FolderInUseError, RunOptions, StageRun  # noqa: PLC0415

    options = RunOptions(
        target=target,
        out=arguments.out.resolve(),
        together=arguments.together,
        limit_scale=arguments.limit_scale,
        total_s=60 * arguments.minutes if arguments.minutes is not None else None,
    )
    try:
        passed = StageRun(options).run(stages)
    except FolderInUseError as error:
        print(f"scripts: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{arguments.out}, so the run has ended: free space, or name another folder by --out"
        print(f"scripts: {error}: results cannot be written into {where}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit) as ended:
        code = 128 + signal.SIGINT if isinstance(ended, KeyboardInterrupt) else ended.code
        print(f"scripts: ended by a signal; the stages so far are in {arguments.out}/report.md", file=sys.stderr)
        raise SystemExit(code) from None
    print(f"== report, to paste into an issue: {arguments.out}/report.md")
    print((options.out / "report.md").read_text(encoding="utf-8"))
    return 0 if passed else 1


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _positive_count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_stages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(parser)
    parser.add_argument("--stages", nargs="+", default=[], metavar="NAME", help="run only these, in this order")
    parser.add_argument("--list", action="store_true", help="print the stages with their limits, and run none")
    parser.add_argument(
        "--minutes",
        type=_positive,
        metavar="N",
        help="end after N minutes: the stage that runs then is killed, later ones are not run (default: no limit)",
    )
    parser.add_argument(
        "--together",
        type=_positive_count,
        default=max(1, min(MOST_TOGETHER, (os.cpu_count() or 1) // 2)),
        metavar="N",
        help=f"stages at a time, of those that measure no time (default: half the cores, at most {MOST_TOGETHER})",
    )
    parser.add_argument(
        "--limit-scale", type=_positive, default=1.0, metavar="X", help="multiply the stages' limits by X (default: 1)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="results (default: runs/gpu)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
