"""Chooses, claims and deletes the folder of a node's copies, on a host that other users may share.

Beside the copies (:mod:`.copy_folder`) it has what an agent and its ranks tell each other:

    FOLDER/job.json                    whose the folder is; locked while an agent works with it
    FOLDER/reports.sock                takes the reports of ranks
    FOLDER/problem.json                what is to be trained
    FOLDER/assignment_00000004.json    what the ranks of an epoch have to know, the job's token included
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict

from hetero.elastic.copy_folder import (
    EPOCH_NAME,
    FOLDERS_OF_EPOCH,
    MEMORY_NAME,
    PARTIAL_NAME,
    epochs_in,
    forget_copies,
)
from hetero.errors import ConfigError
from hetero.private_files import delete_path, is_own_folder, make_private_folder
from hetero.serialization import STRICT, load, to_json

SHARED_MEMORY = Path("/dev/shm")
"""Where folders of copies are unless the user names another place. Every user of a host may write there."""

_JOB = "job.json"
_FIX = "name another folder (--copies)"

_KINDS: tuple[tuple[re.Pattern[str], str, Callable[[int], bool]], ...] = (
    (re.compile(rf"{_JOB}|{MEMORY_NAME}|problem\.json(\.partial)?|assignment_\d+\.json"), "a file", stat.S_ISREG),
    (PARTIAL_NAME, "a file", stat.S_ISREG),
    (re.compile(r"reports\.sock"), "a socket", stat.S_ISSOCK),
    (EPOCH_NAME, "a folder", stat.S_ISDIR),
)
"""What agents and ranks put into a folder of copies: names, and what each of them is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owner:
    """Whose a folder is.

    job: its name, and a mark of its token.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    job: str


def choose_folder(job: str, node: str, *, say: Callable[[str], None], parent: Path = SHARED_MEMORY) -> Path:
    """Return where a node keeps its copies unless the user says where.

    It is ``hetero-JOB-NODE``. If another user has taken that name, it has a random ending, which nobody can take first;
    a later agent of this job and node finds its copies again. Nothing is made yet.

    Args:
        say: prints a line for people, where the folder has a random ending.
    """
    usual = parent / f"hetero-{job}-{node}"
    if is_own_folder(usual):
        return usual
    # No job's and no node's name has a "~".
    kept = (path for path in sorted(parent.glob(f"{usual.name}~*")) if is_own_folder(path))
    folder = next((path for path in kept if (owner_of_copies(path) or "").rpartition(" ")[0] == job), None)
    if folder is not None:
        say(f"hetero: copies of node {node} are in {folder}, as those of its last agent")
    elif os.path.lexists(usual):
        folder = usual.with_name(f"{usual.name}~{secrets.token_hex(4)}")
        say(f"hetero: {usual} is no folder of this user: copies of node {node} go to {folder}")
    return folder or usual


@contextlib.contextmanager
def claimed_folder(folder: Path, *, job: str) -> Iterator[None]:
    """Work with a folder as its only agent, while the block lasts.

    Copies that an earlier agent of the same job has left stay, as they are what a run goes on from; those of another
    job are deleted: ask :func:`owner_of_copies` first. The folder is private to its user.

    Raises:
        ConfigError: another agent works with it, it is somebody else's, or it holds what no agent has put there.
    """
    make_private_folder(folder, fix=_FIX)
    marker = folder / _JOB
    if not os.path.lexists(marker) and any(folder.iterdir()):
        raise ConfigError(f"{folder}: it has files that are no copies of a run; {_FIX}, or delete them")
    _check_kinds(folder)
    with contextlib.ExitStack() as opened:
        try:
            number = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            file = opened.enter_context(FileIO(number, "r+"))
        except OSError as error:
            raise ConfigError(f"{marker}: cannot be written: {error.strerror}; {_FIX}, or make room there") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another agent works with it; {_FIX}, or end that agent") from None
        except OSError as error:
            raise ConfigError(
                f"{folder}: it cannot be locked: {error.strerror}; {_FIX}, on a local file system such as /dev/shm"
            ) from None
        try:
            owner = to_json(_Owner(job=job)).encode()
            if file.read(len(owner) + 1) != owner:
                forget_copies(folder)
                file.seek(0)
                file.truncate()
                file.write(owner)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or folder}: cannot be taken over: {error.strerror}; {_FIX}, or make room there"
            ) from None
        yield


def owner_of_copies(folder: Path) -> str | None:
    """Return the job that the copies in a folder are of, as :func:`claimed_folder` had it.

    Returns:
        ``None`` where there are no copies; empty where nothing says whose they are.
    """
    if not epochs_in(folder):
        return None
    with contextlib.suppress(ConfigError):
        return load(_Owner, folder / _JOB).job
    return ""


def delete_folder(folder: Path) -> None:
    """Delete what agents have put into a folder, once its run is over, and the folder unless something else is in it.

    What cannot be deleted stays.
    """
    with contextlib.suppress(OSError):
        own = [path for path in folder.iterdir() if _kind_of(path.name) is not None]
        # Without it an agent would not know what is left.
        for path in sorted(own, key=lambda path: path.name == _JOB):
            delete_path(path)
        folder.rmdir()


def _check_kinds(folder: Path) -> None:
    """See that what has a name of ours is what agents make under it: a pipe would be waited for, a link followed.

    Raises:
        ConfigError: something is not.
    """
    inside = (folder / f"epoch_{epoch:08d}" / name for epoch in epochs_in(folder) for name in FOLDERS_OF_EPOCH)
    wanted = [(path, kind) for path in folder.iterdir() if (kind := _kind_of(path.name)) is not None]
    wanted += [(path, ("a folder", stat.S_ISDIR)) for path in inside if os.path.lexists(path)]
    for path, (title, is_right) in wanted:
        if not is_right(path.lstat().st_mode):
            raise ConfigError(f"{path}: it is not {title}, as agents make under this name; move it away, or {_FIX}")


def _kind_of(name: str) -> tuple[str, Callable[[int], bool]] | None:
    return next(((title, is_right) for names, title, is_right in _KINDS if names.fullmatch(name)), None)
