"""``hetero launch``: what it prints, what it refuses before anything starts, and runs over a stand-in for ssh."""

import hashlib
import os
import re
import secrets
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetero.cli import main
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec
from tests.unit.launch.plans import CLUSTER, OWN_FLAGS, UNEVEN, made_for, written

SSH = """#!/bin/sh
# Runs here what it is asked to run there; arguments: options, host, text.
for text; do host="$previous"; previous="$text"; done
[ "$host" != gone ] || { echo "ssh: connect to host gone: No route to host" >&2; exit 255; }
eval "$text"
"""

TORCHRUN = """#!/bin/sh
# Says what it was told. The second node fails, unless all wait; the first waits until it is told to end.
echo "torchrun $*"
[ -z "$SUCCEEDS" ] || exit 0
if [ "$8" = node_rank=0 ] || [ -n "$WAITS" ]; then
    trap 'echo ended; exit 1' TERM
    touch "$BEGUN"
    echo waits
    while :; do sleep 0.05; done
fi
while [ ! -e "$BEGUN" ]; do sleep 0.05; done
echo "RuntimeError: no memory left"
exit 3
"""


def lines_of(said: str) -> list[list[str]]:
    """The words of every torchrun line."""
    return [shlex.split(line) for line in said.replace("\\\n", " ").splitlines() if "torchrun --" in line]


def launched(*words: str, flags: list[str] | None = None) -> int:
    return main(["launch", *words, "--torchrun", "torchrun", "--", *(OWN_FLAGS if flags is None else flags)])


def refused(capsys: pytest.CaptureFixture[str], *words: str, flags: list[str] | None = None) -> str:
    """The one message, before which nothing was said."""
    assert launched(*words, flags=flags) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("hetero: ")
    return said.err


def test_lines_and_table_say_who_runs_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path)
    assert launched(plan, "--hosts", "fast=a", "slow=b") == 0
    said = capsys.readouterr().out
    first, second = lines_of(said)
    assert first[:6] == shlex.split("torchrun --nnodes 2 --rdzv-backend hetero-static --rdzv-endpoint")
    assert re.fullmatch(r"a:(1[5-9]|2\d)\d{3}", first[6])
    assert second[:7] == first[:7]
    assert [words[7:9] for words in (first, second)] == [["--rdzv-conf", f"node_rank={node}"] for node in (0, 1)]
    assert [words[words.index("--nproc-per-node") + 1] for words in (first, second)] == ["2", "1"]
    assert first[first.index("pretrain_gpt.py") + 1 :][:4] == ["--hetero-plan", plan, "--num-layers", "6"]
    assert first[-len(OWN_FLAGS) :] == OWN_FLAGS
    assert re.search(r"0-1 +│ a +│ +0 │ cpu 0-1 +│ +0 │ 0, tp 2 +│ emb \+ 0-3", said)
    assert re.search(r"2 +│ b +│ +1 │ cpu 0 +│ +0 │ 1 +│ 4-5 \+ head", said)


def test_a_hostfile_names_the_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched(written(tmp_path), "--hosts", "a,b", "--hostfile", "c") == 2
    assert "--hostfile and --hosts exclude each other; leave one out" in capsys.readouterr().err
    (tmp_path / "hostfile").write_text("b slots=1 type=slow\na slots=2 type=fast\n")
    assert launched(written(tmp_path), "--hostfile", str(tmp_path / "hostfile")) == 0
    said = capsys.readouterr().out
    assert "made up" not in said
    first, _ = lines_of(said)
    assert first[6].startswith("a:")
    (tmp_path / "hostfile").write_text("b slots=1\na slots=2\n")
    assert "line 1: b has 1 slots, the plan has 2 x cpu on node 0 (fast)" in refused(
        capsys, written(tmp_path), "--hostfile", str(tmp_path / "hostfile")
    )


def test_what_is_not_complete_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", written(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "# The names of hosts are made up" in said
    assert "a plan does not imply --lr, --tokenizer-type, --train-iters, --data-path" in said


def test_a_flag_that_says_the_same_stands_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launched(written(tmp_path), flags=[*OWN_FLAGS, "--norm-epsilon=1.0e-5", "--swiglu"]) == 0
    words = lines_of(capsys.readouterr().out)[0]
    assert [word for word in words if "norm-epsilon" in word] == ["--norm-epsilon=1.0e-5"]
    assert words.count("--swiglu") == 1


def test_flags_that_contradict_the_plan_are_named_with_both_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--num-layers", "12", "--bf16", "--micro-batch-size=2", "--hetero-plan", "other.json"]
    said = refused(capsys, written(tmp_path), flags=[*OWN_FLAGS, *more])
    assert said == (
        f"hetero: flags after -- contradict the plan: --hetero-plan other.json (the plan says {tmp_path}/plan.json), "
        "--num-layers 12 (the plan says 6), --bf16 (the plan does not have it), --micro-batch-size 2 (the plan states "
        "it for each stage); leave them out, or make a plan for them\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a"], "1 host for a plan that needs 2"),
        (["--hosts", "a,a"], "a is named twice"),
        (["--hosts", "fast=a", "slwo=b"], "unknown node type 'slwo' (did you mean 'slow'?)"),
        (["--run"], "--run: the plan needs 2 hosts; name them with --hosts or --hostfile"),
        (["--sbatch-option", "account=me"], "has no effect without --sbatch"),
        (["--hosts", "a,b", "--sbatch"], "--hosts beside --sbatch: Slurm chooses the hosts"),
        (["--hostfile", "none"], "none: no such file"),
        (["--hosts", "a", "slots=4"], "--hosts slots=4: that is from a hostfile"),
        (["--hosts", "127.0.0.1,localhost"], "127.0.0.1 and localhost name one machine"),
        (["--hosts", "localhost,b"], "all meet at node 0, which is localhost; to b that is another machine"),
        (["--hosts", "fast=-oX@a", "slow=b"], "'-oX@a' is no name of a host"),
        (["--logs", "folder"], "--logs has no effect but with --run or under Slurm"),
        (["--sbatch", "none/job.sbatch"], "--sbatch none/job.sbatch: there is no folder none"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, written(tmp_path), *words)


def test_what_a_plan_cannot_say_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, written(tmp_path), "--sbatch", flags=["--lr", "1", "--train-samples", "8"])
    assert "required and missing after --: --tokenizer-type, --data-path" in said


def test_a_plan_without_a_cluster_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, written(tmp_path, UNEVEN))
    assert "it does not say for which cluster it was made; add --cluster CLUSTER.yaml" in said
    save(CLUSTER, tmp_path / "cluster.json")
    assert launched(written(tmp_path, UNEVEN), "--cluster", str(tmp_path / "cluster.json")) == 0


def test_a_plan_for_other_nodes_is_refused_and_one_for_other_links_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = ClusterSpec(node_types=CLUSTER.node_types[::-1], links=CLUSTER.links)
    save(turned, tmp_path / "cluster.json")
    said = refused(capsys, written(tmp_path), "--cluster", str(tmp_path / "cluster.json"))
    assert "was made for 1 x fast (2 cpu), 1 x slow (1 cpu);" in said
    assert "cluster.json has 1 x slow (1 cpu), 1 x fast (2 cpu); give the cluster" in said
    save(ClusterSpec(node_types=CLUSTER.node_types), tmp_path / "cluster.json")
    assert launched(written(tmp_path), "--cluster", str(tmp_path / "cluster.json")) == 0
    said = capsys.readouterr().err
    assert "the cluster has other links than when the plan was made" in said
    assert said.rstrip().endswith("this plans again: hetero plan --cluster c.yaml")


SCONTROL = """#!/bin/sh
# Nodes with addresses, of which the job has all; the controller of this test counts no GPUs.
for node in $(echo "$4" | tr , ' '); do echo "NodeName=$node NodeAddr=address-of-$node NodeHostName=$node"; done
"""

SRUN = """#!/bin/sh
echo "$*"
tr '\\0' ' ' < /proc/$PPID/cmdline | grep -q "$A_VALUE" && echo "the line of hetero has the value"
# What it hands on.
echo "$A_VALUE $ANOTHER"
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heterogeneous job of the nodes ``big`` and ``small``, with stand-ins for Slurm's commands."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2"}
    variables |= {"SLURM_JOB_NODELIST_HET_GROUP_0": "big", "SLURM_JOB_NODELIST_HET_GROUP_1": "small"}
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name, text in (variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}).items():
        monkeypatch.setenv(name, text)


@pytest.mark.usefixtures("allocation")
def test_inside_an_allocation_slurms_nodes_are_shown_and_its_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = written(tmp_path)
    assert launched(plan) == 0
    said = capfd.readouterr().out
    assert re.search(r"0-1 +│ big .*\n.*\n│ 2 +│ small ", said)
    assert "\nsrun --export=ALL --kill-on-bad-exit=1 --het-group=0 --nodes=1 --ntasks=1" in said
    # It goes on as the shell of the step.
    command = [sys.executable, "-m", "hetero", "launch", plan, "--run", "--torchrun", "torchrun"]
    command += ["--env", "A_VALUE", "--env", "ANOTHER", "--", *OWN_FLAGS]
    environment = {**os.environ, "A_VALUE": "of-this-test", "ANOTHER": "from here"}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert said.endswith("\nof-this-test from here\n")
    assert "has the value" not in said
    assert said.count("of-this-test") == 1, "it is in the environment alone"
    assert re.search(
        r" --rendezvous address-of-big:(1[5-9]|2\d)\d{3} --logs launch-logs --node big=0:2 --node small=1:1 ", said
    )
    assert " -- torchrun pretrain_gpt.py --hetero-plan " in said


@pytest.mark.usefixtures("allocation")
def test_inside_an_allocation_hosts_that_are_named_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Slurm's nodes are started by srun, others over ssh."""
    plan = written(tmp_path)
    assert launched(plan, "--hosts", "a,b") == 0
    assert "srun" not in capfd.readouterr().out
    assert launched(plan, "--hosts", "fast=small", "slow=big") == 0
    assert "--node small=0:2 --node big=1:1" in " ".join(capfd.readouterr().out.replace("\\", "").split())
    assert launched(plan, "--components", "slow,fast") == 0
    assert "--node small=0:2 --node big=1:1" in " ".join(capfd.readouterr().out.replace("\\", "").split())
    assert launched(plan, "--hosts", "a,b", "--components", "slow,fast") == 2
    assert "--components has no effect but in an allocation of Slurm: leave it out" in capfd.readouterr().err
    monkeypatch.setenv("SLURM_HET_SIZE", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "big")
    assert "has 1 node (big), the plan needs 2: 1 x fast (2 cpu), 1 x slow (1 cpu); submit" in refused_here(plan, capfd)


@pytest.mark.usefixtures("allocation")
def test_a_launch_in_every_task_of_a_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("STEP_ID", "0"), ("PROCID", "1"), ("STEP_NUM_TASKS", "2"), ("STEP_NODELIST", "big,small")):
        monkeypatch.setenv(f"SLURM_{name}", text)
    plan = written(tmp_path)
    said = refused_here(plan, capfd)
    assert "this is task 1 of the 2 of a step of Slurm; a launch starts a task on each node itself: run it once" in said
    # srun --pty bash in an allocation of two nodes: the task with the terminal is the user's shell.
    monkeypatch.setattr("os.isatty", lambda descriptor: descriptor == 0)
    assert launched(plan, "--print") == 0


def refused_here(plan: str, capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    assert launched(plan, "--run") == 2
    return capfd.readouterr().err


def test_a_script_has_a_value_once_and_then_others_may_not_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value, inherited = (secrets.token_hex(16) for _ in range(2))
    monkeypatch.setenv("ANOTHER", inherited)
    script, plan = tmp_path / "job.sbatch", written(tmp_path)
    script.touch(mode=0o644)
    words = [plan, "--sbatch", str(script), "--env", "ANOTHER"]
    assert launched(*words) == 0
    assert script.stat().st_mode & 0o777 == 0o644, "there is nothing to hide in it"
    assert launched(*words, f"--env=A_VALUE={value}") == 0
    assert script.stat().st_mode & 0o777 == 0o600
    text = script.read_text()
    assert (text.count(value), text.count(inherited)) == (1, 0)
    assert "--env ANOTHER --env=A_VALUE --torchrun" in text.splitlines()[1], "made by"
    assert launched(*words, f"--env=1{value}={value}") == 2
    assert "--env is '1" in (said := "".join(capsys.readouterr()))
    assert said.count(value) == 1, "of the name"


def test_printed_lines_take_a_value_from_where_they_are_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    value = secrets.token_hex(16)
    monkeypatch.setenv("A_VALUE", value)
    words = [written(tmp_path), "--hosts", "a,b", "--env", "A_VALUE", "--env", "ANOTHER=b c"]
    assert launched(*words) == 0
    said = capsys.readouterr().out
    assert said.count("A_VALUE=\"${A_VALUE:?is not set: set it in this shell first}\" ANOTHER='b c' \\\n") == 2
    assert launched(*words, "--json") == 0
    said += capsys.readouterr().out
    assert '"A_VALUE": null' in said
    assert value not in said


class Hosts:
    """A folder with the program, and ``ssh`` and ``torchrun`` that stand in for the real ones."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, text in (("ssh", SSH), ("torchrun", TORCHRUN)):
            (folder / name).write_text(text)
            (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
        (folder / "pretrain_gpt.py").touch()
        self.plan = written(folder)
        self.folder = folder
        monkeypatch.chdir(folder)
        monkeypatch.setenv("BEGUN", str(folder / "begun"))

    def words(self, *hosts: str) -> list[str]:
        how = ["--run", "--ssh", f"{self.folder}/ssh -v", "--logs", "logs", "--torchrun", f"{self.folder}/torchrun"]
        return ["launch", self.plan, "--hosts", *hosts, *how, "--master-addr", "far", "--", *OWN_FLAGS]

    def run(self, *hosts: str) -> int:
        return main(self.words(*hosts))


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(tmp_path, monkeypatch)


def test_all_hosts_run_over_ssh_to_their_end(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUCCEEDS", "yes")
    assert hosts.run("me@far", "localhost") == 0
    said = capsys.readouterr().out
    for host, node in (("me@far", 0), ("localhost", 1)):
        meeting = rf"--nnodes 2 --rdzv-backend hetero-static --rdzv-endpoint far:\d+ --rdzv-conf node_rank={node}"
        assert re.search(f"{host}: torchrun {meeting} ", said)
    assert sorted(path.name for path in (hosts.folder / "logs").iterdir()) == ["localhost.log", "me@far.log"]


HIDES = """import hashlib, os, psutil
value = os.environ["A_VALUE"]
# Up to a character that is quoted in a command line.
part = value[:32]
shown = [p.info["cmdline"][0] for p in psutil.process_iter(["cmdline"]) if part in " ".join(p.info["cmdline"] or [])]
print("lines with the value:", shown, "and it is", hashlib.sha256(value.encode()).hexdigest(), os.environ["ANOTHER"])
"""


def test_no_list_of_processes_shows_a_value(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One host is reached over ssh, one is this machine; each looks at all processes while both run."""
    value = f"{secrets.token_hex(16)} 'quoted' \u00e9\nand a second line"
    monkeypatch.setenv("A_VALUE", value)
    (hosts.folder / "torchrun").write_text(f"#!{sys.executable}\n{HIDES}")
    given = ("--env", "A_VALUE", "--env", "ANOTHER=as it is")
    assert hosts.run("far", "localhost", *given) == 0
    said = capsys.readouterr()
    digest = hashlib.sha256(value.encode()).hexdigest()
    for host in ("far", "localhost"):
        assert f"{host}: lines with the value: [] and it is {digest} as it is\n" in said.out
    assert value[:32] not in said.out + said.err
    monkeypatch.delenv("A_VALUE")
    assert hosts.run("far", "localhost", *given, "--env", "NOR_THIS") == 2
    assert capsys.readouterr().err == (
        "hetero: --env A_VALUE, NOR_THIS: not set in this environment; export them first, or give NAME=VALUE\n"
    )


def test_a_host_that_fails_ends_the_others_and_is_told_with_its_log(
    hosts: Hosts, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hosts.run("far", "other") == 2
    said = capsys.readouterr()
    assert "host other (node 1, slow) has ended with exit code 3, after which the other was told to end" in said.err
    assert "; the last lines of logs/other.log:\n    torchrun --nnodes 2 --rdzv-backend hetero-static " in said.err
    assert said.err.endswith("\n    RuntimeError: no memory left\n")
    assert (hosts.folder / "logs" / "far.log").read_text().splitlines()[-1] == "ended"


def test_a_signal_ends_all_hosts(hosts: Hosts) -> None:
    command = [sys.executable, "-m", "hetero", *hosts.words("far", "127.0.0.1")]
    with subprocess.Popen(command, env={**os.environ, "WAITS": "yes"}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: list[str] = []
        while len([line for line in said if line.endswith("waits\n")]) < 2:
            said.append(process.stdout.readline())
            assert said[-1], said
        process.terminate()
        assert process.wait() == 130
    for name in ("far", "127.0.0.1"):
        assert (hosts.folder / "logs" / f"{name}.log").read_text().splitlines()[-1] == "ended"


def test_a_signal_while_a_host_is_started_leaves_none_running(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAITS", "yes")
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if options.get("start_new_session"):
                started.append(self)
            if len(started) == 2:
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    assert hosts.run("far", "127.0.0.1") == 130
    assert [process.returncode is not None for process in started] == [True, True]


def test_hosts_are_asked_first(hosts: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts.run("far", "gone") == 2
    said = capsys.readouterr()
    assert "host gone (node 1, slow)" in said.err
    assert "No route to host; try 'ssh gone true'" in said.err
    assert said.out == ""
    (hosts.folder / "pretrain_gpt.py").unlink()
    assert hosts.run("far", "localhost") == 2
    problem = "there is no program pretrain_gpt.py; hosts need what this one has, in the same place"
    assert capsys.readouterr().err == (
        f"hetero: host far (node 0, fast): {problem}\nhost localhost (node 1, slow): {problem}\n"
    )


def test_provenance_is_kept_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", written(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "made for: 1 x fast (2 cpu), 1 x slow (1 cpu)\n" in said
    assert "predicted: 1.25 s per step (1.10 to 1.50), bubble 25.0%\nmade by: hetero plan --cluster c.yaml\n" in said
    assert made_for() == UNEVEN, "where a plan comes from is no part of what it does"
