"""Every socket on which a run listens is in the table of docs/network.md, at the address that the table says.

A plain run through ``hetero launch``, one of Slurm, and an elastic one train; then the kernel is asked.
"""

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.listening import LaunchKind
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.elastic_cluster import STEPS_FILE
from tests.helpers.elastic_training import elastic_words
from tests.helpers.listening_sockets import RUN_VARIABLE, FoundSocket, counted, kill_processes_of, sockets_of
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ports import free_ports
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

LINK = Link(bandwidth_gb_per_s=1, latency_us=10)
ONE_HOST = ClusterSpec(
    node_types=(NodeType(name="box", device="cpu", gpus_per_node=2, inside_node=LINK),), links=Links(between_nodes=LINK)
)
TWO_HOSTS = ClusterSpec(
    node_types=(NodeType(name="box", device="cpu", gpus_per_node=1, count=2),), links=Links(between_nodes=LINK)
)
TWO_STAGES = plan(
    llama_model(num_layers=3),
    [replica(stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 3), ranks=(1,)), num_samples=4)],
)

MORE_THAN_WAITED_FOR = "100000"
"""Steps."""

FLAGS = (
    "--lr 1e-2 --lr-decay-iters 100 --mock-data --tokenizer-type NullTokenizer --num-workers 1 --log-interval 1 "
    f"--train-iters {MORE_THAN_WAITED_FOR} --attention-dropout 0 --hidden-dropout 0 --distributed-backend gloo"
).split()

SECOND_STEP = f"2/{MORE_THAN_WAITED_FOR} | loss"

VARIABLES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""For hosts that are all this machine: not at what its name resolves to."""


def plan_file(folder: Path, cluster: ClusterSpec) -> str:
    prediction = PlanPrediction(step_s=1, step_low_s=1, step_high_s=1, bubble_share=0)
    provenance = PlanProvenance(command="a test", cluster=cluster, prediction=prediction)
    save(dataclasses.replace(TWO_STAGES, provenance=provenance), folder / "plan.json")
    return str(folder / "plan.json")


@pytest.fixture
def run() -> Iterator[str]:
    """What marks the processes of a run, of which none is left in the end."""
    mark = uuid.uuid4().hex
    yield mark
    kill_processes_of(mark)


@contextlib.contextmanager
def started(words: Sequence[str], run: str, folder: Path, variables: Mapping[str, str]) -> Iterator[Callable[[], str]]:
    """Run ``hetero`` with ``words``; gives what it has said by now."""
    output = folder / "output"
    environment = {**os.environ, **VARIABLES, **ON_LOOPBACK, **variables, RUN_VARIABLE: run}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "hetero", *words], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
    try:
        yield lambda: output.read_text(errors="replace")
    finally:
        process.kill()
        process.wait()
        kill_processes_of(run)


def wait_for(is_so: Callable[[], bool], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def assert_listed(sockets: list[FoundSocket], kind: LaunchKind) -> None:
    """Every socket is in the table, in runs of this kind, and can be reached by those alone that the table says."""
    assert sockets
    assert [each for each in sockets if each.listed is None] == []
    assert [each for each in sockets if each.listed is not None and kind not in each.listed.runs] == []
    assert [each for each in sockets if not each.is_as_listed] == []


@pytest.mark.parametrize(
    ("cluster", "hosts", "store"),
    [
        pytest.param(ONE_HOST, "localhost", "127.0.0.1", id="one host", marks=pytest.mark.rotates(every=6, turn=5)),
        pytest.param(
            TWO_HOSTS, "127.0.0.3,127.0.0.2", "127.0.0.3", id="two hosts", marks=pytest.mark.rotates(every=6, turn=2)
        ),
    ],
)
def test_a_plain_run(tmp_path: Path, run: str, cluster: ClusterSpec, hosts: str, store: str) -> None:
    """torchrun's store listens on the address of node 0 alone, and all else on loopback, which gloo was given."""
    (metrics,) = free_ports(1)
    words = ["launch", plan_file(tmp_path, cluster), "--hosts", hosts, "--program", str(ROOT / "pretrain_gpt.py")]
    words += ["--logs", str(tmp_path / "logs"), "--run", "--", *FLAGS, "--hetero-metrics-port", str(metrics)]
    with started(words, run, tmp_path, {}) as said:
        wait_for(lambda: SECOND_STEP in said(), said)
        sockets = sockets_of(run)
    assert_listed(sockets, "plain")
    counts = counted(sockets)
    assert counts.pop(("store of torchrun", store)) == 1
    assert counts.pop(("metrics", "127.0.0.1")) == 1
    assert counts.pop(("data readers", "")) > 0
    assert [row for row, address in counts] == ["gloo"], counts
    assert ("gloo", "127.0.0.1") in counts


@needs_slurm
@pytest.mark.rotates(every=6, turn=0)
def test_a_run_of_slurm(tmp_path: Path, run: str) -> None:
    """The store listens on the address by which Slurm reaches the first node; srun's own sockets are Slurm's."""
    script, output = tmp_path / "job.sbatch", tmp_path / "output"
    words = ["--sbatch", str(script), "--program", str(ROOT / "pretrain_gpt.py"), "--", *FLAGS]
    assert main(["launch", plan_file(tmp_path, TWO_HOSTS), *words]) == 0
    (tmp_path / "slurm").mkdir()
    slurm = SlurmCluster(tmp_path / "slurm", NodeKind(name="box", count=2))
    try:
        slurm.start()
        given = (f"--chdir={tmp_path}", f"--output={output}")
        slurm.submit(script, options=given, **VARIABLES, **{RUN_VARIABLE: run})

        def said() -> str:
            return output.read_text(errors="replace") if output.exists() else ""

        wait_for(lambda: SECOND_STEP in said(), said)
        sockets = []
        for node in slurm.nodes:
            with slurm.hosts[node].entered():
                sockets += sockets_of(run)
    finally:
        slurm.stop()
    assert_listed(sockets, "Slurm")
    counts = counted(sockets)
    addresses = [slurm.hosts[node].address for node in slurm.nodes]
    assert counts.pop(("store of torchrun", addresses[0])) == 1
    assert [counts[("gloo", address)] > 0 for address in addresses] == [True, True]
    assert {row for row, _ in counts} == {"gloo", "srun", "data readers"}, counts


@pytest.mark.rotates(every=6, turn=4)
def test_an_elastic_run(tmp_path: Path, run: str) -> None:
    """All of a job on one machine listens on loopback alone."""
    (tmp_path / "steps").write_text(MORE_THAN_WAITED_FOR)
    program = elastic_words(tmp_path, steps=int(MORE_THAN_WAITED_FOR))
    job, logs = f"sockets-{run[:8]}", tmp_path / "logs"
    words = ["elastic", "run", "--job", job, "--nodes", "2", "--min-nodes", "2", "--logs", str(logs), "--", *program]
    try:
        with started(words, run, tmp_path, {STEPS_FILE: str(tmp_path / "steps")}) as said:

            def has_trained() -> bool:
                return any(SECOND_STEP in path.read_text(errors="replace") for path in logs.glob("*/epoch_*/*.log"))

            wait_for(has_trained, said)
            sockets = sockets_of(run)
    finally:
        for folder in Path("/dev/shm").glob(f"hetero-{job}-*"):
            shutil.rmtree(folder)
    assert_listed(sockets, "elastic")
    counts = counted(sockets)
    assert {address for _, address in counts} == {"127.0.0.1", ""}
    once = ("etcd", "etcd peers", "store of an epoch")
    assert [counts.pop((name, "127.0.0.1")) for name in (*once, "copies")] == [1, 1, 1, 2]
    assert {row for row, _ in counts} == {"gloo", "reports of ranks", "fork server"}, counts


def test_a_socket_that_no_row_lists_is_found(run: str) -> None:
    """A stranger's program in a run: the test of runs would name it."""
    code = (
        "import socket, time; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); time.sleep(99)"
    )
    environment = {**os.environ, RUN_VARIABLE: run}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        (found,) = sockets_of(run)
        process.kill()
    assert (found.row, found.address, found.port) == ("", "0.0.0.0", port)
    with pytest.raises(AssertionError):
        assert_listed([found], "plain")
