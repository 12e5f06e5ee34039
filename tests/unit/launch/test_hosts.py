"""Hosts against the nodes of a cluster: who is which node, and one message for each mistake."""

import dataclasses

import pytest

from hetero.errors import ConfigError
from hetero.launch.hosts import assigned_hosts, invented_hosts
from hetero.spec.cluster import ClusterSpec
from tests.unit.launch.plans import CLUSTER

TWO_FAST = dataclasses.replace(
    CLUSTER, node_types=(dataclasses.replace(CLUSTER.node_types[0], count=2), CLUSTER.node_types[1])
)


@pytest.mark.parametrize("words", [["a,b,c"], ["a", "b", "c"], ["slow=c", "fast=a,b"], ["fast=a", "fast=b", "slow=c"]])
def test_hosts_have_ranks_in_the_order_of_the_cluster_file(words: list[str]) -> None:
    hosts = assigned_hosts(TWO_FAST, words)
    assert [(each.name, each.node, each.node_type.name, list(each.ranks)) for each in hosts] == [
        ("a", 0, "fast", [0, 1]),
        ("b", 1, "fast", [2, 3]),
        ("c", 2, "slow", [4]),
    ]


def test_names_are_made_up_but_for_a_single_host() -> None:
    assert [each.name for each in invented_hosts(TWO_FAST)] == ["fast-0", "fast-1", "slow-0"]
    alone = ClusterSpec(node_types=CLUSTER.node_types[:1])
    assert [each.name for each in invented_hosts(alone)] == ["localhost"]


def test_a_user_is_for_ssh_alone() -> None:
    assert assigned_hosts(CLUSTER, ["me@a", "b"])[0].address == "a"


@pytest.mark.parametrize(
    "words",
    [
        "gpu-0.east,gpu-0.west,gpu-1",
        "gpu-1,gpu-10,gpu-1-ib",
        "127.0.0.1,127.0.0.2,127.0.0.3",
        "10.0.0.1,10.0.0.11,fd00::1",
    ],
)
def test_names_that_resemble_each_other_are_several_machines(words: str) -> None:
    assert [host.name for host in assigned_hosts(TWO_FAST, [words])] == words.split(",")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a,b"], r"2 hosts for a plan that needs 3, 2 x fast \(2 cpu\), 1 x slow \(1 cpu\); name more"),
        (["a,b,c,d"], r"4 hosts for a plan that needs 3.*; leave some out"),
        (["fast=a", "slow=c"], r"node type 'fast' has 1 host \(a\), the plan needs 2; name more"),
        (["fast=a,b"], r"node type 'slow' has 0 hosts, the plan needs 1; name more"),
        (["fast=a,b,d", "slow=c"], r"node type 'fast' has 3 hosts \(a, b, d\), the plan needs 2; leave some out"),
        (["fsat=a,b", "slow=c"], r"unknown node type 'fsat' \(did you mean 'fast'\?\)"),
        (["fast=a,b", "c"], r"--hosts c: others have their node type in front"),
        (["a,b,a"], r"a is named twice"),
        (["fast=a,me@b", "slow=you@b"], r"b is named twice"),
        (["gpu-0,b,gpu-0.cluster.local"], r"--hosts: gpu-0 and gpu-0\.cluster\.local name one machine.*leave one out"),
        (["GPU-0.,b,gpu-0"], r"GPU-0\. and gpu-0 name one machine"),
        (["localhost,b,127.0.0.1"], r"localhost and 127\.0\.0\.1 name one machine"),
        (["::1,b,LOCALHOST"], r"::1 and LOCALHOST name one machine"),
        (["fd00::1,b,fd00:0:0::0001"], r"fd00::1 and fd00:0:0::0001 name one machine"),
        (["gpu-0,b,gpu-0:2222"], r"gpu-0:2222 has a number behind its name; a port .* --ssh 'ssh -p 2222'"),
        (["gpu-0", "slots=4", "gpu-1", "slots=4"], r"--hosts slots=4: that is from a hostfile; .*--hostfile FILE"),
        (["gpu-0 slots=4\ngpu-1 slots=4"], r"--hosts gpu-0 slots=4 gpu-1 slots=4: that is from a hostfile"),
        (["gpu-0 slots=4,gpu-1 max-slots=4"], r"that is from a hostfile; give the file itself: --hostfile FILE"),
        (["10.0.0.1,b,::ffff:10.0.0.1"], r"10\.0\.0\.1 and ::ffff:10\.0\.0\.1 name one machine"),
        (["gpu-[0-1]"], r"'gpu-\[0-1\]' is no name of a host; write out what is in brackets, as 'scontrol show"),
        (["a,,c"], r"'' is no name of a host"),
        (["a,-oProxyCommand=x,c"], r"write TYPE=|unknown node type|is no name of a host"),
        (["a,-v,c"], r"'-v' is no name of a host"),
    ],
)
def test_each_mistake_is_told(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assigned_hosts(TWO_FAST, words)
