"""Standard output: words, one JSON document with ``--json``, nothing with ``--quiet``, or a file by ``-``."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import WITHOUT_JSON, command_parser, main
from hetero.command_line import leaves
from hetero.commands import child
from hetero.commands.completion import SHELLS
from hetero.elastic.events import ElasticEvent
from hetero.elastic.job_store import JobState, JobStore
from hetero.elastic.records import JobSettings, NodeInfo
from hetero.plan.ir import Plan
from hetero.serialization import load, to_compact_json
from hetero.spec.cluster import ClusterSpec
from tests.helpers.mistakes import write_files
from tests.helpers.sailor_tables import write_tables

LEAVES = {leaf.prog.removeprefix("hetero "): leaf for leaf in leaves(command_parser())}

PLANS = "plan --cluster gpus.yaml --model m.yaml --global-batch-size 4 --data-sheets --time-limit 2"

HERE = {
    "show": "show plan.json --schedule --program",
    "validate": "validate plan.json --cluster laptops.yaml",
    "simulate": "simulate gpus.json --cluster gpus.yaml --data-sheets",
    "launch": "launch plan.json --cluster laptops.yaml",
    "devices": "devices --cluster laptops.yaml",
    "sweep": "sweep --presets",
    "profile import": "profile import . --out imported",
    "elastic status": "elastic status",
    "elastic leave": "elastic leave node-0",
    "elastic forget": "elastic forget",
    "elastic report": "elastic report logs --out page.html",
}
"""By command, a command line that takes no time."""

CHILDREN = {
    "discover": "discover --out found.yaml",
    "doctor": "doctor",
    "profile host": "profile host --seconds 0.1",
    "profile run": "profile run --model m.yaml --out profiles",
}
"""Those that a process of its own does."""

SLOW = {"plan": PLANS}

KEYS = {
    "plan": {"step_s", "bounds"},
    "show": {"plan", "communicators", "schedules", "program"},
    "validate": {"ranks", "idle_ranks"},
    "simulate": {"step_s", "memory"},
    "launch": {"hosts", "missing_flags"},
    "devices": {"devices", "hosts"},
    "sweep": {"clusters", "models", "sweeps"},
    "profile import": {"profiles", "links"},
    "elastic status": {"job", "state"},
    "elastic leave": {"node"},
    "elastic forget": {"job", "forgotten"},
    "elastic report": {"run"},
    "discover": {"found", "written_to"},
    "doctor": {"hosts", "findings"},
    "profile host": {"memory_gib", "updates"},
}
"""What a document has, among others."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    write_tables(tmp_path)
    for name, text in {"gpus.json": "plan.json", "gpus.yaml": "laptops.yaml"}.items():
        (tmp_path / name).write_text(re.sub(r"\bcpu\b", "A100-40", (tmp_path / text).read_text()))
    (tmp_path / "logs").mkdir()
    event = ElasticEvent(time_s=1000, node="a", kind="agent_started", since_change_s=0)
    (tmp_path / "logs/a.events.jsonl").write_bytes(to_compact_json(event) + b"\n")
    node = NodeInfo(
        name="node-0", incarnation="1", node_type="a", num_ranks=1, host="h", port=1, failure_domain="x", settings="s"
    )
    settings = JobSettings(
        program="p.py", flags=("--x=http://h/?sig=a+secret",), versions={}, object_store="s3://me:a+secret@bucket"
    )
    state = JobState(token="a secret", nodes={"node-0": node}, settings=settings)
    monkeypatch.setattr(JobStore, "__init__", lambda *_: None)
    monkeypatch.setattr(JobStore, "read", lambda _: state)
    monkeypatch.setattr(JobStore, "put_notice", lambda *_: None)
    monkeypatch.setattr(JobStore, "forget", lambda _: True)


def outcome(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(shlex.split(line))
    return code, *capsys.readouterr()


def test_every_command_is_looked_at() -> None:
    """A new command gets a line above, or a reason in ``WITHOUT_JSON``."""
    assert sorted([*HERE, *CHILDREN, *SLOW, *WITHOUT_JSON]) == sorted(LEAVES)


@pytest.mark.parametrize("command", LEAVES)
def test_every_command_has_both_flags(command: str) -> None:
    assert {"--json", "--quiet"} <= LEAVES[command]._option_string_actions.keys()
    assert ("--json" in LEAVES[command].format_help()) == (command not in WITHOUT_JSON)


@pytest.mark.parametrize("command", [*HERE, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_documents_go_to_stdout_and_words_elsewhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = (HERE | SLOW)[command]
    code, words, _ = outcome(line, capsys)
    assert (code, bool(words)) == (0, True)
    code, document, said = outcome(f"{line} --json", capsys)
    assert (code, bool(said)) == (0, True)
    assert json.loads(document).keys() >= KEYS[command]
    assert not re.search(r"a.secret", document)
    code, quietly, said = outcome(f"{line} --json --quiet", capsys)
    assert (code, said) == (0, "")
    assert json.loads(quietly).keys() == json.loads(document).keys()
    assert outcome(f"{line} --quiet", capsys) == (0, "", "")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{PLANS} --out a.json --uniform-out ./a.json", "--uniform-out a.json: it would replace the file of --out;"),
        (f"{PLANS} --out gpus.yaml", "--out gpus.yaml: it would replace the file of --cluster;"),
        (f"{PLANS} --profile p.json --report p.json", "--report p.json: it would replace the file of --profile;"),
        (f"{PLANS} --figure a.svg --figure memory=a.svg", "--figure a.svg: it would replace the file of --figure;"),
        ("simulate gpus.json --cluster gpus.yaml --trace gpus.json", "it would replace the file of PLAN.json;"),
        ("simulate gpus.json --cluster gpus.yaml --trace link.json", "it would replace the file of PLAN.json;"),
        ("launch plan.json --cluster laptops.yaml --sbatch plan.json", "it would replace the file of PLAN.json;"),
        (
            "plan --cluster gpus.yaml --model gpt2 --global-batch-size 8 --out gpt2/config.json",
            "--out gpt2/config.json: it would replace the file of --model;",
        ),
        ("profile host --json --out /dev/stdout", "--json and --out -: standard output takes one of them;"),
    ],
)
def test_no_output_replaces_another_file_of_the_command(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what it reads nor what it has just written, under whatever name."""
    (tmp_path / "link.json").symlink_to("gpus.json")
    (tmp_path / "p.json").write_text("{}", encoding="utf-8")
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text("{}", encoding="utf-8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, words, error = outcome(line, capsys)
    assert (code, words) == (2, "")
    assert said in error
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_device_takes_several_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = outcome(f"{PLANS} --out /dev/null --uniform-out /dev/null", capsys)
    assert (code, error) == (0, "")


@pytest.mark.parametrize("command", CHILDREN)
def test_a_process_of_its_own_gets_both_flags(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def run(words: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(child.subprocess, "run", run)
    assert main([*CHILDREN[command].split(), "--json", "--quiet"]) == 0
    assert main(CHILDREN[command].split()) == 0
    assert started == [[*started[1], "--json", "--quiet"], started[1]]


@pytest.mark.slow
@pytest.mark.rotates("commands", every=2, turn=0)
@pytest.mark.parametrize("command", ["discover", "doctor", "profile host"])
def test_a_process_of_its_own_prints_its_document(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*CHILDREN[command].split(), "--json", "--quiet"]) in (0, 1)
    document, said = capfd.readouterr()
    assert json.loads(document).keys() >= KEYS[command]
    assert said == ""


@pytest.mark.parametrize("command", WITHOUT_JSON)
def test_who_has_no_document_says_why(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(f"{command} --json", capsys) == (
        2,
        "",
        f"hetero {command}: --json: {WITHOUT_JSON[command]}; leave it out; see hetero {command} --help\n",
    )


def test_mistakes_are_told_quietly_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    loud, quiet = (outcome(f"show absent.json{flag}", capsys) for flag in ("", " --quiet"))
    assert quiet == loud
    assert quiet[0] == 2
    assert "absent.json: no such file" in quiet[2]


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        ("simulate gpus.json --cluster gpus.yaml --data-sheets --trace -", '{"traceEvents'),
        pytest.param(
            "simulate gpus.json --cluster gpus.yaml --data-sheets --report -", "<!DOCTYPE html>", marks=pytest.mark.slow
        ),
        pytest.param(
            "simulate gpus.json --cluster gpus.yaml --data-sheets --figure memory=-", "<?xml", marks=pytest.mark.slow
        ),
        ("launch plan.json --cluster laptops.yaml --program train.py --sbatch -", "#!"),
        ("elastic report logs --out -", "<!DOCTYPE html>"),
    ],
)
def test_a_file_may_be_standard_output(line: str, begins: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, document, said = outcome(line, capsys)
    assert code == 0
    assert document.lower().startswith(begins.lower())
    assert "written to standard output" in said or not said
    assert outcome(f"{line} --quiet", capsys)[::2] == (0, "")
    assert not Path("-").exists()


PRINTS_PAST_PYTHON = """
import argparse, os, sys
from hetero.commands.child import run_in_child
from hetero.standard_output import add_output_options, answer, directed_output

parser = argparse.ArgumentParser()
parser.add_argument("--child", action="store_true")
add_output_options(parser)
args = parser.parse_args()
with directed_output(parser, args):
    os.write(1, b"a library's word\\n")
    print("a word")
    sys.stdout.flush()
    if args.child:
        sys.exit(run_in_child("program", [], args))
    answer(args, lambda: {"a": "document"})
os.write(1, b"after it\\n")
"""


def test_what_a_library_prints_itself_is_a_word_too(tmp_path: Path) -> None:
    """Whether the command makes the document or its child. gloo prints so with torch 2.10 to 2.12."""
    (tmp_path / "program.py").write_text(PRINTS_PAST_PYTHON)

    def run(*flags: str) -> tuple[str, str]:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "program.py", *flags]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    words, document = "a library's word\na word\n", '{\n  "a": "document"\n}\n'
    assert run() == (f"{words}after it\n", "")
    assert run("--json") == (f"{document}after it\n", words)
    assert run("--json", "--quiet") == (f"{document}after it\n", "")
    assert run("--json", "--child") == (f"{document}after it\n", words * 2)


@pytest.mark.slow
def test_a_plan_goes_through_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, said = outcome(f"{PLANS} --out -", capsys)
    assert code == 0
    assert "written to standard output" in said
    Path("made.json").write_text(document)
    assert load(Plan, Path("made.json")).world_size == load(ClusterSpec, Path("gpus.yaml")).num_devices


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{PLANS} --json --out -", "--json and --out -: standard output takes one of them; name a file, or leave"),
        (f"{PLANS} --report - --uniform-out -", "--uniform-out - and --report -: standard output takes one of them"),
        ("show -", "PLAN.json is '-', must be a file or a folder; flags that write one file take '-'"),
        ("sweep quick --out -", "--out is '-', must be a file or a folder"),
        ("profile import . --out -", "--out is '-', must be a file or a folder"),
        ("elastic run --nodes 2 --logs - -- x.py", "--logs is '-', must be a file or a folder"),
    ],
)
def test_where_it_may_not_is_one_message(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, said = outcome(line, capsys)
    assert (code, out) == (2, "")
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_know_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, said = outcome(f"completion {shell}", capsys)
    assert (code, said) == (0, "")
    for command, leaf in LEAVES.items():
        shown = [action for action in leaf._actions if action.help != "==SUPPRESS=="]
        flags = [flag for action in shown for flag in action.option_strings]
        named = [*command.split(), *(flag.removeprefix("--") if shell == "fish" else flag for flag in flags)]
        assert [each for each in named if each not in script] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="of bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("hetero laun", ["launch"]),
        ("hetero elastic st", ["status", "store"]),
        ("hetero plan --cluster lapt", ["laptops.yaml"]),
        ("hetero show --sch", ["--schedule"]),
        ("hetero plan --objective ", ["money", "time"]),
        ("hetero elastic report lo", ["logs"]),
    ],
)
def test_bash_completes(typed: str, completed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert main(["completion", "bash"]) == 0
    words = [*shlex.split(typed), *([""] if typed.endswith(" ") else [])]
    typing = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _shtab_hetero hetero"
    script = f'{out.getvalue()}\n{typing}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == completed
