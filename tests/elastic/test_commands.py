"""``hetero elastic`` as users type it."""

import argparse
import dataclasses
import fcntl
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from hetero import cli
from hetero.commands import elastic_run
from hetero.commands.elastic import agent_options
from hetero.elastic.certificate_authority import make_certificates
from hetero.elastic.certificate_folder import CertificateFolder
from hetero.elastic.copy_tls import CopyTls
from hetero.elastic.etcd import EtcdAddress, delete_request, put_request, wait_until_it_answers
from hetero.elastic.events import read_events
from hetero.elastic.folder_claim import SHARED_MEMORY, delete_folder
from hetero.elastic.job_store import JobState, JobStore
from hetero.elastic.records import CopyTrust, JobSettings, NodeReport, Notice, Outcome, RankReport, UploadSchedule
from hetero.errors import ConfigError
from hetero.peer_limits import MAX_DESCRIPTORS
from hetero.serialization import to_json
from tests.helpers.commands import ROOT
from tests.helpers.elastic_epochs import epoch_of, node_info
from tests.helpers.etcd import EtcdServer
from tests.helpers.ports import free_ports

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

CLUSTER = """\
node_types:
  - {name: box, device: cpu, gpus_per_node: 1, count: 2, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}
"""


OUTCOME = to_json(Outcome(exit_code=1, reason="too few nodes"))


def trains_on_both(state: JobState) -> bool:
    """Whether an epoch of two nodes has done its first step."""
    if state.epoch is None or len(state.epoch.nodes) < 2:
        return False
    ranks = [rank for report in state.reports.values() for rank in report.ranks if rank.epoch == state.epoch.number]
    return len(ranks) == 2 and all(rank.phase == "step" for rank in ranks)


@pytest.mark.slow
@pytest.mark.rotates(every=6, turn=3)
def test_a_job_on_one_machine(tmp_path: Path, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``run`` starts etcd and agents; ``status`` shows them; ``leave`` takes one out, the other one finishes."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    program = ["tests/helpers/fake_program.py", "--hetero-cluster", str(tmp_path / "cluster.yaml"), "--steps", "200"]
    words = ["run", "--job", job, "--nodes", "2", "--logs", str(tmp_path / "logs"), "--dwell", "0", "--", *program]
    with subprocess.Popen(
        [sys.executable, "-m", "hetero", "elastic", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            found = re.search(r"etcd (https://\S+), job", run.stdout.readline())
            assert found is not None
            certificates = tmp_path / "logs" / "etcd" / job / "certificates"
            where = ["--etcd", found[1], "--certificates", str(certificates), "--job", job]
            assert f"hetero elastic status {shlex.join(where)}" in run.stdout.readline()
            store = JobStore(CertificateFolder(certificates).address(found[1]), job)
            deadline = time.monotonic() + 120
            while not trains_on_both(state := store.read()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert state.epoch is not None
            assert cli.main(["elastic", "status", *where]) == 0
            shown = capsys.readouterr().out
            assert f"job {job}: epoch {state.epoch.number} from step {state.epoch.start.step}" in shown
            for name in ("node-0", "node-1"):
                assert name in shown
            assert "(leads)" in shown
            assert "copies travel by TLS with certificates of etcd's authority" in shown
            # Who has not the certificates of the run: every other user of this machine.
            assert cli.main(["elastic", "status", "--etcd", found[1], "--job", job]) == 2
            assert "no TLS with it" in capsys.readouterr().err
            assert cli.main(["elastic", "leave", *where, "node-7"]) == 2
            assert "has no node 'node-7'; it has node-0, node-1" in capsys.readouterr().err
            assert cli.main(["elastic", "leave", *where, "node-1"]) == 0
            said = run.stdout.read()
            assert run.wait(100) == 0
        finally:
            run.kill()
    assert "kill -9" in said
    assert "node node-1 has left: hetero elastic leave" in said
    assert "all ranks have finished" in said
    assert not list(Path("/dev/shm").glob(f"hetero-{job}-*"))


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_a_stopped_job_on_one_machine_goes_on_and_ends_without_its_etcd(tmp_path: Path, job: str) -> None:
    """The same command goes on from the copies, another one is refused; etcd that is gone does not keep it."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    logs = tmp_path / "logs"

    def run(steps: int, output: Path) -> "subprocess.Popen[bytes]":
        flags = ["--hetero-cluster", str(tmp_path / "cluster.yaml"), "--steps", str(steps), "--step-s", "0.1"]
        options = ["--job", job, "--nodes", "1", "--logs", str(logs), "--wait-for-etcd", "1", "--lease", "3"]
        words = [sys.executable, "-m", "hetero", "elastic", "run", *options, "--", "tests/helpers/fake_program.py"]
        return subprocess.Popen([*words, *flags], cwd=ROOT, stdout=output.open("wb"), stderr=subprocess.STDOUT)

    def has_committed(number: int) -> bool:
        path = logs / "node-0.events.jsonl"
        events = read_events(path) if path.exists() else []
        return sum(event.kind == "committed" for event in events) >= number

    def wait_for_commit(number: int, process: "subprocess.Popen[bytes]", output: Path) -> None:
        deadline = time.monotonic() + 120
        while not has_committed(number):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)

    first, other, again = (tmp_path / f"{name}.out" for name in ("first", "other", "again"))
    process = run(60, first)
    try:
        wait_for_commit(1, process, first)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert f"etcd's data is kept in {logs}/etcd/{job}, copies in /dev/shm: the same command" in first.read_text()
        process = run(61, other)
        assert process.wait(60) == 2
        assert "with other settings: flags: here 61, in the job 60. Go on with the same command" in other.read_text()
        process = run(60, again)
        wait_for_commit(2, process, again)
        (etcd,) = (child for child in psutil.Process(process.pid).children() if child.name() == "etcd")
        etcd.kill()
        assert process.wait(100) == 0, again.read_text()
    finally:
        process.kill()
        process.wait()
    assert "rank 0 of 1 goes on from step 0" not in again.read_text()
    assert "etcd has ended with the code -9" in again.read_text()
    assert "all ranks of this node have finished; etcd was not told: " in again.read_text()
    assert not list(Path("/dev/shm").glob(f"hetero-{job}-*"))
    assert not (logs / "etcd" / job).exists()


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_a_job_goes_on_where_another_user_has_taken_the_name_of_its_folder(tmp_path: Path) -> None:
    """The name is known before; a link does here for a folder of another user, as any user can make one in a test."""
    job = f"test-{uuid.uuid4().hex[:8]}"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    taken = SHARED_MEMORY / f"hetero-{job}-node-0"
    taken.symlink_to(theirs)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    logs = tmp_path / "logs"
    flags = ["--hetero-cluster", str(tmp_path / "cluster.yaml"), "--steps", "60", "--step-s", "0.1"]
    options = ["--job", job, "--nodes", "1", "--logs", str(logs), "--lease", "3"]
    words = [sys.executable, "-m", "hetero", "elastic", "run", *options, "--", "tests/helpers/fake_program.py", *flags]

    def run(name: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(words, cwd=ROOT, stdout=(tmp_path / name).open("wb"), stderr=subprocess.STDOUT)

    def committed() -> int:
        path = logs / "node-0.events.jsonl"
        return sum(event.kind == "committed" for event in read_events(path)) if path.exists() else 0

    process = run("first")
    try:
        deadline = time.monotonic() + 120
        while not committed():
            assert process.poll() is None, (tmp_path / "first").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        (kept,) = SHARED_MEMORY.glob(f"hetero-{job}-node-0~*")
        said = f"hetero: {taken} is no folder of this user: copies of node node-0 go to {kept}\n"
        assert said in (tmp_path / "first").read_text()
        process = run("again")
        assert process.wait(100) == 0, (tmp_path / "again").read_text()
        assert f"copies of node node-0 are in {kept}, as those of its last agent" in (tmp_path / "again").read_text()
        assert "rank 0 of 1 goes on from step 0" not in (tmp_path / "again").read_text()
        assert not kept.exists()
        assert list(theirs.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        taken.unlink()
        for folder in SHARED_MEMORY.glob(f"hetero-{job}-*"):
            delete_folder(folder)


def test_a_second_run_of_a_job_on_one_machine_is_refused_at_once(
    tmp_path: Path, job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.commands.elastic_run.signal.signal", lambda *_: None)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    program = ["tests/helpers/fake_program.py", "--hetero-cluster", str(tmp_path / "cluster.yaml")]
    data = tmp_path / "etcd" / job
    data.mkdir(parents=True)
    first = os.open(data, os.O_RDONLY)
    try:
        fcntl.flock(first, fcntl.LOCK_EX)
        assert cli.main(["elastic", "run", "--job", job, "--nodes", "1", "--logs", str(tmp_path), "--", *program]) == 2
    finally:
        os.close(first)
    assert (
        f"{data}: another run works with it; end that one, or give another --job or --logs" in capsys.readouterr().err
    )


def test_a_job_is_forgotten_unless_a_node_is_in_it(
    etcd: EtcdServer, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--etcd", etcd.url, "--job", job]
    store = JobStore(etcd.address, job)
    assert cli.main(["elastic", "forget", *where]) == 2
    assert f"knows no job {job}" in capsys.readouterr().err
    for key, value in (("token", "t"), ("nodes/a", to_json(node_info("a"))), ("finished", OUTCOME)):
        store.write([], [put_request(store.key(key), value)])
    assert cli.main(["elastic", "forget", *where]) == 2
    assert f"job {job} has the nodes a; end their agents first (hetero elastic leave NODE)" in capsys.readouterr().err
    store.write([], [delete_request(store.key("nodes/a")), put_request(store.key("nodes/z"), "{")])
    assert cli.main(["elastic", "forget", *where]) == 2
    said = capsys.readouterr().err
    assert f"etcd /hetero/{job}/nodes/z: not JSON" in said
    assert "end the agent that wrote it, or delete that key if none did" in said
    store.write([], [delete_request(store.key("nodes/z"))])
    assert cli.main(["elastic", "status", *where]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"it goes on when its agents are started again under --job {job}" in said
    assert cli.main(["elastic", "forget", *where, "--json"]) == 0
    assert '"forgotten": true' in capsys.readouterr().out
    assert [key.partition("/")[0] for key in store.read().revisions] == ["forgotten"]
    store.close()


def test_a_run_on_one_machine_does_not_wait_for_ever_for_nodes_of_the_one_before(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(etcd.address, job)
    for key, value in (("nodes/a", to_json(node_info("a"))), ("finished", to_json(Outcome(exit_code=0, reason="")))):
        store.write([], [put_request(store.key(key), value)])
    monkeypatch.setattr(elastic_run, "_LEASES_END_WITHIN_S", 0.0)
    args = argparse.Namespace(job=job, lease=0)
    settings = JobSettings(program="", flags=(), versions={})
    with pytest.raises(ConfigError, match="has finished, and keys of nodes that stay in etcd; to begin again, delete"):
        elastic_run._check_kept_run(args, store, settings=settings, data=tmp_path, copies=[tmp_path / "copies"])
    store.close()


def test_status_names_what_cannot_be_read(etcd: EtcdServer, job: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = JobStore(etcd.address, job)
    for key, value in (("token", "t"), ("notices/a", "{")):
        store.write([], [put_request(store.key(key), value)])
    store.close()
    assert cli.main(["elastic", "status", "--etcd", etcd.url, "--job", job]) == 0
    assert f"/hetero/{job}/notices/a" in capsys.readouterr().out


@pytest.mark.slow
def test_a_store_for_jobs(tmp_path: Path, job: str) -> None:
    """It listens where it is told to, and keeps its data over a restart."""
    (port,) = free_ports(1)
    address = EtcdAddress(urls=(f"http://127.0.0.1:{port}",))
    words = [sys.executable, "-m", "hetero", "elastic", "store", "--data", str(tmp_path / "data"), "--port", str(port)]
    for start in (1, 2):
        with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as store:
            try:
                wait_until_it_answers(address, attempts=200, pause=lambda: time.sleep(0.1))
                keys = JobStore(address, job)
                if start == 1:
                    keys.put_notice(Notice(node="a", reason="kept"))
                else:
                    assert keys.read().notices["a"].reason == "kept"
                keys.close()
            finally:
                store.send_signal(signal.SIGTERM)
            assert store.stdout is not None
            assert f"etcd listens on http://127.0.0.1:{port}" in store.stdout.read()


def test_no_job_of_that_name(etcd: EtcdServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["elastic", "status", "--etcd", etcd.url, "--job", "nobodys"]) == 2
    assert "knows no job nobodys; give the --job that its agents were given" in capsys.readouterr().err


def test_status_tells_a_straggler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [node_info("a"), node_info("b")]
    report = NodeReport(
        node="b",
        incarnation="1",
        ended=0,
        ranks=(RankReport(epoch=1, rank=1, phase="step", step=7, step_s=0.25, compute_s=0.125),),
    )
    state = JobState(
        token="t",
        nodes={node.name: node for node in nodes},
        epoch=dataclasses.replace(epoch_of(nodes), slower={"b": 1.75}),
        reports={"b": report},
    )
    monkeypatch.setattr(JobStore, "read", lambda _: state)
    assert cli.main(["elastic", "status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row_a,), (row_b,) = ([line for line in lines if f"│ {name} " in line] for name in "ab")
    assert "slower" not in row_a
    for shown in ("fast-slower-1.75", "250.0 ms", "125.0 ms"):
        assert shown in row_b


def options_of(*words: str) -> object:
    """What an agent is told by these flags."""
    found: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.commands.elastic._run_agent", lambda args: found.append(agent_options(args)) or 0)
        code = cli.main(["elastic", "agent", "--node-type", "box", *words, "--", "pretrain_gpt.py", "--lr", "1"])
    return found[0] if code == 0 else None


def test_flags_of_an_agent(tmp_path: Path) -> None:
    plain = options_of("--node-name", "n")
    assert (plain.job, plain.name, plain.node_type, plain.host) == ("hetero", "n", "box", "127.0.0.1")  # type: ignore[attr-defined]
    assert plain.folder == Path("/dev/shm/hetero-hetero-n")  # type: ignore[attr-defined]
    assert plain.failure_domain == "n"  # type: ignore[attr-defined]
    assert plain.settings.flags == ("--lr", "1")  # type: ignore[attr-defined]
    for words, value in (
        (["--upload-every", "8"], UploadSchedule(every_steps=8)),
        (["--upload-every", "2m"], UploadSchedule(every_s=120.0)),
        (["--keep-uploads", "3"], 3),
        (["--job", "j"], "j"),
        (["--lease", "3"], 3),
        (["--host", "10.0.0.1"], "10.0.0.1"),
        (["--port", "7"], 7),
        (["--failure-domain", "rack"], "rack"),
        (["--copies", str(tmp_path)], tmp_path),
        (["--logs", str(tmp_path)], tmp_path),
        (["--leave-within", "9"], 9.0),
        (["--object-store", "s3://b/r"], "s3://b/r"),
    ):
        name = words[0][2:].replace("-", "_")
        name = {
            "lease": "lease_s",
            "copies": "folder",
            "leave_within": "leave_within_s",
            "upload_every": "uploads",
        }.get(name, name)
        assert getattr(options_of(*words), name) == value
    leader = options_of("--min-nodes", "3", "--wait-for-nodes", "4", "--dwell", "5", "--min-gain", "0.5").leader  # type: ignore[attr-defined]
    assert (leader.min_nodes, leader.missing_s, leader.dwell_s, leader.min_gain) == (3, 4.0, 5.0, 0.5)
    stragglers = options_of("--straggler-threshold", "2", "--straggler-after", "9").stragglers  # type: ignore[attr-defined]
    assert (stragglers.threshold, stragglers.for_s) == (2.0, 9.0)
    assert options_of("--straggler-threshold", "inf").stragglers.threshold == math.inf  # type: ignore[attr-defined]
    etcd = options_of(
        "--etcd", "https://a:1,https://b:2/", "--etcd-ca", "c", "--etcd-cert", "d", "--etcd-key", "e"
    ).etcd  # type: ignore[attr-defined]
    assert etcd == EtcdAddress(urls=("https://a:1", "https://b:2"), ca="c", certificate="d", key="e")
    metadata = options_of("--metadata", "aws", "--metadata-url", "http://h:1").metadata  # type: ignore[attr-defined]
    assert metadata.url == "http://h:1/latest/meta-data/spot/instance-action"
    assert metadata.token_url == "http://h:1/latest/api/token"
    own = options_of("--tls-cert", "c.pem", "--tls-key", "k.pem")
    assert own.tls == CopyTls(  # type: ignore[attr-defined]
        certificate="c.pem", key="k.pem", trust=CopyTrust(file="c.pem", is_authority=False)
    )
    assert own.settings.copy_transport == "certificate"  # type: ignore[attr-defined]
    assert (plain.tls, plain.settings.copy_transport) == (None, "http")  # type: ignore[attr-defined]


def test_certificates_of_a_store_are_those_of_etcd_and_of_copies(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "made", host="127.0.0.1")
    short = options_of("--certificates", str(folder.path))
    client, ca = folder.client, str(folder.authority.certificate)
    files = {"certificate": str(client.certificate), "key": str(client.key)}
    assert short.etcd == EtcdAddress(urls=("https://127.0.0.1:2379",), ca=ca, **files)  # type: ignore[attr-defined]
    assert short.tls == CopyTls(**files, trust=CopyTrust(file=ca, is_authority=True))  # type: ignore[attr-defined]
    assert short.settings.copy_transport == "authority"  # type: ignore[attr-defined]
    long = options_of("--etcd-ca", ca, "--etcd-cert", files["certificate"], "--etcd-key", files["key"])
    assert long == short


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lease", "0"], "--lease is 0, must be at least 1"),
        (["--straggler-threshold", "1.1"], "--straggler-threshold 1.1, --straggler-after 60: take more than 1.1 times"),
        (["--straggler-after", "-1"], "and no negative seconds"),
        (["--node-name", "a/b"], "takes letters, digits"),
        (["--tls-cert", "c"], "give both or neither"),
        (["--metadata", "moon"], "no metadata server of 'moon' is known; give one of aws, gcp, azure"),
        (["--metadata-url", "http://h"], "name the cloud"),
        (["--etcd", "here"], "is no address"),
        (["--certificates", "c", "--etcd-ca", "d"], "--certificates stands for --etcd-ca, --etcd-cert and --etcd-key"),
        (["--etcd", "http://h:1", "--etcd-ca", "c"], "http://h:1: http has no use for certificates; give https://"),
        (["--certificates", "/no/such"], "/no/such: No such file or directory; name the folder that hetero elastic"),
    ],
)
def test_wrong_flags(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["elastic", "agent", "--node-type", "b", *words, "--", "pretrain_gpt.py"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--etcd", "http://me:a-secret@h:1"], "certificate (--etcd-cert, --etcd-key)"),
        (["--object-store", "s3://me:a-secret@bucket/run"], "set AWS_ACCESS_KEY_ID"),
        (["--metadata", "aws", "--metadata-url", "http://me:a-secret@h:1"], "give http://HOST:PORT alone"),
    ],
)
def test_credentials_in_urls_are_refused(words: list[str], fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["elastic", "agent", "--node-type", "b", *words, "--", "pretrain_gpt.py"]) == 2
    said = capsys.readouterr().err
    assert fix in said
    assert "a-secret" not in said
    assert "***@" in said


def test_a_store_with_credentials_is_refused_before_anything_of_a_run_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each agent would get the URL in its command line."""
    words = ["--object-store", "s3://me:a-secret@bucket", "--logs", str(tmp_path / "logs")]
    assert cli.main(["elastic", "run", "--nodes", "1", *words, "--", "pretrain_gpt.py"]) == 2
    assert "object store s3://***@bucket" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("flag", ["--hetero-cluster", "--hetero-emulate"])
def test_nodes_on_one_machine_are_those_of_the_cluster_file(flag: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    for words in ([flag, str(path)], [f"{flag}={path}"]):
        assert elastic_run.node_types(["pretrain_gpt.py", *words, "--lr", "1"], 3) == ["box"] * 3


def test_programs_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["elastic", "agent", "--node-type", "b", "--", "none.py"]) == 2
    assert "none.py: no such program" in capsys.readouterr().err
    assert cli.main(["elastic", "run", "--nodes", "2", "--", "pretrain_gpt.py"]) == 2
    assert "name no cluster file; give it --hetero-cluster FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "subjects"),
    [
        ([], []),
        (["--etcd", "http://127.0.0.1:1,http://[::1]:1,http://localhost:1"], []),
        (["--etcd", "http://10.0.0.1:1"], ["etcd at http://10.0.0.1:1 is reached in plain HTTP: "]),
        (["--host", "10.0.0.7"], ["copies travel in plain HTTP, as does the token"]),
        (["--host", "10.0.0.7", "--tls-cert", "c", "--tls-key", "k"], []),
        (
            [
                "--host",
                "10.0.0.7",
                "--etcd",
                "https://10.0.0.1:1",
                "--etcd-ca",
                "a",
                "--etcd-cert",
                "c",
                "--etcd-key",
                "k",
            ],
            [],
        ),
        (["--host", "10.0.0.7", "--etcd", "https://10.0.0.1:1"], ["copies travel"]),
        (
            ["--host", "10.0.0.7", "--etcd", "https://10.0.0.1:1,http://10.0.0.2:1"],
            ["etcd at http://10.0.0.2:1 is reached", "copies travel"],
        ),
    ],
)
def test_an_agent_warns_once_of_what_travels_in_plain_http(
    words: list[str], subjects: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.elastic.agent_process.run_agent", lambda _: 0)
    assert cli.main(["elastic", "agent", "--node-type", "b", *words, "--", "pretrain_gpt.py"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(subjects)
    for line, subject in zip(said, subjects, strict=True):
        assert line.startswith(f"hetero: warning: {subject}")
        assert "start etcd with hetero elastic store --certificates FOLDER" in line


@pytest.mark.parametrize("command", [["status"], ["leave", "a"], ["forget"]])
def test_commands_warn_of_an_etcd_in_plain_http_and_leave_the_document_alone(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobStore, "read", lambda _: JobState(token="t", nodes={"a": node_info("a")}))
    monkeypatch.setattr(JobStore, "put_notice", lambda *_: None)
    monkeypatch.setattr(JobStore, "forget", lambda _: True)
    assert cli.main(["elastic", *command, "--etcd", "http://192.0.2.1:1", "--json"]) == 0
    said = capsys.readouterr()
    assert said.err.count("hetero: warning: etcd at http://192.0.2.1:1 is reached in plain HTTP") == 1
    json.loads(said.out)


class StartedEtcdError(Exception):
    """Stands for the etcd that takes the place of the command."""


def started_etcd(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, str]:
    """The options of the etcd that ``hetero elastic store`` starts."""
    found: list[str] = []

    def start(_: str, command: list[str]) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard or soft >= MAX_DESCRIPTORS, "etcd inherits it"
        found.extend(command)
        raise StartedEtcdError

    monkeypatch.setattr("hetero.commands.elastic_store.os.execvp", start)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with pytest.raises(StartedEtcdError):
            cli.main(["elastic", "store", *words])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return dict(word.removeprefix("--").split("=", 1) for word in found[1:])


def test_a_store_with_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = CertificateFolder(tmp_path / "made"), str(tmp_path / "data")
    made = started_etcd(monkeypatch, "--data", data, "--certificates", str(folder.path), "--port", "7")
    said = capsys.readouterr().out
    assert f"agents and commands: --etcd https://127.0.0.1:7 --certificates {folder.path}" in said
    assert "warning" not in said
    server = folder.server("127.0.0.1")
    own = started_etcd(
        monkeypatch,
        *("--data", data, "--port", "7", "--cert", str(server.certificate), "--key", str(server.key)),
        *("--client-ca", str(folder.authority.certificate)),
    )
    assert own == made
    for prefix in ("", "peer-"):
        assert made[f"{prefix}client-cert-auth"] == "true"
        assert made[f"{prefix}trusted-ca-file"] == str(folder.authority.certificate)
    assert {made[f"listen-{who}-urls"] for who in ("client", "peer")} == {"https://127.0.0.1:7", "https://127.0.0.1:8"}


@pytest.mark.parametrize(
    ("host", "who"), [("127.0.0.1", "every user of this machine"), ("0.0.0.0", "whoever reaches this address")]
)
def test_a_store_without_certificates_says_who_owns_its_jobs(
    host: str, who: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = started_etcd(monkeypatch, "--data", str(tmp_path / "data"), "--host", host)
    assert not any("cert" in name for name in options)
    assert options["listen-peer-urls"].startswith("http://127.0.0.1:")
    said = capsys.readouterr().out
    assert f"warning: etcd asks for no certificate: {who} owns their jobs" in said
    assert "give --certificates FOLDER" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cert", "c", "--key", "k"], "--client-ca missing; give --cert, --key and --client-ca together"),
        (["--client-ca", "c"], "--cert and --key missing"),
        (["--certificates", "f", "--cert", "c"], "--certificates stands for --cert, --key and --client-ca"),
        (["--cert", "/no/c", "--key", "/no/k", "--client-ca", "/no/a"], "no certificate with its key, or no authority"),
    ],
)
def test_wrong_flags_of_a_store(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["elastic", "store", *words]) == 2
    assert message in capsys.readouterr().err
