"""The two lanes of ``scripts/test.sh``: which tests the second one has, on what it runs, and what each says at its end.

python -m tests.helpers.lanes check              # is this environment the second lane's?
python -m tests.helpers.lanes describe FOLDER    # versions, and the results of the workers that shared FOLDER
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath

from packaging.requirements import Requirement

from tests.helpers.sources import ROOT

NEWEST_STACK: dict[str, tuple[str, ...]] = {
    "quick start": ("e2e/test_quickstart.py",),
    "layouts": ("dist/test_layouts.py",),
    "split backward": ("dist/test_split_backward.py", "unit/runtime/test_layer_spec.py"),
    "stock megatron-core": ("dist/test_stock_megatron.py",),
    "TransformerEngine": ("dist/test_transformer_engine.py", "unit/runtime/test_layer_choice.py"),
    "checkpoints": (
        *("unit/checkpoint", "dist/test_checkpoint_save.py", "dist/test_checkpoint_torch_dist.py"),
        *("dist/test_huggingface_training.py", "dist/test_resume.py"),
    ),
    "data": ("unit/pretrain/test_core_datasets.py",),
    "flags": ("unit/pretrain/cli", "e2e/test_pretrain.py", "e2e/test_pretrain_errors.py"),
    "bits": ("stacks/test_bits.py",),
    "installation": ("test_wheels.py", "test_lanes.py"),
}
"""Files and folders below ``tests`` that the second lane runs, by what they show."""

OUTCOMES = ("passed", "failed", "error", "skipped")
"""Of pytest's categories, those that a lane's line counts."""

NEWEST_PYTHON = (3, 12)


def is_in_newest_stack(test_file: Path) -> bool:
    """Return whether the second lane runs this file."""
    inside = test_file.relative_to(ROOT / "tests") if test_file.is_relative_to(ROOT / "tests") else PurePath()
    return any(inside.is_relative_to(place) for places in NEWEST_STACK.values() for place in places)


def note_outcomes(folder: Path, outcomes: Mapping[str, int]) -> None:
    """Keep one worker's number of tests per category, in the folder that the workers of a run share."""
    (folder / f"outcomes-{os.getpid()}.json").write_text(json.dumps(dict(outcomes)), encoding="utf-8")


def describe(folder: Path) -> str:
    """Return the line of a lane: what it ran with, and the workers' results together."""
    total: Counter[str] = Counter()
    for noted in folder.glob("outcomes-*.json"):
        total.update(json.loads(noted.read_text(encoding="utf-8")))
    results = ", ".join(f"{total[name]:,} {name}" for name in OUTCOMES if total[name] or name == "passed")
    installed = {name: installed_version(name) for name in ("megatron-core", "torch")}
    stack = [f"Python {sys.version.split()[0]}", *(f"{name} {number}" for name, number in installed.items())]
    stack.append(f"Triton {triton}" if (triton := installed_version("triton")) else "no Triton")
    return f"{', '.join(stack)}: {results}"


def problems_of_newest_stack() -> list[str]:
    """Return how this environment differs from what the second lane is for; empty if it does not."""
    pinned = pinned_versions()
    wanted = {"megatron-core": pinned["megatron-core"], "torch": pinned["torch"], "triton": None}
    found = {name: (installed_version(name) or "").partition("+")[0] or None for name in wanted}
    problems = [
        f"{name} is {found[name] or 'not installed'}, must be {number or 'missing'}"
        for name, number in wanted.items()
        if found[name] != number
    ]
    if sys.version_info[:2] != NEWEST_PYTHON:
        problems.insert(0, f"Python is {sys.version.split()[0]}, must be {'.'.join(map(str, NEWEST_PYTHON))}")
    return problems


def pinned_versions(python: str = ".".join(map(str, NEWEST_PYTHON))) -> dict[str, str]:
    """Return what ``constraints.txt`` pins for this version of Python, by the name of the package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    environment = {"python_version": python}
    return {
        pin.name: next(iter(pin.specifier)).version
        for pin in pins
        if pin.marker is None or pin.marker.evaluate(environment)
    }


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main(argv: Sequence[str]) -> int:
    if argv[0] == "describe":
        print(describe(Path(argv[1])))
        return 0
    for problem in (problems := problems_of_newest_stack()):
        print(
            f"scripts: the second lane's environment: {problem}; to have it made again: rm -r .venv-newest",
            file=sys.stderr,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
