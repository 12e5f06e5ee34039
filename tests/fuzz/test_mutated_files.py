"""Damaged files of every kind, and that the instrument itself notices what it is there for."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from hetero.errors import ConfigError
from hetero.units import GIB
from tests.fuzz import mutated_files
from tests.fuzz.mutated_files import Case, Outcome, cases, main, run_cases
from tests.fuzz.subjects import Subject


def faults(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.case.name}: {outcome.said}" for outcome in outcomes if outcome.verdict == "fault"]


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_every_kind_of_file_damaged_in_every_way() -> None:
    outcomes = list(run_cases(cases(104, seed=7)))
    assert faults(outcomes) == []
    assert {outcome.verdict for outcome in outcomes} == {"refused", "read"}
    assert len({(outcome.case.subject, outcome.case.mutation) for outcome in outcomes}) == 104


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_a_thousand_damaged_files() -> None:
    outcomes = list(run_cases(cases(1000, seed=0)))
    assert len(outcomes) == 1000
    assert faults(outcomes) == []


def make(folder: Path) -> None:
    (folder / "a.json").write_text("sound, 17")


def unless_sound(folder: Path) -> bool:
    return (folder / "a.json").read_bytes() != b"sound, 17"


def grow(folder: Path) -> None:
    if unless_sound(folder):
        np.ones(GIB // 8, dtype=np.uint8)


def allocate(folder: Path) -> None:
    if unless_sound(folder):
        np.empty(10**13, dtype=np.uint8)


def hang(folder: Path) -> None:
    if unless_sound(folder):
        time.sleep(60)


def die(folder: Path) -> None:
    if unless_sound(folder):
        os._exit(1)


def trip(folder: Path) -> None:
    if unless_sound(folder):
        raise KeyError("a")


def name_nothing(folder: Path) -> None:
    if unless_sound(folder):
        raise ConfigError("something is wrong")


def refuse(folder: Path) -> None:
    if unless_sound(folder):
        raise ConfigError(f"{folder}/a.json: something is wrong")


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_what_is_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader in turn; the one that hangs or dies does not keep the next from running."""
    # A slow machine touches a GiB in more than a second.
    monkeypatch.setattr(mutated_files, "LIMIT_BYTES", GIB // 10)
    monkeypatch.setattr(mutated_files, "LIMIT_S", 2.0)
    readers = {
        grow: "GiB",
        allocate: "Unable to allocate",
        hang: "took more than",
        die: "killed its process",
        trip: "KeyError",
        name_nothing: "names no file: something is wrong",
    }
    subjects = {reader.__name__: Subject(make, reader, ("a.json",)) for reader in (*readers, refuse)}
    wanted = [Case(name, "numbers huge", number=0, seed=0) for name in subjects]
    outcomes = list(run_cases(wanted, subjects))
    assert [outcome.verdict for outcome in outcomes] == ["fault"] * len(readers) + ["refused"]
    for outcome, message in zip(outcomes, readers.values(), strict=False):
        assert message in outcome.said, outcome


def test_a_case_is_run_again_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    case = cases(3, seed=4)[2]
    assert main(["--case", case.name]) == 0
    first = capsys.readouterr().out
    assert case.name in first
    assert "1 cases, 0 faults" in first
