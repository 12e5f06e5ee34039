"""The table of stages is complete: every test of a GPU is in one of them, and each can be chosen by its name."""

import re
import subprocess
import sys

import pytest

from tests.gpu_stages.__main__ import main
from tests.gpu_stages.stages import TEST_GROUPS, Stage, files_of, list_stages, select_stages
from tests.gpu_stages.target import Target
from tests.helpers.sources import ROOT

STAGES = list_stages(Target(device="cuda", name="NVIDIA H200", half="bf16"), "runs/gpu")


def test_every_test_of_a_gpu_is_in_a_stage() -> None:
    """Files whose tests run on a GPU; the split of a group is by one expression and its negation."""
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    grouped = [file for group in TEST_GROUPS for file in files_of(group)]
    assert sorted(grouped) == sorted(files)
    by_name = {stage.name: stage for stage in STAGES}
    for group in TEST_GROUPS:
        first, rest = by_name[f"tests-{group.name}"], by_name.get(f"tests-{group.name}-seen")
        assert _keyword(first) == group.first
        assert (rest is None) == (group.first is None)
        if rest is not None:
            assert _keyword(rest) == f"not ({group.first})"


def _keyword(stage: Stage) -> str | None:
    """What pytest's own option ``-k`` is given; ``-m`` stands first for the module."""
    return stage.command[stage.command.index("-k") + 1] if "-k" in stage.command else None


def test_names_differ_and_needs_come_first() -> None:
    names = [stage.name for stage in STAGES]
    assert len(set(names)) == len(names)
    for place, stage in enumerate(STAGES):
        assert re.fullmatch(r"[a-z0-9-]+", stage.name)
        assert stage.needs is None or stage.needs in names[:place], stage.name


def test_stages_are_chosen_by_name() -> None:
    assert [stage.name for stage in select_stages(STAGES, ["bench-local", "doctor"])] == ["bench-local", "doctor"]
    assert [stage.name for stage in select_stages(STAGES, ["doctor", "steps", "doctor"])] == ["doctor", "steps"]
    assert select_stages(STAGES, []) == STAGES
    with pytest.raises(ValueError, match="--stages benhc: no such stage; there are doctor, shared-device, "):
        select_stages(STAGES, ["doctor", "benhc"])


@pytest.mark.parametrize("argument", ["--list", "--help"])
def test_stages_are_listed_without_any_package(argument: str) -> None:
    """Before the environment is made."""
    command = [sys.executable, "-S", "-E", "-m", "tests.gpu_stages", argument]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ramp-up" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--minutes", "-1"), "argument --minutes: -1 is not above 0"),
        (("--minutes", "nan"), "argument --minutes: nan is not above 0"),
        (("--limit-scale", "0"), "argument --limit-scale: 0 is not above 0"),
        (("--together", "0"), "argument --together: 0 is not 1 or more"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_wrong_number_is_refused(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--list", *arguments])
    assert said in capsys.readouterr().err
