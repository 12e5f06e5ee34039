"""Tells the launcher why a process fails: torchrun shows it last, where otherwise it says only that somebody failed."""

import contextlib
import json
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from hetero.errors import HeteroError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun and its likes look, once a process has failed (torch.distributed.elastic.multiprocessing.errors)."""


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
    # The launcher takes the earliest for the cause, by whole seconds.
    data = {"message": {"message": said, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(data), encoding="utf-8")
