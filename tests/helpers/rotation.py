"""Rows of alike cases, of which each run of the tests takes one, and rows that only every so many runs take one of."""

import datetime
import os
import subprocess
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

ROOT = Path(__file__).parents[2]
Case = TypeVar("Case")

MOST_RUNS = 12
"""No row waits for more runs than so many, and few for more than six; a choice."""

RUN_NUMBERS = ("GITHUB_RUN_NUMBER", "CI_PIPELINE_IID", "BUILD_NUMBER")
"""Variables in which GitHub Actions, GitLab CI and Jenkins count the runs of a pipeline."""


@dataclass(kw_only=True)
class Row(Generic[Case]):
    """Cases that are alike enough for a run to take one of them, or none.

    every: of so many consecutive runs one takes a case; a divisor of :data:`MOST_RUNS`, so that the runs repeat.
    turn: which of these it is: where ``rotation`` has this remainder; ``None`` is any, by the row's name.
    """

    name: str
    every: int = 1
    turn: int | None = None
    cases: list[Case] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.every < 1 or MOST_RUNS % self.every:
            raise ValueError(f"{self.name}: every is {self.every}, must divide {MOST_RUNS}")
        if self.turn is not None and not 0 <= self.turn < self.every:
            raise ValueError(f"{self.name}: turn is {self.turn}, must be below every, which is {self.every}")

    def taken(self, rotation: int) -> Case | None:
        """What a run takes; each case once in as many consecutive turns as there are cases."""
        # Not every row has its turn in the same run, nor is at its first case then.
        own = zlib.crc32(self.name.encode())
        first = own % self.every if self.turn is None else self.turn
        if rotation % self.every != first:
            return None
        return self.cases[(rotation // self.every + own) % len(self.cases)]

    @property
    def runs(self) -> int:
        """So many consecutive runs take all of its cases."""
        return self.every * len(self.cases)


def waiting(rows: Iterable[Row[Case]], rotation: int) -> Iterator[Case]:
    """The cases whose turn it is not."""
    for row in rows:
        taken = row.taken(rotation)
        yield from (case for case in row.cases if case is not taken)


def rotation_of_today(repository: Path = ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """The number of the run, where a CI counts them; else the number of commits of the main line, which a merge moves
    on by one; without the history that would tell, the day."""
    for name in RUN_NUMBERS:
        if (number := environment.get(name, "")).isdecimal():
            return int(number)

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=repository, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "--first-parent", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        pass
    return datetime.datetime.now(tz=datetime.UTC).date().toordinal()
