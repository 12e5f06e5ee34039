"""Writes sample indices so that they appear complete or not at all, whoever is killed while megatron-core works."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from hetero.distributed.helper_processes import HelperContext
from hetero.file_systems import link_or_copy
from hetero.folder_owners import OTHERS_WRITE, check_own

T = TypeVar("T")

_PREFIX = ".building."

_MODE = 0o755
"""Of a folder of indices, less what the umask takes: where the umask is 002, its group could write it."""


def make_cache(folder: Path) -> None:
    """Make a folder for the indices of one content, in the folder for those of all, and check who may write there.

    Raises:
        ConfigError: either folder, or a file in the first one, belongs to another user or may be written by others.
        OSError: one of them cannot be made.
    """
    instead = "give --data-cache-path a folder of your own"
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    folder.parent.mkdir(exist_ok=True, mode=_MODE)
    check_own(folder.parent, instead=instead)
    folder.mkdir(exist_ok=True, mode=_MODE)
    for path in (folder, *folder.iterdir()):
        check_own(path, instead=instead)


def built_completely(cache: Path, build: Callable[[Path], T]) -> T:
    """Call ``build`` with a folder that holds what ``cache`` holds, move what it writes there to ``cache``, and read.

    megatron-core takes an index whose files exist for a whole one. Runs that build the same one at the same time do
    not disturb each other: each has a folder of its own, and a file is replaced by an equal one.

    It is called twice: in a process of its own, to write what is missing, and here, where all is there to be read.
    Drawing the order of a billion samples holds the interpreter for minutes, in which this rank would be silent.

    Raises:
        OSError: the process that builds was killed.
        Exception: as ``build`` does.
    """
    with _scratch(cache) as scratch:
        known = {path.name for path in cache.iterdir() if path.is_file()}
        for name in known:
            link_or_copy(cache / name, scratch / name)
        _call_in_child(build, scratch)
        for path in sorted(scratch.iterdir()):
            if path.name not in known:
                _wait_for_disk(path)
                _leave_writing_to_owner(path)
                path.replace(cache / path.name)
    # All is there and only read. In the scratch folder it may be a copy, and some file systems unmap what is deleted.
    return build(cache)


def _call_in_child(build: Callable[[Path], object], folder: Path) -> None:
    context = HelperContext()
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child_main, args=(build, folder, send))
    child.start()
    send.close()
    try:
        error = receive.recv()
    except EOFError:
        child.join()
        raise OSError(f"the process that builds them ended with {child.exitcode}; was it killed for memory?") from None
    child.join()
    if error is not None:
        raise error


def _child_main(build: Callable[[Path], object], folder: Path, answer: Connection) -> None:
    try:
        build(folder)
    except Exception as error:  # noqa: BLE001  (whatever it was, the parent raises it)
        answer.send(error)
    else:
        answer.send(None)


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """Make a folder in ``cache`` for this process, and delete those of processes of this host that are gone."""
    host = socket.gethostname()
    for path in cache.glob(f"{_PREFIX}{host}.*"):
        if not _is_running(int(path.suffix[1:])):
            shutil.rmtree(path)
    scratch = cache / f"{_PREFIX}{host}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def _leave_writing_to_owner(path: Path) -> None:
    mode = path.stat().st_mode
    # Only if it has to: some mounts refuse to change a mode.
    if mode & OTHERS_WRITE:
        path.chmod(mode & ~OTHERS_WRITE)


def _wait_for_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
