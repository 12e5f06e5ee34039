"""Small file systems of a test's own, which get full or read-only. Root alone may make them."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

_FILLER = "filler"
_PART_BYTES = 65536


@contextlib.contextmanager
def small_file_system(folder: Path, *, mib: int) -> Iterator[Path]:
    """Make ``folder`` a file system of its own, of ``mib`` MiB in memory, until the block ends."""
    folder.mkdir(parents=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def fill(folder: Path) -> None:
    """Leave no room on the file system of ``folder``."""
    with contextlib.suppress(OSError), (folder / _FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(_PART_BYTES))


def free(folder: Path) -> None:
    """Undo :func:`fill`."""
    (folder / _FILLER).unlink()


def make_read_only(folder: Path) -> None:
    """Refuse all writes to the file system that is mounted at ``folder``."""
    _run("mount", "-o", "remount,ro", str(folder))


def make_writable(folder: Path) -> None:
    """Undo :func:`make_read_only`."""
    _run("mount", "-o", "remount,rw", str(folder))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=20)
