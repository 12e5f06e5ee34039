"""Sample indices on disk that appear complete or not at all, whoever is killed while megatron-core writes them."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_PREFIX = ".building."


def built_completely(cache: Path, build: Callable[[Path], T]) -> T:
    """Call ``build`` with a folder that holds what ``cache`` holds, and move what it writes there to ``cache``.

    megatron-core takes an index whose files exist for a whole one. Runs that build the same one at the same time do
    not disturb each other: each has a folder of its own, and a file is replaced by an equal one.
    """
    with _scratch(cache) as scratch:
        known = {path.name for path in cache.iterdir() if path.is_file()}
        for name in known:
            os.link(cache / name, scratch / name)
        built = build(scratch)
        for path in sorted(scratch.iterdir()):
            if path.name not in known:
                _wait_for_disk(path)
                path.replace(cache / path.name)
        return built


@contextmanager
def _scratch(cache: Path) -> Iterator[Path]:
    """A folder in ``cache`` for this process, after those of processes of this host that are gone were deleted."""
    host = socket.gethostname()
    for path in cache.glob(f"{_PREFIX}{host}.*"):
        if not _is_running(int(path.suffix[1:])):
            shutil.rmtree(path)
    scratch = cache / f"{_PREFIX}{host}.{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
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


def _wait_for_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
