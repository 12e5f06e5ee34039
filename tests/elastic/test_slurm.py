"""The batch scripts of elastic training under a real Slurm, with a stand-in for the agent, and with real ones."""

import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.checkpoint.folder import published_steps
from hetero.elastic.certificate_folder import CertificateFolder
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.job_store import JobStore
from hetero.elastic.records import Epoch, Notice
from tests.helpers.elastic_cluster import STEPS_FILE
from tests.helpers.elastic_training import elastic_words
from tests.helpers.etcd import EtcdServer
from tests.helpers.slurm_cluster import NodeKind, SlurmCluster, needs_slurm
from tests.helpers.sources import ROOT
from tests.helpers.stand_ins import HETERO, put_command
from tests.helpers.waiting import until

pytestmark = [
    needs_slurm,
    pytest.mark.timeout(300),
]

SCRIPT = ROOT / "scripts" / "slurm" / "elastic.sbatch"
STORE_SCRIPT = ROOT / "scripts" / "slurm" / "elastic_store.sbatch"

STAND_IN = """#!/usr/bin/env bash
# Leaves when it is told to, a moment later, as an agent does whose ranks finish their step.
echo "agent $*"
trap 'echo told; sleep 0.5; echo left; exit 0' TERM
while [ ! -e "$STOP_FILE" ]; do sleep 0.1; done
echo finished
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), NodeKind(count=5)) as cluster:
        yield cluster


@pytest.fixture
def etcd_on_head(slurm: SlurmCluster, tmp_path: Path) -> Iterator[EtcdServer]:
    """One on the head of the cluster, which this test process is on as well."""
    server = EtcdServer(tmp_path / "etcd-data", host=slurm.head.address)
    with slurm.head.entered():
        server.start()
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="module", autouse=True)
def timed(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> "Array":
    """A task whose notice comes two minutes ahead of its end, with two minutes in all: at once.

    Slurm looks every half minute. Meanwhile the other four nodes have other tests.
    """
    return Array(slurm, tmp_path_factory.mktemp("timed"), options=("--time=2", "--array=0-0"))


class Array:
    """An array of tasks, four by default, each with a node of its own; stand-ins end with it.

    hetero: what the command of this name is.
    etcd: its address; empty if the folder of etcd is the script's.
    """

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *,
        options: tuple[str, ...] = (),
        hetero: str = STAND_IN,
        etcd: str = "http://127.0.0.1:1",
        node_type: str = "fast",
        program: tuple[str, ...] = ("pretrain_gpt.py", "--lr", "1e-3"),
        agent_flags: str = "--min-nodes=3 --lease=5",
        **variables: str,
    ) -> None:
        self._slurm = slurm
        self._folder = folder
        bin_folder = put_command(folder / "bin", "hetero", hetero)
        if etcd:
            (folder / "etcd").mkdir()
            (folder / "etcd" / "address").write_text(f"{etcd}\n")
        self.number = slurm.submit(
            SCRIPT,
            *(node_type, str(folder / "etcd"), *program),
            options=("--array=0-3", f"--chdir={folder}", "--output=%a.out", *options),
            PATH=f"{bin_folder}:{slurm.environment['PATH']}",
            STOP_FILE=str(folder / "stop"),
            AGENT_FLAGS=agent_flags,
            **variables,
        )

    def said(self, task: int) -> str:
        path = self._folder / f"{task}.out"
        return path.read_text() if path.exists() else ""

    def states(self) -> dict[str, str]:
        return self._slurm.states(self.number)

    def state(self, task: int) -> str | None:
        return self.states().get(f"{self.number}_{task}")

    def run_again(self, task: int, has_begun: Callable[[], bool]) -> None:
        """Requeue a task that is over, until it has begun.

        Slurm may take the late word of a script's end for that of its next run, or refuse to start that within the
        second in which it took the permission for the last one back: then it is over at once.
        """

        def requeued() -> bool:
            if not has_begun() and self.state(task) is None:
                self._slurm.requeue(f"{self.number}_{task}")
            return has_begun()

        until(requeued)

    def cancel(self) -> None:
        self._slurm.call("scancel", str(self.number))
        until(lambda: not self.states())

    def finish(self) -> None:
        (self._folder / "stop").touch()
        until(lambda: not self.states())


@pytest.mark.slow
def test_a_cancelled_task_leaves_comes_back_and_the_others_never_notice(slurm: SlurmCluster, tmp_path: Path) -> None:
    array = Array(slurm, tmp_path)
    until(lambda: all("agent" in array.said(task) for task in range(4)))
    names = {re.search(r"--node-name=(\w+)", array.said(task))[1] for task in range(4)}  # type: ignore[index]
    assert len(names) == 4
    assert "agent elastic agent --job=hetero --etcd=http://127.0.0.1:1 --node-type=fast" in array.said(2)
    assert "--leave-within=100 --min-nodes=3 --lease=5 -- pretrain_gpt.py --lr 1e-3" in array.said(2)
    slurm.call("scancel", f"{array.number}_1")
    until(lambda: "left" in array.said(1))
    until(lambda: array.state(1) is None)
    array.run_again(1, lambda: array.said(1).count("agent elastic") == 2)
    array.finish()
    assert ["told" in array.said(task) for task in range(4)] == [False, True, False, False]
    assert [array.said(task).count("finished") for task in range(4)] == [1, 1, 1, 1]


@pytest.mark.slow
def test_etcd_asks_for_certificates_that_tasks_find_in_its_folder(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The folder is private to its user; an etcd that starts again on another node keeps its certificates."""
    folder = tmp_path / "etcd"
    bin_folder = put_command(tmp_path / "store", "hetero", HETERO)
    variables = {"PATH": f"{bin_folder}:{slurm.environment['PATH']}", "PYTHONPATH": str(ROOT)}
    options = (f"--chdir={tmp_path}", "--output=store.out", "--open-mode=append")
    urls = [f"https://{slurm.hosts[node].address}:2379" for node in ("node4", "node3")]

    def started(node: str) -> tuple[int, EtcdAddress]:
        number = slurm.submit(STORE_SCRIPT, str(folder), options=(*options, f"--nodelist={node}"), **variables)
        until(lambda: (folder / "address").exists() or str(number) not in slurm.call("squeue", "-h", "-o", "%i"))
        assert (folder / "address").exists(), (tmp_path / "store.out").read_text()
        return number, CertificateFolder(folder / "certificates").address((folder / "address").read_text().strip())

    store, address = started("node4")
    try:
        assert address.urls == (urls[0],)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with slurm.head.entered():
            keys = JobStore(address, "job")
            keys.put_notice(Notice(node="a", reason="kept"))
            keys.close()
        array = Array(slurm, tmp_path, options=("--array=0-0",), etcd="")
        until(lambda: "agent" in array.said(0))
        array.finish()
        said = array.said(0)
        assert f"--etcd={urls[0]} " in said
        assert f"--certificates={folder}/certificates -- pretrain_gpt.py" in said
        slurm.call("scancel", str(store))
        slurm.wait_for_end(store)
        assert not (folder / "address").exists(), "it says where etcd is, and no longer where it was"
        store, address = started("node3")
        assert address.urls == (urls[1],)
        with slurm.head.entered():
            keys = JobStore(address, "job")
            assert keys.read().notices["a"].reason == "kept"
            keys.close()
    finally:
        slurm.call("scancel", str(store))
        slurm.wait_for_end(store)


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_real_agents_train_on_without_a_cancelled_task_and_with_it_again(
    slurm: SlurmCluster, etcd_on_head: EtcdServer, tmp_path: Path
) -> None:
    """``pretrain_gpt.py`` in double precision; an epoch has a few steps, and then waits for what is done to it.

    In the end all tasks are cancelled together, and go on from what they have saved when they are queued again.
    """
    program, *flags = elastic_words(tmp_path, steps=200, load=str(tmp_path / "saved"))
    store = JobStore(etcd_on_head.address, "job")
    (allowed := tmp_path / "steps").write_text("0")
    array = Array(
        slurm,
        tmp_path,
        options=("--array=0-2",),
        hetero=HETERO,
        etcd=etcd_on_head.url,
        node_type="box",
        program=(str(ROOT / program), *flags),
        agent_flags="--min-nodes=2 --lease=5 --dwell=0 --leave-within=20 --straggler-threshold=inf",
        JOB="job",
        PYTHONPATH=str(ROOT),
        OMP_NUM_THREADS="1",
        **{STEPS_FILE: str(allowed)},
    )

    def epoch_of(num_nodes: int) -> Epoch:
        """The newest one, once it is of so many nodes and has committed a step."""
        found: list[Epoch] = []

        def has_committed() -> bool:
            state = store.read()
            if (epoch := state.epoch) is None:
                return False
            allowed.write_text(str(epoch.start.step + 4))
            ranks = [r for each in state.reports.values() for r in each.ranks if r.epoch == epoch.number]
            if len(epoch.nodes) == num_nodes and any(rank.committed > epoch.start.step for rank in ranks):
                found.append(epoch)
            return bool(found)

        until(has_committed)
        return found[0]

    def has_all() -> bool:
        epoch = store.read().epoch
        return epoch is not None and len(epoch.nodes) == 3

    try:
        first = epoch_of(3)
        slurm.call("scancel", f"{array.number}_1")
        until(lambda: array.state(1) is None)
        second = epoch_of(2)
        assert second.number > first.number
        assert second.start.step > first.start.step
        array.run_again(1, has_all)
        third = epoch_of(3)
        assert third.number > second.number
        assert third.start.step > second.start.step
        array.cancel()
        (saved,) = published_steps(tmp_path / "saved")
        assert saved >= third.start.step + 1
        allowed.write_text(str(saved + 2))

        def go_on_together() -> bool:
            for task in range(3):
                if array.state(task) is None:
                    slurm.requeue(f"{array.number}_{task}")
            return any(f"training goes on after step {saved}" in array.said(task) for task in range(3))

        until(go_on_together)
        assert store.read().newest_number > third.number
    finally:
        array.cancel()
        store.close()


@pytest.mark.slow
def test_a_task_whose_time_is_over_queues_itself_again(slurm: SlurmCluster, timed: Array) -> None:
    until(lambda: "left" in timed.said(0))
    until(lambda: timed.state(0) == "PENDING")
    slurm.requeue(f"{timed.number}_0")
    timed.run_again(0, lambda: timed.said(0).count("agent elastic") >= 2)
    timed.finish()
    assert "finished" in timed.said(0)
