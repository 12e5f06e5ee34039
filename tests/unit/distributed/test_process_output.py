"""A process whose output is a full disk, or a pipe that is closed, goes on and ends as it would have."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.distributed.process_output import ignore_output_errors
from tests.helpers.sources import ROOT

PRINTS = """\
import logging, os, sys, warnings
from hetero.distributed.process_output import ignore_output_errors
ignore_output_errors(fallback=int(sys.argv[1]) if sys.argv[1:] else None)
ignore_output_errors()
for number in range(3):
    print(f"line {number}", flush=True)
sys.stderr.write("on stderr\\n")
logging.warning("logged")
warnings.warn("warned")
print("x" * 20_000)
os.write(int(os.environ["DONE"]), b"done")
sys.exit(7)
"""


def run(*words: str, fds: tuple[int, ...] = (), **options: object) -> tuple[int, bool]:
    """The exit code of a process that prints, and whether it came to its end."""
    done, done_to = os.pipe()
    process = subprocess.run(
        [sys.executable, "-c", PRINTS, *words],
        env={**os.environ, "DONE": str(done_to), "PYTHONPATH": str(ROOT)},
        pass_fds=(done_to, *fds),
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )
    os.close(done_to)
    with os.fdopen(done, "rb") as file:
        return process.returncode, file.read() == b"done"


def test_output_on_a_full_disk() -> None:
    with Path("/dev/full").open("wb") as full:
        assert run(stdout=full, stderr=full) == (7, True)


def test_output_into_a_pipe_that_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run(stdout=writer, stderr=writer) == (7, True)
    os.close(writer)


def test_output_that_can_be_written_is_whole(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        assert run(stdout=file, stderr=file) == (7, True)
    text = (tmp_path / "out").read_text()
    assert text.startswith("line 0\nline 1\nline 2\non stderr\n")
    assert text.count("x") >= 20_000


def test_what_a_full_file_does_not_take_goes_elsewhere_in_whole_lines(tmp_path: Path) -> None:
    """The file has room for one line and a half."""
    limit = len("line 0\nlin")
    reader, other = os.pipe()
    with (tmp_path / "out").open("wb") as file:
        code = run(
            str(other),
            fds=(other,),
            stdout=file,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
    os.close(other)
    assert code == (7, True)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read(14) == b"line 1\nline 2\n"
    assert (tmp_path / "out").read_text() == "line 0\nlin"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_of_a_test_stays(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    stream = getattr(sys, name)
    ignore_output_errors()
    assert getattr(sys, name) is stream
