"""Hostfiles in the forms that DeepSpeed, FlagScale, Open MPI, MPICH and PBS write."""

import dataclasses
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.launch.hostfile import hosts_of_file
from hetero.spec.cluster import ClusterSpec
from tests.unit.launch.plans import CLUSTER

TWO_FAST = dataclasses.replace(
    CLUSTER, node_types=(dataclasses.replace(CLUSTER.node_types[0], count=2), CLUSTER.node_types[1])
)
"""Two nodes with 2 devices, one with 1."""


def names(folder: Path, text: str, cluster: ClusterSpec = TWO_FAST) -> list[str]:
    (folder / "hostfile").write_text(text)
    return [host.name for host in hosts_of_file(cluster, folder / "hostfile")]


@pytest.mark.parametrize(
    "text",
    [
        "a slots=2\nb slots=2\nc slots=1\n",
        "# DeepSpeed\n\na slots=2  # the\u00a0first\n  b\tslots=2\r\nc slots=4",
        "a slots=2 max_slots=4\nb slots=2 max-slots=8\nc\n",
        "a:2\nb:2\nc:1\n",
        "a\nb\nc\n",
        "a\na\nb\nb\nc\n",
        "c slots=1 type=slow\na slots=2 type=fast\nb slots=2 type=fast\n",
        "\ufeffa slots=2\r\nb slots=2\r\nc slots=1\r\n",
    ],
    ids=["DeepSpeed", "comments", "Open MPI", "MPICH", "names", "PBS", "FlagScale", "byte order mark"],
)
def test_each_form_names_the_same_hosts(tmp_path: Path, text: str) -> None:
    assert names(tmp_path, text) == ["a", "b", "c"]


def test_users_and_addresses_are_names(tmp_path: Path) -> None:
    assert names(tmp_path, "me@a slots=2\nfd00::1 slots=2\n10.0.0.1:2\n") == ["me@a", "fd00::1", "10.0.0.1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"it names no host; write one per line, such as 'worker-1 slots=8'"),
        ("a slots=2\nb slots=2\n", r"hostfile: 2 hosts for a plan that needs 3.*name more"),
        ("a slots=2\nb slots=1\nc slots=2\n", r"line 2: b has 1 slots, the plan has 2 x cpu on node 1 \(fast\); put"),
        ("a\na\nb\nc\n", r"line 3: b has 1 slots, the plan has 2 x cpu"),
        ("a slots=2\nb slots=2\na slots=1\n", r"a is named twice"),
        ("a slots=2\na.cluster slots=2\nc slots=1\n", r"a and a\.cluster name one machine"),
        (
            "a\x0bb slots=2\n",
            r"line 1: 'a\\x0bb slots=2' has the character U\+000B, which is not printable; take it out",
        ),
        (
            "a\u2028b slots=2\n",
            r"line 1: 'a\\u2028b .* U\+2028 \(LINE SEPARATOR\), which is not printable; take it out",
        ),
        ("a slots=two\n", r"line 1: unexpected 'slots=two' after host a; a line is 'HOST slots=N'"),
        ("a 2\n", r"line 1: unexpected '2' after host a"),
        ("a port=22\n", r"line 1: unexpected 'port=22'"),
        ("a:2222\nb:2\nc:1\n", r"a:2222 has a number behind its name; a port of ssh goes into --ssh"),
        ("a type=fsat\nb type=fast\nc type=slow\n", r"line 1: type=fsat is no node type .*did you mean 'fast'"),
        ("a type=fast\nb\nc type=slow\n", r"line 2: other lines have type=NODE_TYPE; add it, or take theirs out"),
        ("a,b,c\n", r"line 1: 'a,b,c' is no host; a line is one 'HOST slots=N'"),
        ("gpu[0-1] slots=2\nc\nd\n", r"'gpu\[0-1\]' is no name of a host; write out what is in brackets"),
        ("a\nslots=2\n", r"line 2: 'slots=2' is no host"),
    ],
)
def test_each_mistake_has_its_message(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        names(tmp_path, text)
    assert str(caught.value).startswith(f"--hostfile {tmp_path}/hostfile")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: no such file"):
        hosts_of_file(TWO_FAST, tmp_path / "none")
