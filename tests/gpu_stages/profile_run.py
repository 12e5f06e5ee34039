"""Profiles the device with the model of :mod:`tests.gpu_stages.wide_step`.

python -m tests.gpu_stages.profile_run --seconds 30 --out runs/gpu
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hetero.cli import main as hetero
from hetero.serialization import save
from tests.gpu_stages.target import add_target_options, target_of
from tests.gpu_stages.wide_step import PROFILES, wide_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hetero profile run`` and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", required=True, help="budget of the profile")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    add_target_options(parser)
    arguments = parser.parse_args(argv)
    target = target_of(arguments)
    model = arguments.out / "wide_model.json"
    save(wide_model(target), model)
    points = "--tp 1 --micro-batch-size 1 2 --recompute none full --hidden-dropout 0 --attention-dropout 0"
    return hetero(
        [
            *("profile", "run", "--model", str(model), "--device", target.device, "--precision", target.half),
            *("--transformer-impl", "local", "--budget-seconds", arguments.seconds, *points.split()),
            *("--out", str(arguments.out / PROFILES)),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
