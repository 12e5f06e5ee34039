"""Bounds from below how long the gradient of the word embedding is summed, behind the last backward of a step.

With whole backwards that gradient is complete only at the end of the last backward of a first stage, and every compute
of a replica comes before one of these. So nobody has anything to compute while it is summed.

R nodes hold the word embedding, in first stages and with tied embeddings in last ones as well. Until one of them knows
the sum of an element, each of the R - 1 others has sent something of it, and after that each of the R - 1 others has
to get it (Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). So R nodes send 2 (R - 1) times the bytes
of the embedding, at most as fast as a ring on all interfaces of a node:

    E = 2 (R - 1) / R  x  min over node types of  bytes / (interfaces x share of a ring x bandwidth)

B samples through first stages of an attention at least, with tied embeddings also through last ones of an MLP at least,
take so many nodes for the seconds of the step: that is R. If a single node may have all these stages, E is 0.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.cost.network import RING_SHARE
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.spec.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnds:
    """What a node of one type takes at least, with all of its devices and interfaces.

    sum_s: to send the gradient of the word embedding once.
    first_s, last_s, whole_s: a sample in a first stage, in a last one, and in all layers.
    received_s: a sample that comes from another node.
    """

    sum_s: float
    first_s: float
    last_s: float
    whole_s: float
    received_s: float

    def takes_all(self, batch: int, step_s: float, *, tied: bool) -> bool:
        """Whether one such node may have all stages that hold the word embedding.

        A sample of which it does not compute everything comes to it from elsewhere: its gradient to the first stage,
        and with tied embeddings the sample itself to the last one.
        """
        received_s = (1 + tied) * self.received_s
        most = step_s / self.whole_s + (step_s / received_s if received_s else math.inf)
        return batch * (self.first_s + tied * self.last_s) <= step_s and batch <= most


def embedding_sum_s(nodes: Sequence[NodeEnds], *, batch: int, step_s: float, tied: bool) -> float:
    """The least seconds E of the head of this file in a step of ``step_s`` seconds."""
    if any(node.takes_all(batch, step_s, tied=tied) for node in nodes):
        return 0.0
    node_s = batch * (min(node.first_s for node in nodes) + tied * min(node.last_s for node in nodes))
    num_nodes = max(2, math.ceil(node_s / step_s * (1 - 1e-9)))
    return 2 * (num_nodes - 1) / num_nodes * min(node.sum_s for node in nodes)


def least_ring_s(num_bytes: int, node_type: PlannerNodeType, problem: Problem) -> float:
    """Seconds that rings take at least to send so many bytes out of a node of ``node_type``, in buckets of any size; 0
    where there is no other node."""
    interfaces = problem.cluster.node_types[node_type.index].nics_per_node
    seconds = (_least_message_s(num_bytes, link) for link in links_of_node(node_type, problem))
    return min(seconds, default=0.0) / (interfaces * RING_SHARE)


def links_of_node(node_type: PlannerNodeType, problem: Problem) -> Iterable[Link]:
    """The links of a node of ``node_type`` to nodes of every type."""
    for other in problem.node_types:
        if other is not node_type:
            yield problem.topology.link(node_type.first_rank, other.first_rank)
        elif other.count > 1:
            yield problem.topology.link(node_type.first_rank, other.first_rank + other.gpus_per_node)


def _least_message_s(num_bytes: int, link: Link) -> float:
    """Seconds of so many bytes on a link: in messages no larger than them, or within one that is."""
    table = link.bandwidth_gb_per_s
    sizes = [size for size, _ in table] if isinstance(table, tuple) else []
    fastest = max(link.bytes_per_s(size) for size in (num_bytes, *(size for size in sizes if size < num_bytes)))
    return min(num_bytes / fastest, *(size / link.bytes_per_s(size) for size in sizes if size > num_bytes), math.inf)
