"""Network interfaces and measured collectives of nodes."""

from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.link import GroupLink, Link

BUS = Link(bandwidth_gb_per_s=10.0, latency_us=0.0)


def node_type(**overrides: Any) -> NodeType:
    return NodeType(**{"name": "node", "device": "A100-40", "gpus_per_node": 4, "count": 2, **overrides})


@pytest.mark.parametrize(
    ("nics", "positions"), [(1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (3, [0, 0, 1, 2]), (4, [0, 1, 2, 3])]
)
def test_devices_are_spread_over_the_interfaces_neighbours_together(nics: int, positions: list[int]) -> None:
    cluster = ClusterSpec(node_types=(node_type(name="other", gpus_per_node=2, count=1), node_type(nics_per_node=nics)))
    assert [cluster.nic_of_rank(rank) for rank in range(2, 6)] == [(1, nic) for nic in positions]
    assert [cluster.nic_of_rank(rank) for rank in range(6, 10)] == [(2, nic) for nic in positions]


def test_a_node_has_an_interface() -> None:
    with pytest.raises(ConfigError, match="nics_per_node is 0, must be at least 1"):
        node_type(nics_per_node=0)


def test_groups_are_listed_once_and_ascending() -> None:
    groups = (GroupLink(size=4, bus=BUS), GroupLink(size=2, bus=BUS))
    with pytest.raises(ConfigError, match=r"all_reduce_inside_node has sizes \[4, 2\]; list each once, ascending"):
        node_type(all_reduce_inside_node=groups)


def test_one_device_sums_with_nobody() -> None:
    with pytest.raises(ConfigError, match="size is 1, must be at least 2"):
        GroupLink(size=1, bus=BUS)
