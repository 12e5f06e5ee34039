"""Several pytest processes that share the files of a run: each takes the next one when it has none, and collects that.

Tests are found in a file only by the process that runs it, so that the files of a run are imported once and not once
per process, and results go to no other process: each says at its end what has failed in its own files.

    python -m pytest -q --share-files=FOLDER &
    python -m pytest -q --share-files=FOLDER &
    wait

With a space before it pytest would take the folder for one of tests, and look for its own configuration there.
"""

import fcntl
import gc
import io
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

Order = Callable[[Sequence[Path]], list[Path]]


@contextmanager
def garbage_of_imports_stays() -> Iterator[None]:
    """What is imported and found stays until the end: nobody has to look through it for garbage, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class SharedFiles:
    """A plugin of pytest that runs the files which no other process of the run has taken.

    Args:
        folder: of this run, empty when its first process starts.
        in_order: all processes take from the front of this order.
    """

    def __init__(self, folder: Path, in_order: Order) -> None:
        self._folder = folder
        self._in_order = in_order
        self._found: dict[Path, pytest.File] = {}
        self._taken: set[Path] = set()
        # A shell starts what is to run beside it deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> pytest.CollectReport | None:
        """Files are noted, and looked into when they are taken."""
        if not isinstance(collector, pytest.File) or collector.path in self._taken:
            return None
        self._found[collector.path] = collector
        return pytest.CollectReport(collector.id, "passed", longrepr=None, result=[])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = self._items(session)
        item = next(items, None)
        while item is not None:
            # What both use, such as a server of the whole run, is not ended between them.
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        # One for which the others have left nothing has run no test, which is no mistake.
        session.testscollected = max(1, len(session.items))
        return True

    def _items(self, session: pytest.Session) -> Iterator[pytest.Item]:
        """The tests of file after file, each of which is taken when its first test is asked for."""
        files = self._in_order(sorted(self._found))
        while (place := self._next_place()) < len(files):
            self._taken.add(files[place])
            with garbage_of_imports_stays():
                items = list(session.genitems(self._found[files[place]]))
                session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            session.items.extend(items)
            yield from items

    def _next_place(self) -> int:
        """In the order of files: the first that nobody has taken."""
        with self._locked("taken") as file:
            place = file.seek(0, os.SEEK_END)
            file.write(b".")
            return place

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """One process after the other says what has failed, and keeps what the others have noted of theirs."""
        with self._locked("end"):
            # None where it was turned off.
            cache = getattr(session.config, "cache", None)
            noted = cache.get("cache/lastfailed", {}) if cache is not None else {}
            try:
                return (yield)
            finally:
                if cache is not None and noted:
                    cache.set("cache/lastfailed", noted | cache.get("cache/lastfailed", {}))

    @contextmanager
    def _locked(self, name: str) -> Iterator[io.FileIO]:
        """A file that one process at a time has, until it is closed."""
        with (self._folder / name).open("ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
