"""Says what to change where a checkpoint could not be written: the fix follows from the error of the system."""

import errno
import getpass
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hetero.errors import CheckpointError

_FREE_SOME = "free some, keep fewer checkpoints (--keep-last)"

_CAUSE_AND_FIX: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        errno.EROFS: ("its file system is mounted read-only on this host", "mount it for writing"),
        errno.ENOSPC: ("its file system has no room left", _FREE_SOME),
        errno.EDQUOT: ("the quota of this user or group is used up", _FREE_SOME),
        errno.EFBIG: ("files may not be as large there", "raise the limit (ulimit -f)"),
        errno.EIO: ("its disk, or the server that has it, fails", "see the log of the kernel (dmesg)"),
        errno.ESTALE: ("its server does not know it any more", "mount it again"),
        errno.ENOTDIR: ("a file is in the place of a folder", "move it away"),
        errno.ENOENT: ("it is gone, or not on a file system that all hosts see", "mount one there"),
    }
)

_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""By which safetensors, which is written in Rust, tells the number of a system's error."""


def write_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error to raise where ``path``, a folder of checkpoints or something in it, could not be written."""
    number = error.errno if isinstance(error, OSError) else _number_in(str(error))
    if number is None:
        why, cause, fix = str(error), "", "look at its file system"
    else:
        why = os.strerror(number)
        cause, fix = _CAUSE_AND_FIX.get(number, ("", "look at its file system"))
    if number in (errno.EACCES, errno.EPERM):
        cause, fix = f"user {_user()} may not write there", "change its owner or its mode"
    said = f"{path}: cannot be written: {why}"
    return CheckpointError(f"{said}{f' ({cause})' if cause else ''}; {fix}, or save to another folder (--save)")


def _number_in(message: str) -> int | None:
    match = _RUST_ERROR.search(message)
    return None if match is None else int(match[1])


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
