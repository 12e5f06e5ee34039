"""Checks that only this user or root can have written a file or folder, as ssh does with its keys."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

from hetero.errors import ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""Mode bits by which others than the owner may write."""


def check_own(path: Path, *, instead: str) -> None:
    """Check that a file or folder belongs to this user or root, and that no group and no other user may write it.

    Of a link, its own owner counts, and the owner and mode of what it leads to. What is not there is accepted. Entries
    of a folder are not looked at.

    Args:
        instead: what to do where the owner is another, for the message.

    Raises:
        ConfigError: it names the path, its owner or mode, and what to do.
    """
    try:
        entry = path.lstat()
        status = path.stat() if stat.S_ISLNK(entry.st_mode) else entry
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path}: its owner cannot be told: {error.strerror}; {instead}") from None
    for owner in {entry.st_uid, status.st_uid} - {os.geteuid(), 0}:
        if owner != _owner_of_new_file(path if stat.S_ISDIR(status.st_mode) else path.parent):
            raise ConfigError(f"{path}: belongs to {_user(owner)}, who may have written anything there; {instead}")
    if status.st_mode & OTHERS_WRITE:
        who = "every user" if status.st_mode & stat.S_IWOTH else "its group"
        raise ConfigError(
            f"{path}: {who} may write it (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"remove that with chmod -R go-w if you trust what is there, or {instead}"
        )


def _owner_of_new_file(folder: Path) -> int | None:
    """Return whom a file of this user belongs to: some servers show one owner for all; ``None`` if none can be made."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"
