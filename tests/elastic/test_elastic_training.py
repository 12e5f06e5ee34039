"""``pretrain_gpt.py`` under real agents: whatever happens to nodes, the weights are those of an uninterrupted run."""

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero.checkpoint.folder import published_steps
from hetero.elastic.planning_problem import present_cluster
from hetero.serialization import load, save
from hetero.spec.cluster import ClusterSpec
from tests.helpers.certificates import make_certificates
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.elastic_training import (
    PROGRAM,
    elastic_words,
    saved_state,
    saving_flags,
    uninterrupted,
    unlike_words,
)
from tests.helpers.etcd import EtcdServer
from tests.helpers.forked_launch import forked
from tests.unit.pretrain.corpora import corpus_of_late_tokens

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 48


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], dict[str, np.ndarray]]:
    return uninterrupted(tmp_path_factory.mktemp("oracle"), steps=STEPS)


def make_cluster(folder: Path, etcd: EtcdServer, job: str, types: dict[str, str], **options: object) -> ElasticCluster:
    return cluster_of(elastic_words(folder, steps=STEPS), folder, etcd, job, types, **options)


def cluster_of(
    words: list[str], folder: Path, etcd: EtcdServer, job: str, types: dict[str, str], **options: object
) -> ElasticCluster:
    return ElasticCluster(folder, etcd, job, types=types, words=words, options={"dwell": 0, **options})


def assert_as_uninterrupted(
    nodes: ElasticCluster, folder: Path, oracle: tuple[dict[int, str], dict[str, np.ndarray]]
) -> None:
    expected_losses, expected = oracle
    assert nodes.losses() == expected_losses
    state = saved_state(folder / "saved", step=STEPS)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(state[name], tensor, rtol=1e-9, atol=1e-9, err_msg=name)


def train_until(nodes: ElasticCluster, step: int, slower: set[str]) -> int:
    """Allow a step after each one that all ranks have told of, from ``step`` on, until the plan takes these nodes for
    slower; the last step that is done."""
    while (epoch := nodes.state().epoch) is None or epoch.slower.keys() != slower:
        step += 1
        assert step < STEPS - 2, nodes.told()
        nodes.allow(step)
        nodes.wait_for_step(step)
    return step


@pytest.fixture
def etcd_by_tls(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that asks for certificates: agents serve copies with what they show it."""
    make_certificates(tmp_path / "tls", "ours")
    server = EtcdServer(tmp_path / "etcd", tls=(tmp_path / "tls" / "ours.pem", tmp_path / "tls" / "ours.key"))
    server.start()
    yield server
    server.stop()


@pytest.mark.rotates(every=6, turn=1)
def test_a_rank_and_a_node_are_killed_one_comes_back_one_is_slow_for_a_time_and_one_leaves(
    etcd_by_tls: EtcdServer, job: str, tmp_path: Path, oracle: tuple[dict[int, str], dict[str, np.ndarray]]
) -> None:
    """All of it by TLS: what agents say to etcd and to each other, and the copies that ranks fetch and load."""
    options = {"min-nodes": 1, "straggler-threshold": 1.5, "straggler-after": 0}
    with make_cluster(tmp_path, etcd_by_tls, job, dict.fromkeys("abc", "box"), **options) as nodes:
        nodes.allow(5)
        nodes.start()
        settings = nodes.wait_until(lambda s: s.settings is not None).settings
        assert settings is not None
        assert settings.copy_transport == "authority"
        nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 3)
        nodes.wait_for_step(5)
        nodes.kill_rank(1)
        nodes.allow(9)
        state = nodes.wait_for_step(9)
        assert state.epoch is not None
        assert state.epoch.start.step >= 4, "one step may be lost at most"
        nodes.kill_node("b")
        nodes.allow(13)
        state = nodes.wait_for_step(13)
        assert state.epoch is not None
        assert {each.node.name for each in state.epoch.nodes} == {"a", "c"}
        nodes.start("b")
        nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 3)
        before = nodes.state().epoch
        assert before is not None
        # All compute for longer than they do anything else, so that their speeds are what is asked for.
        nodes.slow_down({"a": 0.03, "b": 0.03, "c": 0.07})
        step = train_until(nodes, 13, {"c"})
        demoted = nodes.state().epoch
        assert demoted is not None
        assert demoted.plan != before.plan
        assert "a, b, c as box-slower-" in demoted.reason
        assert demoted.start.step >= step - 1, "a planned change loses no step"
        nodes.slow_down(dict.fromkeys("abc", 0.03))
        step = train_until(nodes, step, set())
        promoted = nodes.state().epoch
        assert promoted is not None
        assert "a, b, c as box" in promoted.reason
        nodes.slow_down({})
        first, *_, last = (event.detail for event in nodes.events("straggler"))
        assert first.startswith("node c computes ")
        assert last == "node c is as fast as it should be again: it counts as box"
        nodes.allow(step + 2)
        nodes.wait_for_step(step + 2)
        nodes.leave("a")
        nodes.wait_for_epoch(promoted.number + 1)
        nodes.allow(STEPS)
        assert nodes.wait_for_end_of("a") == 0
        assert nodes.wait_for_end() == {"a": 0, "b": 0, "c": 0}
        assert_as_uninterrupted(nodes, tmp_path, oracle)
        # Planned changes lose no step.
        for event in nodes.events("epoch_made"):
            if "leaves" in event.detail:
                assert event.step >= step + 2


def leave_one_after_the_other(nodes: ElasticCluster) -> None:
    """The last notice comes when the ranks may have stopped for the first."""
    nodes.leave("b")
    nodes.leave("a")


def signal_all_processes(nodes: ElasticCluster) -> None:
    """As a supervisor ends a job: the ranks get it before their agents can say that it is for good."""
    for name in "ab":
        nodes.signal_whole_node(name, signal.SIGTERM)


@pytest.mark.rotates(every=2, turn=1)
@pytest.mark.parametrize("leave", [leave_one_after_the_other, signal_all_processes])
def test_a_leave_of_all_nodes_saves_the_step_in_hand(
    leave: Callable[[ElasticCluster], None],
    etcd: EtcdServer,
    job: str,
    tmp_path: Path,
    oracle: tuple[dict[int, str], dict[str, np.ndarray]],
) -> None:
    """And agents that are started again, with the same flags, go on from it to the end."""
    words = elastic_words(tmp_path, steps=STEPS, load=str(tmp_path / "saved"))
    with cluster_of(words, tmp_path, etcd, job, dict.fromkeys("ab", "box")) as nodes:
        nodes.allow(7)
        nodes.start()
        nodes.wait_for_step(7)
        # The step in hand ends the wait for the next one that is allowed.
        leave(nodes)
        assert nodes.wait_for_end() == {"a": 0, "b": 0}, nodes.told()
        (saved,) = published_steps(tmp_path / "saved")
        assert 7 < saved < STEPS
        assert f"all nodes leave after step {saved} of {STEPS}, which is saved in" in nodes.output("a")
        assert nodes.losses() == {step: oracle[0][step] for step in range(1, saved + 1)}
        last = nodes.state().newest_number
        nodes.allow(STEPS)
        nodes.start()
        assert nodes.wait_for_end() == {"a": 0, "b": 0}, nodes.told()
        assert f"training goes on after step {saved}" in nodes.output("a") + nodes.output("b")
        assert nodes.events("epoch_made")[-1].epoch == last + 1
        assert_as_uninterrupted(nodes, tmp_path, oracle)


@pytest.mark.rotates(every=6, turn=4)
def test_an_emulated_cluster_loses_a_node_and_goes_on_at_the_pace_of_what_is_left(
    etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    steps = 6
    emulated = {"--hetero-cluster": "--hetero-emulate", PROGRAM: "pretrain_gpt.py"}
    words = [emulated.get(word, word) for word in elastic_words(tmp_path, steps=steps)]
    words += ["--hetero-emulate-time-scale", "0.01"]
    options = {"min-nodes": 1, "dwell": 0}
    with ElasticCluster(tmp_path, etcd, job, types=dict.fromkeys("ab", "box"), words=words, options=options) as nodes:
        nodes.start()
        state = nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 2)
        assert state.epoch is not None
        nodes.wait_for_step(state.epoch.start.step + 2)
        nodes.kill_node("b")
        assert nodes.wait_for_end() == {"a": 0, "b": -signal.SIGKILL}
        assert nodes.events("epoch_made")[-1].step > state.epoch.start.step, "goes on from copies"
        said = "".join(path.read_text() for path in tmp_path.glob("*/epoch_*/*.log"))
        assert "EMULATED" in said
        losses = nodes.losses()
    words[words.index("--hetero-emulate") + 1] = str(one_node(tmp_path))
    words[words.index("--save") + 1] = str(tmp_path / "alone")
    alone = forked(1, words[1:])
    assert alone.returncode == 0, alone.stderr
    expected = dict(re.findall(r"^step +(\d+)/\d+ \| loss (\d+\.\d+)", alone.stdout, re.MULTILINE))
    assert {step: float(loss) for step, loss in losses.items()} == pytest.approx(
        {int(step): float(loss) for step, loss in expected.items()}, rel=1e-5
    )


@pytest.mark.rotates(every=2, turn=0)
@pytest.mark.parametrize(
    ("flags", "steps_saved"),
    [
        ({"data_path": "bad", "split": "1", "seed": "44"}, [2]),
        ({"train_data_path": "good", "valid_data_path": "bad", "eval_iters": "1", "eval_interval": "2"}, []),
    ],
    ids=["training", "evaluation"],
)
def test_an_id_that_the_tokenizer_lacks_ends_the_job(
    flags: dict[str, str], steps_saved: list[int], etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    """No epoch follows, as it would end the same way; what was trained before a wrong sample is saved."""
    corpora = {
        "bad": corpus_of_late_tokens(tmp_path / "bad"),
        "good": corpus_of_late_tokens(tmp_path / "good", token=0),
    }
    changes = {name: corpora.get(value, value) for name, value in flags.items()}
    words = [word for word in elastic_words(tmp_path, steps=8, **changes) if word != "--mock-data"]
    with cluster_of(words, tmp_path, etcd, job, dict.fromkeys("ab", "box")) as nodes:
        nodes.allow(8)
        nodes.start()
        assert nodes.wait_for_end() == {"a": 2, "b": 2}
        assert len(nodes.events("epoch_made")) == 1
        for name in "ab":
            assert f"{corpora['bad']}: token id 61 in sequence " in nodes.output(name).splitlines()[-1]
    assert published_steps(tmp_path / "saved") == steps_saved


def one_node(folder: Path) -> Path:
    path = folder / "one.json"
    save(present_cluster(load(ClusterSpec, folder / "cluster.yaml"), {"box": 1}), path)
    return path


@pytest.mark.rotates(every=6, turn=2)
def test_unlike_nodes_share_layers_samples_and_the_optimizer(
    etcd: EtcdServer, job: str, tmp_path: Path, oracle: tuple[dict[int, str], dict[str, np.ndarray]]
) -> None:
    """A rank is killed and the plan stays, one leaves, one comes back, and the fastest node is killed."""
    shared = "--use-distributed-optimizer"
    words = unlike_words(tmp_path, steps=STEPS, switches=(shared,), save_interval="8")
    types = {"a": "twin", "b": "slow", "c": "slow"}
    # They are no slower than the others: only the planner is told so.
    options = {"min-nodes": 1, "straggler-threshold": "inf"}
    with cluster_of(words, tmp_path, etcd, job, types, **options) as nodes:
        nodes.allow(5)
        nodes.start()
        first = nodes.wait_for_step(5).epoch
        assert first is not None
        (pipeline,) = first.plan.replicas
        assert first.plan.distributed_optimizer
        assert len({stage.end_layer - stage.first_layer for stage in pipeline.stages}) > 1
        assert len({stage.micro_batch_size for stage in pipeline.stages}) > 1

        nodes.kill_rank(2)
        nodes.allow(9)
        again = nodes.wait_for_step(9).epoch
        assert again is not None
        assert (again.plan, again.number) == (first.plan, 2)
        assert again.start.step >= 4

        nodes.leave("c")
        nodes.wait_for_epoch(3)
        # It stays until what it has is committed again, which may take the next step.
        nodes.allow(13)
        assert nodes.wait_for_end_of("c") == 0
        nodes.start("c")
        second = nodes.wait_for_step(13).epoch
        assert second is not None
        assert second.start.step == 10, "the ranks were asked to stop before their tenth step"
        assert {each.node.name for each in second.nodes} == {"a", "b"}

        nodes.wait_until(lambda s: s.epoch is not None and len(s.epoch.nodes) == 3)
        nodes.allow(17)
        nodes.wait_for_step(17)
        nodes.kill_node("a")
        nodes.allow(STEPS)
        ends = nodes.wait_for_end()
        assert (ends["b"], ends["c"]) == (0, 0)
        assert_as_uninterrupted(nodes, tmp_path, oracle)

    # The plan was the same before and after the rank was killed.
    save(first.plan, tmp_path / "plan.json")
    alone = tmp_path / "alone"
    flags = saving_flags(alone, steps=STEPS, exit_interval="8", hetero_plan=str(tmp_path / "plan.json"))
    run = forked(first.plan.world_size, [*flags, shared], script=PROGRAM)
    assert run.returncode == 0, run.stderr
    expected, found = saved_state(alone, step=8), saved_state(tmp_path / "saved", step=8)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
