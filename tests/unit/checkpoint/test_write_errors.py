"""The message of a checkpoint that cannot be written names the fix of the system's error."""

import errno
import os
from pathlib import Path

import pytest

from hetero.checkpoint.write_errors import write_error


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EROFS, "mount it for writing"),
        (errno.ENOSPC, "free some room, keep fewer checkpoints (--hetero-keep-last)"),
        (errno.EDQUOT, "free some room"),
        (errno.EACCES, "let user "),
        (errno.EPERM, "let user "),
        (errno.ENOENT, "a file system that all hosts see"),
        (errno.ENOTDIR, "move the file away"),
        (errno.EIO, "dmesg"),
        (errno.EBUSY, "look at its file system"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_the_fix_follows_from_the_error(number: int, fix: str) -> None:
    message = str(write_error(Path("/runs/7"), OSError(number, os.strerror(number))))
    assert message.startswith(f"/runs/7: cannot be written: {os.strerror(number)}; ")
    assert fix in message
    assert message.endswith("or save to another folder (--save)")
    assert ("all hosts see" in message) is (number == errno.ENOENT)


def test_the_number_in_an_error_of_safetensors_is_understood() -> None:
    error = ValueError("Error while serializing: I/O error: Read-only file system (os error 30)")
    assert "mount it for writing" in str(write_error(Path("/runs/7"), error))
    assert "odd; look at its file system" in str(write_error(Path("/runs/7"), ValueError("odd")))
