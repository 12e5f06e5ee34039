"""Writes a line for each test as soon as it has ended. Loaded by ``pytest -p tests.gpu_stages.outcomes``.

The variable ``TEST_OUTCOMES`` names the file. pytest writes its own XML at the end, so a run that is killed at its time
limit has none.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

FILE_VARIABLE = "TEST_OUTCOMES"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestOutcome:
    """How one test ended.

    outcome: "passed", "FAILED", "ERROR" (outside the test itself) or "skipped".
    detail: in a line, why it failed or was skipped, or what it recorded (``record_property``).
    """

    __test__ = False

    name: str
    outcome: str
    seconds: float
    detail: str = ""


def load_outcomes(path: Path) -> list[TestOutcome]:
    """Return the outcomes in ``path``; where a test has several lines, such as one per subtest, its worst one."""
    found: dict[str, TestOutcome] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        outcome = TestOutcome(**json.loads(line))
        if outcome.name not in found or found[outcome.name].outcome not in ("FAILED", "ERROR"):
            found[outcome.name] = outcome
    return list(found.values())


def outcome_of(report: pytest.TestReport) -> TestOutcome | None:
    """Return what ``report`` adds: ``None`` for a phase that only prepares or tidies up, and went well."""
    if report.when != "call" and report.passed:
        return None
    failure = "FAILED" if report.when == "call" else "ERROR"
    return TestOutcome(
        name=report.nodeid.removeprefix("tests/"),
        outcome=failure if report.failed else report.outcome,
        seconds=round(report.duration, 3),
        detail=_detail(report),
    )


def _detail(report: pytest.TestReport) -> str:
    if report.passed:
        return ", ".join(f"{name} {value}" for name, value in report.user_properties)
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else report.longreprtext
    return next((line.strip() for line in message.splitlines() if line.strip()), "")[:300]


class OutcomeWriter:
    """Plugin that appends to a file, and prints each failure at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text("", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = outcome_of(report)
        if outcome is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        if report.failed:
            print("\n".join(("", *_failure_text(report))), flush=True)


def _failure_text(report: pytest.TestReport) -> Iterator[str]:
    """Yield the lines of a failure; pytest prints them at its end, which a killed run does not reach."""
    yield f"##### {report.nodeid} ({report.when})"
    yield report.longreprtext
    for name, text in report.sections:
        yield f"--- {name}"
        yield text


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OutcomeWriter(Path(os.environ[FILE_VARIABLE])))
