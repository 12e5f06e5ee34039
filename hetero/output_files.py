"""Writes the files and folders that a user named, complete or not at all, and checks before the work that it can."""

import contextlib
import errno
import io
import os
from pathlib import Path

from hetero.errors import ConfigError
from hetero.private_files import open_for_writing, write_private

_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


def write_bytes(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file that the user named. It appears complete or not at all; a link stays one.

    A device or a pipe takes the content as it is.

    Args:
        is_private: of a text in UTF-8: its owner alone may read the file, also if there was one before.

    Raises:
        ConfigError: it cannot be written there.
    """
    partial = None
    try:
        if (partial := _partial(path)) is None:
            path.write_bytes(content)
        else:
            if is_private:
                write_private(partial, content.decode())
            else:
                with io.BufferedWriter(open_for_writing(partial, "w")) as file:
                    file.write(content)
            partial.replace(_target(path))
    except OSError as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def check_can_be_written(path: Path, *, asked_by: str = "") -> None:
    """Check that :func:`write_bytes` can write a file, before the work whose result goes there.

    Args:
        asked_by: the flag that names the file, for the message.

    Raises:
        ConfigError: its folder is not there, it is a folder itself, or the system refuses.
    """
    where = f"{asked_by} {path}".lstrip()
    try:
        target = _target(path)
        if not target.parent.is_dir():
            raise ConfigError(f"{where}: there is no folder {target.parent}; make it first")
        if target.is_dir():
            raise ConfigError(f"{where}: is a folder; name a file in it")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if (partial := _partial(path)) is not None:
            # Permissions do not say everything, such as what a server of files allows, or how long a name may be.
            was_there = partial.exists()
            open_for_writing(partial, "a").close()
            if not was_there:
                partial.unlink()
    except OSError as error:
        raise ConfigError(f"{where}: {_refusal(error)}; choose another place, or change its permissions") from None


def make_folder(path: Path, *, asked_by: str) -> None:
    """Make a folder, and those that it is in, to write files into.

    Raises:
        ConfigError: it cannot be made, or it is there and may not be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        refusal = _refusal(error) if path.is_dir() else f"cannot be made: {error.strerror}"
        raise ConfigError(f"{asked_by} {path}: {refusal}; name another, or change its permissions") from None


def _target(path: Path) -> Path:
    """Return the file that a link leads to, or the path itself."""
    leads_to_file = path.is_symlink() and (path.is_file() or not path.exists())
    return Path(os.path.realpath(path)) if leads_to_file else path


def _partial(path: Path) -> Path | None:
    """Return the file that is written first and then takes its place; ``None`` for a device or a pipe."""
    target = _target(path)
    if target.exists() and not target.is_file():
        return None
    return target.with_name(target.name + ".partial")


def _refusal(error: OSError) -> str:
    return "may not be written" if error.errno in _FORBIDDEN else f"cannot be written: {error.strerror}"
