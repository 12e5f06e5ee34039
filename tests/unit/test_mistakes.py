"""What users are told about typical mistakes: one message, at once, which docs/troubleshooting.md has."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import main
from hetero.errors import ConfigError
from hetero.file_kinds import FILE_KINDS, wrong_kind
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from tests.helpers.generated_parts import written
from tests.helpers.mistakes import BEGIN, PAGE, Mistake, answers_of_a_fresh_process, mistakes, table, write_files


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return answers_of_a_fresh_process()


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda mistake: mistake.line)
def test_a_mistake_is_one_message(mistake: Mistake, found: dict[str, Any]) -> None:
    """One line, which names the object, the value, the limit and the fix, each in words of its own."""
    code, out, err = found["answers"][mistake.line]
    assert (code, out) == (2, "")
    assert err.startswith(("hetero", "preprocess_data", "convert_checkpoint"))
    assert err.endswith("\n")
    # pretrain_gpt.py tells all problems of a command line, a line each.
    assert err.count("\n") == 1 or "plan_flags" in mistake.line
    assert "Traceback" not in err
    assert "usage:" not in err
    left = err
    for part in mistake.parts():
        # Whole words: a value of 0 is none of 10.
        left, times = re.subn(rf"(?<![\w-]){re.escape(part)}(?!\w)", "...", left, count=1)
        assert times == 1, f"{part!r} is not in what is left of the message: {left}"


def test_a_part_that_a_message_lacks_has_a_reason(tmp_path: Path) -> None:
    """Of value and limit each is there, or why not; and a typed value is what somebody typed."""
    write_files(tmp_path)
    typed = {path.name: path.read_text("latin-1") for path in tmp_path.iterdir() if path.is_file()}
    for mistake in mistakes():
        assert mistake.object, mistake
        assert [bool(each) for each in (mistake.value, mistake.found, mistake.no_value)].count(True) == 1, mistake
        assert bool(mistake.limit) != bool(mistake.no_limit), mistake
        assert mistake.fix or mistake.limit.startswith(("must ", "a ")), mistake
        named = [text for name, text in typed.items() if name in mistake.line]
        assert any(mistake.value in text for text in (mistake.line, *named)), mistake


def test_there_are_enough() -> None:
    assert len({mistake.line for mistake in mistakes()}) >= 50


def test_nothing_slow_was_begun(found: dict[str, Any]) -> None:
    """Neither torch nor the solver was even loaded, and nothing was written."""
    assert found["loaded"] == []
    assert found["written"] == []


def test_the_page_has_the_messages(found: dict[str, Any]) -> None:
    assert written(PAGE, BEGIN) == table(found["answers"]), "run python -m tests.helpers.mistakes"


def test_a_process_of_its_own_says_the_same(tmp_path: Path) -> None:
    write_files(tmp_path)
    command = [sys.executable, "-m", "hetero", "show", "c.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hetero: c.yaml: it is a cluster file, by its 'node_types', where a plan ")
    assert done.stderr.count("\n") == 1


def test_a_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert re.fullmatch(r"hetero \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_files_are_known_by_their_keys() -> None:
    """No kind has the keys of another one; what has nobody's is left to the check of its keys."""
    for kind, keys in FILE_KINDS.items():
        assert wrong_kind(keys, dict.fromkeys(keys)) == ""
        for other in FILE_KINDS.keys() - {kind}:
            assert not FILE_KINDS[other] <= keys
            assert f"it is {other}, " in wrong_kind(keys, dict.fromkeys(FILE_KINDS[other]))
    assert wrong_kind({"replicas"}, {"elsewhere": 1}) == ""
    assert wrong_kind({"unknown"}, {"replicas": 1}) == ""
    assert wrong_kind({"replicas"}, [1]) == ""


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.json"])
def test_an_empty_file_is_called_empty(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n")
    with pytest.raises(ConfigError, match="it is empty"):
        load(ClusterSpec, tmp_path / name)
