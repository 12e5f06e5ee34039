"""Which of the cases that rotate a run takes, in which order, how long they train, who has a second chance."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

import hetero.runtime  # noqa: F401  (lets files of tests import megatron.core without Triton)
from tests.helpers import lanes
from tests.helpers.file_order import in_order
from tests.helpers.ranks import ANSWERS, POOL
from tests.helpers.rotation import Row, rotation_of_today, waiting
from tests.helpers.shared_files import SharedFiles, garbage_of_imports_stays

# A busy machine is no failure: what counts is counted, and every test has a time limit.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")

REAL_TIME = (
    *("e2e", "elastic", "faults"),
    *("dist/test_checkpoint_kill.py", "dist/test_doctor.py", "dist/test_elastic_stop.py", "dist/test_emulation.py"),
    *("dist/test_failure_detector.py", "dist/test_rank_pool.py"),
)
"""Folders and files below this one whose processes have to be in time: they may be run once more, alone."""

WAITING = pytest.StashKey[tuple[int, int, int]]()
"""How many cases have no turn in this run, how many runs take some of every row, and how many every case."""

MOST_SECOND_CHANCES = 5
"""More tests than these no busy machine makes fail; a choice."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rotation")
    group.addoption("--rotation", type=int, help="which of the cases that rotate run (default: the run's number)")
    group.addoption("--all", action="store_true", help="run all cases, also those that rotate")
    group.addoption("--in-every-run", action="store_true", help="run only what every run has, and no case that rotates")
    group.addoption(
        "--share-files", type=Path, metavar="FOLDER", help="run files that no process with this folder has taken"
    )
    group.addoption(
        "--second-chance",
        action="store_true",
        help="run what failed last time, if that can be a busy machine's doing",
    )
    parser.addoption(
        "--transformer-engine",
        metavar="VERSION",
        help="whose Python the tests run on a CPU (default: the newest that the installed megatron-core allows)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Once, for all processes of a run.
    if config.option.rotation is None:
        config.option.rotation = rotation_of_today()
    if config.option.share_files is not None:
        config.pluginmanager.register(SharedFiles(config.option.share_files, _in_order))
        ANSWERS.folder = config.option.share_files
        print(pytest_report_header(config), flush=True)


def pytest_report_header(config: pytest.Config) -> str:
    if _runs_everything(config):
        return "rotation: none, every case runs"
    if config.option.in_every_run:
        return "rotation: none, what every run has"
    return f"rotation: {config.option.rotation} (the same again: --rotation {config.option.rotation}; all of it: --all)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    with garbage_of_imports_stays():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.second_chance:
        _keep_second_chances(config, items)
        return
    if not _runs_everything(config):
        _keep_whose_turn_it_is(config, items)


def _keep_whose_turn_it_is(config: pytest.Config, items: list[pytest.Item]) -> None:
    rows: dict[str, Row[pytest.Item]] = {}
    for item in items:
        for mark in item.iter_markers("rotates"):
            # A row is one of a test; where none is named, the case is alone in its own.
            name = f"{item.nodeid.partition('[')[0]} {mark.args[0]}" if mark.args else item.nodeid
            row = rows.setdefault(name, Row(name=name, **mark.kwargs))
            row.cases.append(item)
    if config.option.in_every_run:
        dropped = {case for row in rows.values() for case in row.cases}
    else:
        dropped = set(waiting(rows.values(), config.option.rotation))
        some = max((each.every for each in rows.values()), default=1)
        every = max((each.runs for each in rows.values()), default=1)
        # Of processes that share files, each finds its own one after the other.
        count, before, all_before = config.stash.get(WAITING, (0, 1, 1))
        config.stash[WAITING] = (count + len(dropped), max(some, before), max(every, all_before))
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = [item for item in items if item not in dropped]


def pytest_itemcollected(item: pytest.Item) -> None:
    if lanes.is_in_newest_stack(item.path):
        item.add_marker(pytest.mark.newest_stack)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.share_files is not None:
        reports = terminalreporter.stats
        lanes.note_outcomes(config.option.share_files, {name: len(reports.get(name, ())) for name in lanes.OUTCOMES})
    count, some, every = config.stash.get(WAITING, (0, 1, 1))
    if count:
        terminalreporter.write_line(
            f"rotation {config.option.rotation}: {count} cases had no turn; {some} runs in a row take some of every "
            f"row, {every} take every case, --all takes all at once"
        )


def _in_order(files: Sequence[Path]) -> list[Path]:
    """Of several processes some are to wait while others compute."""
    named = {file.relative_to(Path(__file__).parent): file for file in files}
    return [named[each] for each in in_order(list(named))]


def pytest_unconfigure() -> None:
    POOL.close()


@pytest.fixture
def num_steps(request: pytest.FixtureRequest) -> int:
    """Of a layout's training: two of a case that rotates, so that the second begins with what the first has updated;
    three of those that every run has, and of all with ``--all``."""
    rotates = request.node.get_closest_marker("rotates") is not None
    return 2 if rotates and not request.config.option.all else 3


def _keep_second_chances(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Raises:
        pytest.UsageError: too many have failed, or one that has no second chance.
    """
    assert config.cache is not None
    failed = set(config.cache.get("cache/lastfailed", {}))
    chosen = [item for item in items if item.nodeid in failed]
    places = [Path(__file__).parent / each for each in REAL_TIME]
    final = failed - {item.nodeid for item in chosen if any(item.path.is_relative_to(place) for place in places)}
    if final:
        raise pytest.UsageError(f"no second chance, for time has no part in them: {', '.join(sorted(final))}")
    if len(failed) > MOST_SECOND_CHANCES:
        raise pytest.UsageError(f"{len(failed)} tests failed, more than the {MOST_SECOND_CHANCES} of a busy machine")
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def _runs_everything(config: pytest.Config) -> bool:
    """As it is asked for, or because cases are asked for by name."""
    return bool(config.option.all) or any("::" in word for word in config.args)
