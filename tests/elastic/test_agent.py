"""Agents of real processes, with a program that trains nothing: what they do when ranks and nodes come and go."""

import contextlib
import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero import cli
from hetero.elastic.events import read_events
from hetero.peer_limits import MAX_DESCRIPTORS
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.etcd import EtcdServer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

CLUSTER = """\
node_types:
  - {name: box, device: cpu, gpus_per_node: 1, count: 4, memory_gib: 4,
     inside_node: {bandwidth_gb_per_s: 1, latency_us: 10}}
links: {between_nodes: {bandwidth_gb_per_s: 1, latency_us: 10}}
"""


@pytest.fixture
def cluster(etcd: EtcdServer, job: str, tmp_path: Path) -> Callable[..., ElasticCluster]:
    """Makes clusters of one-rank nodes ``a``, ``b``, ...: their number, flags of the program, options of agents."""

    def make(num_nodes: int, *flags: object, etcd: EtcdServer = etcd, **options: object) -> ElasticCluster:
        path = tmp_path / "cluster.yaml"
        path.write_text(CLUSTER)
        return ElasticCluster(
            tmp_path,
            etcd,
            job,
            types=dict.fromkeys("abcd"[:num_nodes], "box"),
            words=["tests/helpers/fake_program.py", "--hetero-cluster", str(path), *map(str, flags)],
            options=options,
        )

    return make


@pytest.mark.slow
def test_ranks_and_nodes_come_and_go(cluster: Callable[..., ElasticCluster]) -> None:
    """A rank is killed, then a node, which comes back, then one is asked to leave; committed steps are never lost."""
    with cluster(3, "--steps", 100000, **{"dwell": 0, "min-nodes": 2}) as nodes:
        nodes.start()
        first = nodes.wait_for_commit(3).epoch
        assert first is not None
        nodes.kill_rank(1)
        second = nodes.wait_for_commit(first.start.step + 8, epoch=2).epoch
        assert second is not None
        assert second.number == 2
        assert second.start.epoch == 1
        assert second.start.step >= 3
        assert "killed by signal 9" in second.reason

        lost = second.nodes[0].node.name
        nodes.kill_node(lost)
        third = nodes.wait_for_epoch(second.number + 1).epoch
        assert third is not None
        assert lost not in {each.node.name for each in third.nodes}
        assert third.start.step >= first.start.step + 8

        nodes.start(lost)
        grown = nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 3).epoch
        assert grown is not None
        nodes.wait_for_epoch(grown.number)

        leader = nodes.leader()
        nodes.leave(leader)
        assert nodes.wait_for_end_of(leader) == 0
        last = nodes.wait_for_epoch(grown.number + 1).epoch
        assert last is not None
        assert {each.node.name for each in last.nodes} == set("abc") - {leader}
        (made,) = (event.node for event in nodes.events("epoch_made") if event.epoch == grown.number + 1)
        assert made != leader, "its agent serves the rendezvous of the epoch, and has to stay"
        stopped = [event for event in nodes.events("stop_requested") if event.epoch == grown.number]
        assert stopped, "planned changes let the ranks finish their step"


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=0)
def test_a_leader_leaves_before_the_first_step(cluster: Callable[..., ElasticCluster]) -> None:
    """Ranks are asked to stop once SIGTERM does not kill them; the next epoch's store is on a node that stays."""
    with cluster(2, "--steps", 8, "--restore-s", 1.0, "--step-s", 0.3, **{"min-nodes": 1}) as nodes:
        nodes.start()
        nodes.wait_for_events("joined", 2)
        leader = nodes.events("leads")[0].node
        nodes.leave(leader)
        assert nodes.wait_for_end() == {"a": 0, "b": 0}
        assert not nodes.events("rank_failed", "detected")
        first, second = nodes.events("epoch_made")
        assert (first.node, second.node) == (leader, "b" if leader == "a" else "a")
        assert (second.step, second.nodes) == (1, (second.node,))


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_a_signal_to_every_process_of_a_node_loses_nothing(cluster: Callable[..., ElasticCluster]) -> None:
    """Its fork server, without which its ranks would be gone, and the store of the ranks outlive it."""
    with cluster(2, "--steps", 40, "--step-s", 0.2, **{"min-nodes": 1}) as nodes:
        nodes.start()
        nodes.wait_for_events("first_step", 2)
        leader = nodes.events("leads")[0].node
        nodes.signal_whole_node(leader, signal.SIGTERM)
        assert nodes.wait_for_end() == {"a": 0, "b": 0}
        assert not nodes.events("rank_failed", "detected")
        (stopped, *_) = nodes.events("stopped")
        first, second = nodes.events("epoch_made")[:2]
        assert (second.step, second.epoch) == (stopped.step, first.epoch + 1)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_a_job_that_ends(cluster: Callable[..., ElasticCluster], etcd: EtcdServer) -> None:
    """Its name is free again once it is forgotten."""
    with cluster(2, "--steps", 5) as nodes:
        nodes.start()
        assert nodes.wait_for_end() == {"a": 0, "b": 0}
        assert "[epoch 1 rank 0] rank 0 of 2 goes on from step 0" in nodes.output("a") + nodes.output("b")
        assert "all ranks have finished" in nodes.output("a")
        kinds = [event.kind for event in nodes.events() if event.node == "a"]
        for kind in ("warm", "forked", "joined", "built", "restored", "first_step", "committed", "finished"):
            assert kind in kinds
        nodes.start("a")
        assert nodes.wait_for_end_of("a") == 2
        forget = f"hetero elastic forget --etcd {etcd.url} --job {nodes.job}"
        said = nodes.output("a").splitlines()[-1]
        assert "is over already: all ranks have finished; give another --job, or delete" in said
        assert said.endswith(forget)
        assert cli.main(forget.split()[1:]) == 0
        nodes.start("a", "b")
        assert nodes.wait_for_end() == {"a": 0, "b": 0}


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_a_rank_that_fails_again_and_again(cluster: Callable[..., ElasticCluster]) -> None:
    with cluster(1, "--fail-at", 4, "--failures", 99) as nodes:
        nodes.start()
        assert nodes.wait_for_end() == {"a": 1}
        assert "3 epochs in a row broke with all their nodes there and committed no new step" in nodes.output("a")
        assert "rank 0 on node a: ended with the code 1; see " in nodes.output("a")
        # Three steps were committed in the first epoch, so that it was none of the three.
        assert [event.step for event in nodes.events("epoch_made")] == [0, 3, 3, 3]


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_an_agent_without_room_for_its_ranks_files_serves_on(
    cluster: Callable[..., ElasticCluster], tmp_path: Path
) -> None:
    """The next epoch's ranks cannot be started for a while; the copies stay where they are, and are gone on from."""
    with cluster(1, "--steps", 40, "--fail-at", 5, "--failures", 1) as nodes:
        copies = tmp_path / "copies"
        nodes.start_as("a", copies=copies)
        nodes.wait_until(lambda s: s.epoch is not None)
        # Its name is taken by a folder: to this agent as good as a full disk.
        (copies / "assignment_00000002.json").mkdir()
        assert nodes.wait_for_end() == {"a": 0}
        assert any("cannot be started" in event.detail for event in nodes.events("rank_failed"))
        assert nodes.events("epoch_made")[-1].step == 4


class FullDisk:
    """A file system at ``folder`` that has no room for a while; it needs root, who may mount."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], check=True, timeout=20)

    def refuse(self) -> None:
        for log in self._folder.glob("*.events.jsonl"):
            # Else what fits into the last page of a file is still taken, which is some twenty events.
            event = read_events(log)[-1]
            size = len(json.dumps(dataclasses.asdict(dataclasses.replace(event, detail="")))) + 1
            padding = "x" * ((-log.stat().st_size - size) % 4096)
            with log.open("ab") as file:
                file.write(json.dumps(dataclasses.asdict(dataclasses.replace(event, detail=padding))).encode() + b"\n")
        with contextlib.suppress(OSError), (self._folder / "filler").open("wb", buffering=0) as file:
            # A write that does not fit is cut short first.
            while file.write(b"x" * 1000):
                pass

    def take(self) -> None:
        (self._folder / "filler").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True, timeout=20)


class DeletedFolder:
    """A folder that somebody deletes; for a while there can be none of its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def refuse(self) -> None:
        shutil.rmtree(self._folder)
        self._folder.touch()

    def take(self) -> None:
        self._folder.unlink()

    def close(self) -> None:
        """Nothing is left to do."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            FullDisk,
            marks=[
                pytest.mark.rotates(every=2, turn=0),
                pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount"),
            ],
        ),
        pytest.param(DeletedFolder, marks=pytest.mark.rotates(every=2, turn=1)),
    ],
)
def test_a_loss_while_nothing_can_be_logged(
    cluster: Callable[..., ElasticCluster], tmp_path: Path, kind: type[FullDisk | DeletedFolder]
) -> None:
    """Agents and ranks go on, lines of ranks go to their agents' output, and logs are whole lines afterwards."""
    (logs := tmp_path / "logs").mkdir()
    with (
        contextlib.closing(kind(logs)) as disk,
        cluster(2, "--steps", 100000, logs=logs, **{"min-nodes": 1}) as nodes,
    ):
        # The own output of one agent is there, too.
        (tmp_path / "a.out").symlink_to(logs / "a.out")
        nodes.start()
        epoch = nodes.wait_for_commit(3).epoch
        disk.refuse()
        nodes.kill_rank(1)
        assert epoch is not None
        epoch = nodes.wait_for_commit(epoch.start.step + 10, epoch=2).epoch
        assert epoch is not None
        assert [each.node.name for each in epoch.nodes] == ["a", "b"]
        nodes.wait_for_output("b", r"^hetero: \S+/b\.events\.jsonl: .*: events are not logged")
        nodes.wait_for_output("b", r"^rank \d of 2 goes on from step [1-9]")
        disk.take()
        nodes.leave("b")
        assert nodes.wait_for_end_of("b") == 0
        assert "events are logged again" in nodes.output("b")
        assert "events_lost" in [event.kind for event in read_events(logs / "b.events.jsonl")]
        nodes.leave("a")
        nodes.wait_for_end_of("a")
        events = read_events(logs / "a.events.jsonl")
        assert "events_lost" in [event.kind for event in events]
        assert events[-1].kind == "finished"


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_wrong_input_ends_a_job_at_once(cluster: Callable[..., ElasticCluster]) -> None:
    with cluster(1, "--fail-at", 4, "--failures", 99, "--exit-code", 2) as nodes:
        nodes.start()
        assert nodes.wait_for_end() == {"a": 2}
        assert len(nodes.events("epoch_made")) == 1


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_a_bad_copy_is_deleted_and_an_older_step_taken(cluster: Callable[..., ElasticCluster]) -> None:
    with cluster(1, "--fail-at", 5, "--failures", 1, "--bad-copy", "--steps", 8) as nodes:
        nodes.start()
        assert nodes.wait_for_end() == {"a": 0}
        assert [event.detail for event in nodes.events("bad_copy")] == ["a/1/4/rank_00000"]
        assert [event.step for event in nodes.events("epoch_made")] == [0, 3]
        assert nodes.state().bad_copies == frozenset()


@pytest.mark.slow
def test_too_few_nodes(cluster: Callable[..., ElasticCluster]) -> None:
    with cluster(1, **{"min-nodes": 2, "wait-for-nodes": 1}) as nodes:
        nodes.start()
        assert nodes.wait_for_end() == {"a": 1}
        assert "1 nodes are there, 2 are asked for, and no other came within 1 s; start agents" in nodes.output("a")


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
def test_nodes_that_stand_still_and_an_etcd_that_restarts(
    cluster: Callable[..., ElasticCluster], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A node that stands still for longer than its lease is evicted, notices when it wakes up, and joins again.

    While etcd is away training goes on. What cannot join says why.
    """
    etcd = EtcdServer(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    try:
        with cluster(2, "--steps", 100000, etcd=etcd, **{"dwell": 0, "min-nodes": 1}) as nodes:
            nodes.start()
            nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 2)
            step = max(rank.step for r in nodes.wait_for_commit(5).reports.values() for rank in r.ranks)
            etcd.stop()
            nodes.wait_for_events("etcd_away", 2)
            etcd.start()
            nodes.wait_for_events("etcd_back", 2)
            state = nodes.wait_for_commit(step + 1)
            assert state.epoch is not None
            number = state.epoch.number

            sleeper = next(name for name, node in state.nodes.items() if node.incarnation != state.leader)
            other = next(name for name in "ab" if name != sleeper)
            nodes.freeze_node(sleeper)
            alone = nodes.wait_for_epoch(number + 1)
            assert alone.epoch is not None
            assert [each.node.name for each in alone.epoch.nodes] == [other]
            nodes.thaw_node(sleeper)
            nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 2)
            assert "was evicted from the job; its ranks end, and it joins again" in nodes.output(sleeper)

            nodes.start_as("c", words=["tests/helpers/fake_program.py", "--steps", "7"])
            assert nodes.wait_for_end_of("c") == 2
            assert "this agent does not fit to its job: flags: here 7, in the job --hetero-cluster" in nodes.output("c")
            nodes.start_as("d", node_name="a", copies=tmp_path_factory.mktemp("copies"))
            assert nodes.wait_for_end_of("d") == 2
            assert "node a is in job" in nodes.output("d")
            nodes.kill_node(sleeper)
            nodes.signal_node(other, signal.SIGTERM)
            assert nodes.wait_for_end_of(other) == 1
            assert f"node {other} has left, and no node stays: its agent got SIGTERM; the copies" in nodes.output(other)
    finally:
        etcd.stop()


def test_no_etcd(cluster: Callable[..., ElasticCluster]) -> None:
    with cluster(1) as nodes:
        nodes.start_as("a", etcd="http://127.0.0.1:9", wait_for_etcd=0.5)
        assert nodes.wait_for_end_of("a") == 2
        asked, given_up = nodes.output("a").splitlines()
        assert "etcd at http://127.0.0.1:9 does not answer" in asked
        assert asked.endswith("it is asked again for 0.5 s (--wait-for-etcd)")
        assert "hetero elastic store" in given_up


@pytest.mark.slow
def test_an_agent_waits_for_its_etcd(cluster: Callable[..., ElasticCluster], tmp_path: Path) -> None:
    """An array of jobs may start before the one with etcd does."""
    etcd = EtcdServer(tmp_path / "etcd")
    try:
        with cluster(1, "--steps", 2, etcd=etcd) as nodes:
            nodes.start()
            while "it is asked again for" not in nodes.output("a"):
                time.sleep(0.05)
            etcd.start()
            assert nodes.wait_for_end_of("a") == 0
            assert "hetero: etcd is back" in nodes.output("a")
    finally:
        etcd.stop()


@pytest.mark.slow
def test_an_agent_outlives_a_lack_of_descriptors(cluster: Callable[..., ElasticCluster]) -> None:
    """Its limit is cut to what it has open while it has to start ranks; with the old limit the job goes on."""
    with cluster(2, "--steps", 100000, **{"dwell": 0}) as nodes:
        nodes.start()
        nodes.wait_for_commit(3)
        leader = nodes.leader()
        agent = nodes.agent_pid(leader)
        soft, hard = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        assert soft == min(hard, MAX_DESCRIPTORS), "raised as far as it may be"
        # Its connections to etcd stay open; to start ranks and to ask others it needs new ones.
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (3, hard))
        nodes.kill_rank(0)
        nodes.wait_for_output(leader, r"^hetero: this process has 3 files open, its limit; raise that")
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (soft, hard))
        later = nodes.wait_for_epoch(2).epoch
        assert later is not None
        nodes.wait_for_commit(later.start.step + 3, epoch=later.number)


def test_an_agent_that_gained_nothing_before_it_had_to_leave_says_so_by_its_exit_code(
    cluster: Callable[..., ElasticCluster],
) -> None:
    """What an earlier start has committed does not count; the second one ends with 1, as it has committed steps."""
    with cluster(1, "--steps", 100000, **{"min-nodes": 2}) as nodes:
        nodes.start("a")
        nodes.wait_until(lambda state: "a" in state.nodes)
        nodes.signal_node("a", signal.SIGTERM)
        assert nodes.wait_for_end_of("a") == 75
        nodes.start_as("a", min_nodes=1)
        nodes.wait_for_commit(3)
        nodes.signal_node("a", signal.SIGTERM)
        assert nodes.wait_for_end_of("a") == 1
        nodes.start("a")
        nodes.wait_until(lambda state: "a" in state.nodes)
        nodes.signal_node("a", signal.SIGTERM)
        assert nodes.wait_for_end_of("a") == 75
        assert "no step was committed since this agent started" in nodes.output("a")
