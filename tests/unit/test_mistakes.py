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
from tests.helpers import mistakes

FIX = re.compile(
    r"did you mean|must |; see |\b(add|leave|name|give|make|take|change|raise|set|update|shorten|start|list|write)\b"
    r"|is it the right file|Is the file complete|no such file \(looked in|does not divide|is not a |needs |or plan$"
    r"|comes a |required and missing:"
    r"|--presets lists|--force writes"
)
"""What to do, or what the value would have to be."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return mistakes.answers_of_a_fresh_process()


@pytest.mark.parametrize("line", mistakes.lines())
def test_a_mistake_is_one_message(line: str, found: dict[str, Any]) -> None:
    code, out, err = found["answers"][line]
    assert (code, out) == (2, "")
    assert err.startswith(("hetero", "preprocess_data", "convert_checkpoint"))
    assert err.endswith("\n")
    # pretrain_gpt.py tells all problems of a command line, a line each.
    assert err.count("\n") == 1 or "{FLAGS}" in line or "plan_flags" in line
    assert "Traceback" not in err
    assert "usage:" not in err
    assert FIX.search(err.strip()), err
    # The message names the command, or the flag, the file or the value that is wrong in it.
    assert any(word.strip("-") in err for word in re.split(r"[ =,]", line) if len(word) > 1) or "missing" in err, err


def test_there_are_enough() -> None:
    assert len(set(mistakes.lines())) >= 50


def test_nothing_slow_was_begun(found: dict[str, Any]) -> None:
    """Neither torch nor the solver was even loaded, and nothing was written."""
    assert found["loaded"] == []
    assert found["written"] == []


def test_the_page_has_the_messages(found: dict[str, Any]) -> None:
    assert mistakes.written() == mistakes.table(found["answers"]), "run python -m tests.helpers.mistakes"


def test_a_process_of_its_own_says_the_same(tmp_path: Path) -> None:
    mistakes.write_files(tmp_path)
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
