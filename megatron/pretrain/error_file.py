"""Tells the launcher why a process fails: torchrun shows it last, where otherwise it says only that somebody failed."""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from hetero.distributed.process_exit import EXIT_CODE
from hetero.errors import DataError, DeviceMemoryError, HeteroError, MembershipError, PlanMemoryError
from hetero.printable import printable, printable_lines
from hetero.shown_secrets import without_secrets

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun and its likes look, once a process has failed (torch.distributed.elastic.multiprocessing.errors)."""

_SECONDS_TO_REPORT = 30.0
"""Longer than the ranks of a busy host differ in starting up. A launcher cuts it short once rank 0 has failed."""


def error_file(environment: Mapping[str, str]) -> Path | None:
    """The file that the launcher of this process looks into, ``None`` if it has named none."""
    path = environment.get(ERROR_FILE_VARIABLE)
    return Path(path) if path else None


def write_error_file(error: BaseException, path: Path | None) -> None:
    """Write why this process fails, unless that stands there: the first error is the cause of those that follow.

    Of what was raised on purpose the message, of a bug the traceback, which ends with it. A file that cannot be written
    is no further error.
    """
    if path is None or path.exists():
        return
    said = str(error) if isinstance(error, HeteroError) else "".join(traceback.format_exception(error))
    said = without_secrets(said)
    # The launcher takes the earliest for the cause, by whole seconds.
    data = {"message": {"message": printable_lines(said), "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(data), encoding="utf-8")


def exit_code(error: HeteroError, environment: Mapping[str, str]) -> int:
    """Print ``error`` and return this process's exit code: 3 if a rank, its data or its memory is lost, else 2.

    What is wrong with the input is wrong on every rank, so rank 0 says it. The others wait for that: a launcher ends
    all processes as soon as one has failed. It is told what to show as the cause.
    """
    write_error_file(error, error_file(environment))
    rank = printable(environment.get("RANK", "0"))
    said = printable_lines(without_secrets(str(error)))
    if isinstance(error, MembershipError | DataError):
        sys.stderr.write(f"hetero: rank {rank}: {said}\n")
        return EXIT_CODE
    if isinstance(error, DeviceMemoryError):
        sys.stderr.write(f"hetero: {said}\n")
        return EXIT_CODE
    # A RANK that is no number comes from no launcher, which would end this process.
    if not rank.isdigit() or int(rank) == 0:
        sys.stderr.write(f"hetero: {said}\n")
        sys.stderr.flush()
    else:
        time.sleep(_SECONDS_TO_REPORT)
    return EXIT_CODE if isinstance(error, PlanMemoryError) else 2
