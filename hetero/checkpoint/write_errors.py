"""Says what to change where a checkpoint could not be written: the fix follows from the error of the system."""

import errno
import getpass
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hetero.errors import CheckpointError

_FREE_SOME = "free some room, keep fewer checkpoints (--hetero-keep-last)"

_FIX: Mapping[int, str] = MappingProxyType(
    {
        errno.EROFS: "mount it for writing on this host",
        errno.ENOSPC: _FREE_SOME,
        errno.EDQUOT: _FREE_SOME,
        errno.EFBIG: "raise the limit on file sizes (ulimit -f)",
        errno.EIO: "see what the kernel says of its disk (dmesg)",
        errno.ESTALE: "mount it again",
        errno.ENOTDIR: "move the file away that is in the place of a folder",
        errno.ENOENT: "mount a file system that all hosts see there",
    }
)

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""Pattern of a system error's number in the messages of safetensors, which is written in Rust."""


def write_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise where ``path``, a folder of checkpoints or something in it, could not be written."""
    number = error.errno if isinstance(error, OSError) else _number_in(str(error))
    if number is None:
        why, fix = str(error), "look at its file system"
    elif number in (errno.EACCES, errno.EPERM):
        why, fix = os.strerror(number), f"let user {_user()} write there"
    else:
        why, fix = os.strerror(number), _FIX.get(number, "look at its file system")
    return CheckpointError(f"{path}: cannot be written: {why}; {fix}, or save to another folder (--save)")


def _number_in(message: str) -> int | None:
    match = _RUST_ERROR.search(message)
    return None if match is None else int(match[1])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
