"""The clusters of published runs: measured links where the same nodes were measured, else what data sheets state.

Between nodes a link is one network interface. Its latency, where nobody says, is a heuristic: a few microseconds, as
messages over InfiniBand take.
"""

import dataclasses

from hetero.data import shipped_links
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link

INFINIBAND_LATENCY_US = 5.0
"""A heuristic: the tables do not say."""

EDR_100_GBIT = Link(bandwidth_gb_per_s=12.5, latency_us=INFINIBAND_LATENCY_US)
"""InfiniBand EDR, 100 Gbit/s each way."""

HDR_200_GBIT = Link(bandwidth_gb_per_s=25, latency_us=INFINIBAND_LATENCY_US)
"""InfiniBand HDR, 200 Gbit/s each way."""

A800_NVLINK = Link(bandwidth_gb_per_s=200, latency_us=0)
"""NVIDIA A800 data sheet: 400 GB/s, both ways added up."""


def gh200(*, num_nodes: int) -> ClusterSpec:
    """Nodes of 4 GH200, whose links were measured with the same nodes (``hetero/data/NOTICE.md``)."""
    links = shipped_links()
    nodes = links.node_type("GH200", gpus_per_node=4, count=num_nodes)
    return ClusterSpec(node_types=(nodes,), links=Links(between_nodes=links.of("GH200").between_nodes))


def turing(*, num_titan_nodes: int, num_2080ti_nodes: int, gpus_per_node: int) -> ClusterSpec:
    """Nodes of Titan RTX and nodes of RTX 2080 Ti, whose links were measured with the same nodes."""
    links = shipped_links()
    counts = {"Titan-RTX": num_titan_nodes, "RTX-2080Ti": num_2080ti_nodes}
    nodes = tuple(
        links.node_type(device, gpus_per_node=gpus_per_node, count=count) for device, count in counts.items() if count
    )
    pairs = tuple(pair for pair in links.pairs if set(pair.node_types) == set(counts))
    own = [(device, links.of(device).between_nodes) for device in counts]
    of_one_type = tuple(
        dataclasses.replace(pairs[0], node_types=(device, device), link=link) for device, link in own if link
    )
    return ClusterSpec(node_types=nodes, links=Links(node_pairs=pairs + of_one_type))


def selene(*, num_nodes: int) -> ClusterSpec:
    """DGX A100 nodes of 8 A100-80, each with an HDR InfiniBand card of its own (arXiv 2104.04473, section 5).

    Inside the node NVLink and NVSwitch are as on the nodes of A100-40 whose links ship: the boards differ in the memory
    of their devices alone.
    """
    links = shipped_links().of("A100-40")
    nodes = NodeType(
        name="dgx-a100",
        device="A100-80",
        gpus_per_node=8,
        count=num_nodes,
        inside_node=links.inside_node,
        all_reduce_inside_node=links.all_reduce_inside_node,
        nics_per_node=8,
    )
    return ClusterSpec(node_types=(nodes,), links=Links(between_nodes=HDR_200_GBIT))


def a800() -> ClusterSpec:
    """A node of 8 A800, which are A100-80 with two thirds of their NVLink."""
    nodes = NodeType(name="dgx-a800", device="A100-80", gpus_per_node=8, inside_node=A800_NVLINK)
    return ClusterSpec(node_types=(nodes,))


def h200() -> ClusterSpec:
    """One H200."""
    return ClusterSpec(node_types=(NodeType(name="h200", device="H200", gpus_per_node=1),))


def v100(*, num_gpus: int) -> ClusterSpec:
    """Nodes of up to 8 V100-SXM2-16 with one card of EDR InfiniBand each; NVLink as on the nodes whose links ship."""
    gpus_per_node = min(8, num_gpus)
    nodes = shipped_links().node_type("V100-16", gpus_per_node=gpus_per_node, count=num_gpus // gpus_per_node)
    nodes = dataclasses.replace(nodes, nics_per_node=1)
    return ClusterSpec(node_types=(nodes,), links=Links(between_nodes=EDR_100_GBIT))
