"""Who sits on which node: a cluster as boxes, with the nodes that hold the same folded into one."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from hetero.report.content import Report
from hetero.spec.cluster import NodeType


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring devices of a node that hold the same stages of one replica; ``None`` twice if they idle.

    first: position of the first of ``size`` devices on the node.
    stage: the first one that they hold.
    """

    first: int
    size: int
    replica: int | None
    stage: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBox:
    """Nodes of one type that hold the same.

    nodes: their numbers in the cluster.
    first_rank: of the first node; ``runs`` are its own too.
    """

    node_type: NodeType
    nodes: tuple[int, ...]
    first_rank: int
    runs: tuple[Run, ...]


def node_boxes(report: Report) -> tuple[NodeBox, ...]:
    """All nodes in file order, equal ones folded into the first of them.

    Where every replica has a colour of its own, nodes of different replicas are different; else replicas of one group
    count as the same.
    """
    owners = {
        rank: (r, group[0])
        for r, replica in enumerate(report.plan.replicas)
        for group in replica.device_groups
        for rank in replica.stages[group[0]].ranks
    }
    folded: dict[object, list[tuple[NodeType, int, int, tuple[Run, ...]]]] = {}
    for node_type, node, first_rank in _nodes(report):
        held = [owners.get(first_rank + i) for i in range(node_type.gpus_per_node)]
        runs = []
        for owner, devices in groupby(range(len(held)), key=held.__getitem__):
            positions = list(devices)
            replica, stage = owner or (None, None)
            runs.append(Run(first=positions[0], size=len(positions), replica=replica, stage=stage))
        key = node_type.name, _likeness(report, runs)
        folded.setdefault(key, []).append((node_type, node, first_rank, tuple(runs)))
    return tuple(
        NodeBox(
            node_type=alike[0][0],
            nodes=tuple(node for _, node, _, _ in alike),
            first_rank=alike[0][2],
            runs=alike[0][3],
        )
        for alike in folded.values()
    )


def _nodes(report: Report) -> Iterator[tuple[NodeType, int, int]]:
    """Every node with its number and its first rank."""
    node = rank = 0
    for node_type in report.cluster.node_types:
        for _ in range(node_type.count):
            yield node_type, node, rank
            node += 1
            rank += node_type.gpus_per_node


def _likeness(report: Report, runs: list[Run]) -> object:
    """Equal for nodes that look the same: where replicas of a group share a colour, their numbers do not count."""
    seen: dict[int, int] = {}
    likeness: list[object] = []
    for run in runs:
        if run.replica is None:
            likeness.append((run.size, None))
        elif report.names_each_replica:
            likeness.append((run.size, run.stage, run.replica))
        else:
            # Two replicas of one group on a node are still two.
            number = seen.setdefault(run.replica, len(seen))
            likeness.append((run.size, run.stage, report.group_of[run.replica], number))
    return tuple(likeness)
