"""Which of the cases that rotate a run takes, and where the ranks of the run end."""

import datetime
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ranks import POOL

ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rotation")
    group.addoption("--rotation", type=int, help="which of the cases that rotate run (default: the number of commits)")
    group.addoption("--all", action="store_true", help="run all cases, also those that rotate")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.rotation is None:
        config.option.rotation = rotation_of_today()


def pytest_report_header(config: pytest.Config) -> str:
    if _runs_everything(config):
        return "rotation: none, every case runs"
    return f"rotation: {config.option.rotation} (the same again: --rotation {config.option.rotation}; all of it: --all)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _runs_everything(config):
        return
    dropped = set(_waiting(items, config.option.rotation))
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_unconfigure() -> None:
    POOL.close()


@pytest.fixture
def num_steps(request: pytest.FixtureRequest) -> int:
    """Of a training: two of a case that rotates, so that the second begins with what the first has updated; three of
    those that every run has, and of all with ``--all``."""
    rotates = request.node.get_closest_marker("rotates") is not None
    return 2 if rotates and not request.config.option.all else 3


def rotation_of_today() -> int:
    """The number of commits, or, without the history that would tell, the day: either moves on by one."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "false":
            return int(git("rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        pass
    return datetime.datetime.now(tz=datetime.UTC).date().toordinal()


def _runs_everything(config: pytest.Config) -> bool:
    """As it is asked for, or because cases are asked for by name."""
    return config.option.all or any("::" in word for word in config.args)


def _waiting(items: list[pytest.Item], rotation: int) -> Iterator[pytest.Item]:
    """Of the cases of a test with the same ``rotates`` marker, those whose turn it is not in this run."""
    rows: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers("rotates"):
            test = item.nodeid.partition("[")[0]
            rows.setdefault((test, *mark.args), []).append(item)
    for (_, row), cases in rows.items():
        # Not every row is at its first case in the same run.
        turn = (rotation + zlib.crc32(row.encode())) % len(cases)
        yield from (item for i, item in enumerate(cases) if i != turn)
