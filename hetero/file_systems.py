"""Does without what some file systems refuse: hard links, another mode of a file, the rename of a folder.

| file system | refuses |
|---|---|
| BeeGFS before 8 | hard links between folders |
| gcsfuse, s3fs, most CIFS mounts | hard links |
| gcsfuse on a bucket without folders | to rename a folder that is not empty (``--rename-dir-limit``) |
| CIFS, FAT | to change a mode |
"""

import contextlib
import errno
import os
import shutil
from io import FileIO
from pathlib import Path

from hetero.units import MIB

REFUSALS = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK, errno.EMFILE}
)
"""Answers of file systems that cannot do something; EMFILE is gcsfuse's where a folder has too many files to rename."""

PARTIAL_SUFFIX = ".copying"
"""Of a file's name while it is copied."""

_RANGE_BYTES, _BUFFER_BYTES = 1024 * MIB, 8 * MIB


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where there are no hard links; ``target`` appears whole.

    Raises:
        OSError: for another reason, such as a full disk.
    """
    if not was_linked(source, target):
        with FileIO(source) as file:
            copy_whole(file, target)


def was_linked(source: Path, target: Path) -> bool:
    """Give a file a second name; return false where the file system refuses that.

    Raises:
        OSError: for another reason.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        return False
    return True


def copy_whole(source: FileIO, target: Path) -> None:
    """Copy the rest of an open file; ``target`` appears whole or not at all.

    Copies are made by the file system itself where it can: shared blocks on XFS and Btrfs, on the server with NFS 4.2.

    Raises:
        OSError: there is no room, or the file system failed.
    """
    partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
    try:
        with FileIO(partial, "w") as file:
            # Whatever it left over, be it all, is read and written: an error that lasts comes again there.
            with contextlib.suppress(OSError):
                while os.copy_file_range(source.fileno(), file.fileno(), _RANGE_BYTES):
                    pass
            shutil.copyfileobj(source, file, _BUFFER_BYTES)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def let_readers_of_folder_read(path: Path) -> None:
    """Give a file the permissions of its folder, unless the mount gives them to all files.

    Raises:
        OSError: the file is not there, or the file system failed.
    """
    try:
        path.chmod(path.parent.stat().st_mode & 0o666)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
