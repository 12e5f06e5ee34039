"""Plants one fault in a copy of the tree and runs the tests there, until one of them fails."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.planted_faults.fault import ROOT, Fault

WITHOUT_THESE = "--ignore=tests/planted_faults"
"""What looks for the faults' places in the source would find every fault."""

IN_EVERY_RUN = "--in-every-run"
"""Of pytest: no case that rotates."""

LONGEST_RUN_S = 3600
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
_NONE_FAILED, _SOME_FAILED, _NOT_COLLECTED, _NONE_RAN = 0, 1, 2, 5


class TrialError(Exception):
    """Tests could not be run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the tests made of a fault.

    found_by: pytest's name of the first test that failed, ``None`` if all passed.
    seconds: until then, of the run of pytest that found it.
    hinted: a hinted test found it; otherwise it took the whole suite.
    """

    fault: Fault
    found_by: str | None
    seconds: float
    hinted: bool


def try_fault(fault: Fault, sound: Path, *, options: Sequence[str], hints_only: bool = False) -> Verdict:
    """Run the hinted tests on a tree with ``fault`` and, if these pass, the whole suite.

    Args:
        sound: the tree without it.
        options: of pytest, those of the normal run.

    Raises:
        FaultError: it cannot be planted.
        TrialError: no test ran.
    """
    began_s = time.monotonic()
    with planted(fault, sound) as tree:
        for tests in (fault.hints,) if hints_only else (fault.hints, ("tests",)):
            began_s = time.monotonic()
            failed = failing(tree, tests, ["-x", *options])
            if failed:
                seconds = time.monotonic() - began_s
                return Verdict(fault=fault, found_by=failed[0], seconds=seconds, hinted=tests is fault.hints)
    return Verdict(fault=fault, found_by=None, seconds=time.monotonic() - began_s, hinted=False)


def failing(tree: Path, tests: Sequence[str], options: Sequence[str]) -> list[str]:
    """The tests that fail in ``tree``.

    Raises:
        TrialError: no test ran, although cases that rotate may.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", WITHOUT_THESE, *options, *tests]
    code, output = _completed(command, tree)
    if code == _NONE_FAILED or (code == _NONE_RAN and IN_EVERY_RUN in options):
        return []
    failed = list(dict.fromkeys(_FAILED.findall(output)))
    if code not in (_SOME_FAILED, _NOT_COLLECTED) or not failed:
        raise TrialError(f"{' '.join(command)}: exit code {code}\n{output[-3000:]}")
    return failed


@contextmanager
def sound_tree() -> Iterator[Path]:
    """A copy of what git tracks, as it is now, and of what it would track; the virtual environment is a link."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory(prefix="sound-tree-") as folder:
        tree = Path(folder) / "tree"
        for name in filter(None, listed.stdout.decode().split("\0")):
            source, target = ROOT / name, tree / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        # Scripts look for it beside themselves.
        (tree / ".venv").symlink_to(sys.prefix)
        yield tree


@contextmanager
def planted(fault: Fault, sound: Path) -> Iterator[Path]:
    """A copy of the ``sound`` tree with ``fault``."""
    with tempfile.TemporaryDirectory(prefix="planted-fault-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(sound, tree, symlinks=True)
        (tree / fault.file).write_text(fault.planted(sound), encoding="utf-8")
        yield tree


def _completed(command: Sequence[str], tree: Path) -> tuple[int, str]:
    """Exit code and output of a command on the modules of ``tree``; none of its processes outlives it."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_RUN_S)
    except subprocess.TimeoutExpired:
        raise TrialError(f"{' '.join(command)}: not over after {LONGEST_RUN_S} s") from None
    finally:
        _kill_group(process.pid)
        process.wait()
    return process.returncode, output


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
