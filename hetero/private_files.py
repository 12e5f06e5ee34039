"""Makes folders and files on hosts that other users share: they can neither read them nor take their place first.

Anybody may make a name in ``/tmp``, ``/dev/shm`` or a shared folder of logs before this program does. So the owner of a
folder is checked before it is used, and a link at the end of a path is not followed.
"""

import contextlib
import errno
import os
import shutil
import stat
from io import FileIO
from pathlib import Path

from hetero.errors import ConfigError

_ONLY_A_FILE = os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags of an open that fails at a link, and does not wait at a pipe."""


def is_own_folder(path: Path) -> bool:
    """Whether ``path`` is a folder of this user, and not a link to one."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def make_private_folder(path: Path, *, fix: str) -> None:
    """Make a folder that this user alone can enter; one of this user's that is there becomes so.

    Args:
        fix: what a user can do about an error.

    Raises:
        ConfigError: it cannot be made, it is a link or another user's, or its file system gives it to others.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_own_folder(path):
            raise _not_own(path, fix)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{path}: the folder cannot be made: {error.strerror}; {fix}") from None
    try:
        # Another user may have put a folder there meanwhile.
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise _not_own(path, fix)
        # Some mounts give all files one mode, which may be private.
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o700)
        if os.fstat(descriptor).st_mode & 0o077:
            raise ConfigError(f"{path}: its file system lets others read what is in it (mode 0700 is refused); {fix}")
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a new file that this user alone may read, from its first byte on; what was at ``path`` gives way.

    Raises:
        OSError: it cannot be written.
    """
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)


def open_for_writing(path: Path, mode: str) -> FileIO:
    """Open a file that this program has named, made if it is not there; never what a link leads to.

    Args:
        mode: ``"w"`` to write it from its beginning, ``"a"`` at its end, either with ``"+"`` to read as well.

    Raises:
        OSError: it is a link or no regular file, or cannot be opened.
    """
    try:
        file = FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | _ONLY_A_FILE, 0o666))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileExistsError(errno.EEXIST, f"{path.name} is no regular file", str(path))
    return file


def delete_path(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; of a link the link alone.

    Raises:
        OSError: something of it cannot be deleted.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _not_own(path: Path, fix: str) -> ConfigError:
    return ConfigError(f"{path}: it is a link, or belongs to another user; {fix}")
