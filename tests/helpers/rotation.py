"""Rows of alike cases, of which each run of the tests takes one."""

import datetime
import subprocess
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[2]
Case = TypeVar("Case")


def waiting(rows: Mapping[str, Sequence[Case]], rotation: int) -> Iterator[Case]:
    """The cases whose turn it is not. Each has its turn once in as many consecutive rotations as its row has cases."""
    for row, cases in rows.items():
        # Not every row is at its first case in the same run.
        turn = (rotation + zlib.crc32(row.encode())) % len(cases)
        yield from (case for i, case in enumerate(cases) if i != turn)


def rotation_of_today(repository: Path = ROOT) -> int:
    """The number of commits of the main line, which a merge moves on by one; without the history that would tell, the
    day."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "--first-parent", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        pass
    return datetime.datetime.now(tz=datetime.UTC).date().toordinal()
