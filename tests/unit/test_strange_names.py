"""A stranger's files and values of etcd through the commands that show names: nothing of them moves a cursor.

The one guard refuses names where they are read, the other shows whatever comes through as escapes. Each is tested
alone: the second one with the first taken away.
"""

import contextlib
import copy
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from hetero import serialization
from hetero.cli import main
from hetero.elastic import job_store
from hetero.elastic.etcd import StoredKeys, StoredValue
from hetero.elastic.events import ElasticEvent, EventKind
from hetero.elastic.records import JobSettings, NodeInfo, Notice, Outcome
from hetero.errors import ConfigError
from hetero.launch import hostfile
from hetero.launch.slurm_batch_script import batch_script
from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanProvenance
from hetero.serialization import checked, to_json
from hetero.spec.cluster import ClusterSpec
from hetero.spec.profile import Profile
from hetero.sweep.sweep_file import SweepSpec
from tests.helpers.sources import ROOT
from tests.unit.launch.plans import CLUSTER, OWN_FLAGS, made_for

STRANGE = {
    "a new line": "x\ntouch MARKER #",
    "an escape sequence": "x\x1b[2J\x1b[31m",
    "one byte for it": "x\x9b2J",
    "a return": "x\rtouch MARKER #",
    "a change of direction": "x\u202ey",
    "a space that is not seen": "x\u200by",
}

MARKUP = "[red]x[/red]:smile:"

Command = Callable[[Path], list[str]]


def with_plan(*words: str) -> Command:
    return lambda folder: [words[0], str(folder / "plan.json"), *words[1:]]


def with_cluster(*words: str) -> Command:
    return lambda folder: [*words, "--cluster", str(folder / "cluster.json")]


def with_both(*words: str) -> Command:
    return lambda folder: [
        words[0],
        str(folder / "plan.json"),
        "--cluster",
        str(folder / "cluster.json"),
        *words[1:],
    ]


COMMANDS: dict[str, Command] = {
    "show": with_plan("show"),
    "show --json": with_plan("show", "--json"),
    "validate": with_plan("validate"),
    "launch": with_plan("launch"),
    "launch --json": with_plan("launch", "--json"),
    "launch --sbatch": with_plan("launch", "--sbatch", "-", "--", *OWN_FLAGS),
    "launch --hostfile": lambda folder: [*with_plan("launch")(folder), "--hostfile", str(folder / "hosts")],
    "launch --cluster": with_both("launch"),
    "validate --cluster": with_both("validate"),
    "simulate": with_both("simulate", "--data-sheets"),
    "simulate --report": with_both("simulate", "--data-sheets", "--report", "-"),
    "simulate --figure": with_both("simulate", "--data-sheets", "--figure", "-"),
    "devices": with_cluster("devices"),
}


def renamed(value: Plan | ClusterSpec, suffix: str = "") -> str:
    """A file with ``value``, with ``suffix`` after the name of a node type, and a device that data sheets know."""
    return to_json(value).replace('"cpu"', '"V100-16"').replace('"fast"', json.dumps(f"fast{suffix}"))


def write_files(folder: Path, suffix: str) -> None:
    """Write a plan, its cluster and hosts, with ``suffix`` after the name of a node type."""
    (folder / "plan.json").write_text(renamed(made_for(), suffix))
    (folder / "cluster.json").write_text(renamed(CLUSTER, suffix))
    (folder / "hosts").write_text(f"one slots=2 type=fast{suffix}\ntwo slots=1 type=slow\n", encoding="utf-8")


def raw(text: str) -> set[str]:
    """The characters of ``text`` that are not printable, but for ends of lines."""
    return {character for character in text if not character.isprintable() and character != "\n"}


def shell_lines(text: str) -> Iterator[str]:
    """The lines of ``text`` that a shell would run, with what goes on in the next line."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("suffix", STRANGE.values(), ids=STRANGE)
def test_a_name_that_is_not_printable_is_refused(
    suffix: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path, suffix)
    assert main(COMMANDS[command](tmp_path)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hetero: ")
    assert said.err.count("\n") == 1
    assert "is not printable; take it out" in said.err
    assert not raw(said.err)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("suffix", STRANGE.values(), ids=STRANGE)
def test_a_name_that_came_through_all_the_same_is_shown_as_escapes(
    suffix: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "check_fields", lambda *_, **__: None)
    monkeypatch.setattr(hostfile, "check_name", lambda *_, **__: None)
    write_files(tmp_path, suffix)
    main(COMMANDS[command](tmp_path))
    said = capsys.readouterr()
    assert said.out + said.err
    assert not raw(said.out + said.err)


@pytest.mark.parametrize("suffix", [STRANGE["a new line"], STRANGE["a return"]])
def test_a_name_never_ends_a_comment_of_a_line_that_is_pasted(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serialization, "check_fields", lambda *_, **__: None)
    write_files(tmp_path, suffix)
    assert main(["launch", str(tmp_path / "plan.json"), "--hosts", "one,two"]) == 0
    lines = capsys.readouterr().out.partition("\n# ")[2]
    assert lines
    assert all("torchrun" in shlex.split(line)[0] for line in shell_lines(f"# {lines}"))


def test_the_line_that_asked_for_a_script_is_one_line_of_it() -> None:
    made_by = "hetero launch 'x\ntouch MARKER\x85touch MARKER'"
    script = batch_script(CLUSTER, ["hetero"], flags=[], environment={}, sbatch_options=[], made_by=made_by)
    assert r"# Made by: hetero launch 'x\ntouch MARKER\x85touch MARKER'" in script.text.splitlines()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("hetero plan --cluster 'a b.yaml'", "hetero plan --cluster 'a b.yaml'"),
        ("hetero plan; touch MARKER", "hetero 'plan;' touch MARKER"),
        ("hetero plan `touch MARKER` $(touch MARKER)", "hetero plan '`touch' 'MARKER`' '$(touch' 'MARKER)'"),
        ("hetero plan > MARKER", "hetero plan '>' MARKER"),
        ("hetero plan\ntouch MARKER", "hetero plan touch MARKER"),
        ("hetero plan 'a\nb' \x1b[2J\u202e", r"hetero plan 'a\nb' '\x1b[2J\u202e'"),
        ("hetero plan 'a", "hetero plan ''\"'\"'a'"),
    ],
)
def test_the_command_that_a_plan_says_made_it_is_shown_so_that_a_shell_runs_no_other(command: str, shown: str) -> None:
    provenance = made_for().provenance
    assert provenance is not None
    made = PlanProvenance(command=command, cluster=provenance.cluster, prediction=provenance.prediction)
    assert made.shown_command == shown


@pytest.mark.parametrize("name", ["show", "launch --cluster", "simulate"])
def test_such_a_command_is_shown_by_all_commands(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for another price of its nodes has the command said that plans again."""
    plan = json.loads(renamed(made_for()))
    plan["provenance"]["command"] = "hetero plan --model m.yaml; touch MARKER\n\x1b[2Jtouch MARKER"
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    cluster = copy.deepcopy(plan["provenance"]["cluster"])
    cluster["node_types"][0]["price_per_hour"] = 3.0
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    assert main(COMMANDS[name](tmp_path)) == 0
    said = capsys.readouterr()
    both = said.out + said.err
    assert not raw(both)
    assert not [line for line in both.splitlines() if line.startswith("touch")]
    assert "; touch" not in both


@pytest.mark.parametrize("command", ["show", "launch", "launch --cluster"])
def test_markup_in_a_name_is_printed_as_it_is(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(tmp_path, MARKUP)
    assert main(COMMANDS[command](tmp_path)) == 0
    assert f"fast{MARKUP}" in capsys.readouterr().out.replace("\n", "")


class _StrangersEtcd:
    """An etcd that has these values, by key below the job's."""

    values: ClassVar[dict[str, str]] = {}

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def read(self, prefix: str) -> StoredKeys:
        del prefix
        values = {key: StoredValue(data=text.encode(), revision=1) for key, text in self.values.items()}
        return StoredKeys(values=values, revision=1)


def node(text: str) -> NodeInfo:
    return NodeInfo(
        name=f"node{text}",
        incarnation="1",
        node_type=f"cpu{text}",
        num_ranks=1,
        host=f"10.0.0.1{text}",
        port=1,
        failure_domain=f"rack{text}",
        settings="0",
    )


def strangers_values(text: str) -> dict[str, str]:
    """Keys and values of a job that hold ``text``."""
    settings = JobSettings(program=f"p{text}", flags=(f"f{text}",), versions={"python": "3"})
    of_other = json.loads(to_json(node("")))
    return {
        "token": "t",
        "settings": to_json(settings),
        "nodes/node": to_json(node("")),
        f"nodes/node{text}": to_json(node(text)),
        f"nodes/other{text}": json.dumps({**of_other, f"key{text}": 1, "version": f"1{text}"}),
        "notices/node": to_json(Notice(node="node", reason=f"leaves{text}")),
        f"bad/node{text}/1/1/unit": "",
        f"forgotten/{text}": f"1{text}",
        "committed": f"1{text}",
        "broken/0": f"broke{text}",
        "finished": to_json(Outcome(exit_code=1, reason=f"ended{text}")),
    }


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["leave", "absent"], ["forget"]], ids=" ".join)
@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_values_and_keys_of_etcd_are_shown_as_escapes(
    text: str, words: Sequence[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "EtcdConnection", _StrangersEtcd)
    monkeypatch.setattr(_StrangersEtcd, "values", strangers_values(text))
    monkeypatch.setattr(job_store.JobStore, "forget", lambda _: False)
    main(["elastic", *words])
    said = capsys.readouterr()
    assert said.out + said.err
    assert not raw(said.out + said.err)


def test_a_node_of_etcd_with_a_strange_name_is_none_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STRANGE["a new line"]
    monkeypatch.setattr(job_store, "EtcdConnection", _StrangersEtcd)
    monkeypatch.setattr(_StrangersEtcd, "values", strangers_values(text))
    state = job_store.JobStore(None, "job").read()  # type: ignore[arg-type]  # the stand-in asks for none
    assert list(state.nodes) == ["node"]
    assert state.unreadable[f"nodes/node{text}"] == (
        r"etcd /hetero/job/nodes/nodex\ntouch MARKER #: name: 'nodex\ntouch MARKER #' has the character U+000A, which "
        "is not printable; take it out"
    )
    assert not state.bad_copies
    assert all(problem.isprintable() for problem in state.unreadable.values())


@pytest.mark.parametrize("text", [*STRANGE.values(), "ü"], ids=[*STRANGE, "no ASCII"])
def test_a_token_that_no_request_could_carry_is_none_and_is_not_shown(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "EtcdConnection", _StrangersEtcd)
    monkeypatch.setattr(_StrangersEtcd, "values", {"token": f"0123{text}"})
    state = job_store.JobStore(None, "job").read()  # type: ignore[arg-type]  # the stand-in asks for none
    assert state.token is None
    assert state.unreadable == {"token": "etcd /hetero/job/token: it has other characters than printable ones of ASCII"}


@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_a_page_of_a_run_shows_reasons_as_escapes(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds: tuple[EventKind, ...] = ("agent_started", "plan", "epoch_made", "forked", "detected")
    events = [
        ElasticEvent(time_s=1000.0 + at, node="a", kind=kind, since_change_s=0.0, epoch=1, nodes=("a",), detail=text)
        for at, kind in enumerate(kinds)
    ]
    lines = "".join(json.dumps(json.loads(to_json(each))) + "\n" for each in events)
    (tmp_path / "a.events.jsonl").write_text(lines)
    assert main(["elastic", "report", str(tmp_path), "--out", "-"]) == 0
    said = capsys.readouterr()
    assert "<html" in said.out
    assert not raw(said.out + said.err)


def test_a_flag_takes_no_name_that_is_not_printable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["elastic", "status", "--job", "a\x1b[2J"]) == 2
    said = capsys.readouterr().err
    assert said == (
        r"hetero elastic status: --job: 'a\x1b[2J' has the character U+001B, which is not printable; take it out; see "
        "hetero elastic status --help\n"
    )


def leaves(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all texts in ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        yield from [(*place, key)] if isinstance(child, str) else leaves(child, (*place, key))


def taken(cls: type[Any], content: Any) -> set[str]:
    """The fields, without indices, that take a text with an escape sequence at its end; one of each list is tried."""
    places = {".".join(key for key in place if isinstance(key, str)): place for place in leaves(content)}
    found = set()
    for name, place in places.items():
        strange = copy.deepcopy(content)
        holder = strange
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] += "\x1b[2J"
        with contextlib.suppress(ConfigError):
            checked(cls, strange, source="a file")
            found.add(name)
    return found


@pytest.mark.parametrize(
    ("cls", "path", "any_text"),
    [
        (ClusterSpec, "scripts/presets/clusters/a100_v100.yaml", set()),
        (SweepSpec, "hetero/data/sweeps/published.yaml", set()),
        (Profile, "hetero/data/profiles/opt-30b.a100-40.json", {"provenance.source", "provenance.notes"}),
        (Plan, "scripts/presets/plans/mixed_cluster.json", {"provenance.command"}),
    ],
    ids=lambda value: Path(value).name if isinstance(value, str) else "",
)
def test_these_fields_of_a_file_take_any_text_and_no_other(cls: type[Any], path: str, any_text: set[str]) -> None:
    file = ROOT / path
    content = json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())
    assert taken(cls, content) == any_text
