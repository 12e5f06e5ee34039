"""All nodes of a job are killed; others, under another job and etcd's other keys, go on from the object store."""

from pathlib import Path

import pytest

from tests.elastic.test_elastic_training import STEPS, assert_as_uninterrupted, make_cluster, oracle
from tests.helpers.etcd import EtcdServer

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

__all__ = ["oracle"]


@pytest.mark.rotates(every=6, turn=5)
def test_all_nodes_are_killed_and_new_ones_go_on_from_the_last_upload(
    etcd: EtcdServer,
    job: str,
    tmp_path: Path,
    oracle: tuple,
) -> None:
    options = {"object-store": f"file://{tmp_path}/store", "upload-every": 4}
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
    with make_cluster(tmp_path / "first", etcd, job, dict.fromkeys("ab", "box"), **options) as nodes:
        nodes.allow(9)
        nodes.start()
        nodes.wait_for_step(9)
        nodes.wait_for_events("published", 1)
        stored = nodes.events("published")[-1].step
        for name in "ab":
            nodes.kill_node(name)
        losses = nodes.losses()
    with make_cluster(tmp_path / "second", etcd, f"{job}-again", dict.fromkeys("cd", "box"), **options) as nodes:
        nodes.allow(STEPS)
        nodes.start()
        assert nodes.wait_for_end() == {"c": 0, "d": 0}
        (made, *_) = nodes.events("epoch_made")
        assert made.epoch == 2, "numbers of epochs go on after those of the first job"
        assert made.step >= stored
        expected, state = oracle
        assert {
            step: loss for step, loss in (losses | nodes.losses()).items() if step <= 9 or step > made.step
        } == expected
        assert_as_uninterrupted(nodes, tmp_path / "second", (nodes.losses(), state))
        assert nodes.losses() == {step: loss for step, loss in expected.items() if step > made.step}
