"""What ``hetero launch`` runs on several hosts: where their output goes."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.hosts import NodeHost
from hetero.launch.run import HostCommand, run_on_hosts
from tests.unit.launch.plans import CLUSTER


def host(name: str, *words: str) -> HostCommand:
    return HostCommand(NodeHost(name=name, node=0, node_type=CLUSTER.node_types[0], ranks=range(1)), words)


def test_each_host_has_a_log(tmp_path: Path) -> None:
    said: list[str] = []
    assert run_on_hosts([host(name, "echo", name) for name in ("a", "b")], logs=tmp_path, say=said.append) == 0
    assert sorted(said) == ["a: a", "b: b"]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.log": "a\n", "b.log": "b\n"}


def test_a_log_that_is_a_link_is_refused_and_no_host_is_left_running(tmp_path: Path) -> None:
    """Anybody may put one into a shared folder of logs; what it led to was overwritten."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "b.log").symlink_to(tmp_path / "mine")
    waiting = host("a", "cat")
    message = r"b\.log: cannot be written: b\.log is a link, which is not followed; name another folder \(--logs\)"
    with pytest.raises(ConfigError, match=message):
        run_on_hosts([waiting, host("b", "touch", str(tmp_path / "ran"))], logs=tmp_path, say=lambda line: None)
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "ran").exists()
