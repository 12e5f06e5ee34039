"""Has every program of ``tests/bench`` say what it can do, in a process without torch: those that need it say so.

python -m tests.helpers.bench_programs     one line of JSON: by program what --help says, or null where torch is missing
"""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path
from unittest import mock

BENCH = Path(__file__).parents[1] / "bench"


def programs() -> list[str]:
    """The names of all modules that are called like a program."""
    return sorted(path.stem for path in BENCH.glob("bench_*.py"))


def help_of(program: str) -> str | None:
    """What it says to ``--help``; ``None`` if it needs torch, which this process has not."""
    try:
        module = importlib.import_module(f"tests.bench.{program}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        return None
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [program, "--help"]),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        module.main()
    return said.getvalue()


def _main() -> None:
    # Nothing imports it from here on, and it takes seconds less.
    with mock.patch.dict(sys.modules, {"torch": None}):
        found = {program: help_of(program) for program in programs()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
