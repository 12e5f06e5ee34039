"""Questions that are far larger than any that is asked in earnest, but that may be asked."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import Link
from hetero.spec.model import ModelSpec
from tests.unit.planner.clusters import OPT_350M, cluster, opt_model, problem


@dataclass(frozen=True, slots=True)
class Extreme:
    """One question, by its time limit in seconds; ``is_quick`` if it takes a test no more than about a second."""

    make: Callable[[float], Problem]
    is_quick: bool = True


SMALL = cluster(("A100-40", 2, 1), ("V100-16", 2, 1))


def _nodes(count: int, *, gpus_per_node: int = 8) -> ClusterSpec:
    """A100-40 nodes."""
    spec = cluster(("A100-40", 8, 2))
    (node_type,) = spec.node_types
    nics = min(gpus_per_node, node_type.nics_per_node)
    grown = dataclasses.replace(node_type, count=count, gpus_per_node=gpus_per_node, nics_per_node=nics)
    return dataclasses.replace(spec, node_types=(grown,))


def _node_types(number: int, *, count: int = 2) -> ClusterSpec:
    """Node types that are all alike."""
    node_type = cluster(("A100-40", 4, 2)).node_types[0]
    types = tuple(dataclasses.replace(node_type, name=f"type {i}", count=count) for i in range(number))
    return ClusterSpec(node_types=types, links=Links(between_nodes=Link(bandwidth_gb_per_s=10.0, latency_us=20.0)))


def _asked(spec: ClusterSpec, model: ModelSpec, batch: int, *, is_quick: bool = True) -> Extreme:
    return Extreme(lambda limit_s: problem(spec, model, batch, time_limit_s=limit_s), is_quick)


FOUR = opt_model(4, 1024, 16)

EXTREME = {
    "one layer and a million samples": _asked(SMALL, opt_model(1, 1024, 16), 10**6),
    "100,000 samples": _asked(SMALL, FOUR, 10**5),
    "a prime number of samples": _asked(SMALL, FOUR, 100_003),
    "a million samples": _asked(SMALL, FOUR, 10**6),
    "ten million samples": _asked(SMALL, FOUR, 10**7),
    "8,000 devices": _asked(_nodes(1000), OPT_350M, 16384),
    "80,000 devices": _asked(_nodes(10_000), OPT_350M, 160_000, is_quick=False),
    "200,000 devices": _asked(_nodes(25_000), OPT_350M, 16384, is_quick=False),
    "1,000 devices per node": _asked(_nodes(2, gpus_per_node=1000), OPT_350M, 4096, is_quick=False),
    "200,000 nodes of one device": _asked(_nodes(200_000, gpus_per_node=1), OPT_350M, 400_000, is_quick=False),
    "10 node types": _asked(_node_types(10, count=1), OPT_350M, 1024, is_quick=False),
    "40 node types": _asked(_node_types(40), OPT_350M, 1024, is_quick=False),
    "64 node types": _asked(_node_types(64, count=100), OPT_350M, 65536, is_quick=False),
    "10,000 layers": _asked(SMALL, opt_model(10_000, 64, 4), 64, is_quick=False),
    "10,000 layers on many devices": _asked(_node_types(4), opt_model(10_000, 64, 4), 64, is_quick=False),
    "a model of a trillion weights": _asked(_nodes(1000), opt_model(120, 24_576, 192), 4096, is_quick=False),
}
