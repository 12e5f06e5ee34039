"""A folder with the rules of these tests, their helpers, and tests of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.sources import ROOT


def small_suite(folder: Path) -> Path:
    """Fill ``folder``; its own tests go into ``tests``."""
    tests = folder / "tests"
    for name in ("conftest.py", "helpers"):
        source = ROOT / "tests" / name
        (tests / name).parent.mkdir(exist_ok=True)
        shutil.copytree(source, tests / name) if source.is_dir() else shutil.copy(source, tests / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_suite(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What pytest says of the tests there."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
