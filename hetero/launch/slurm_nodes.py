"""Finds out which node of an allocation is of which node type of the cluster file.

By what Slurm has given the job on each node (GPUs, by Slurm's type of them), by the names of nodes in the cluster file,
by features and partitions that are called like a node type, and at last by the order of the job's components.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.launch.hosts import NodeHost, assigned_hosts, nodes_in_words
from hetero.slurm.controller import AllocatedNode
from hetero.slurm.gpu_types import may_be
from hetero.spec.cluster import ClusterSpec, NodeType


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedNode:
    """A node of the plan, and the node of the allocation that it is."""

    host: NodeHost
    allocated: AllocatedNode
    visible_gpus: tuple[int, ...] = ()
    """Which of the job's GPUs there the ranks see, counted from 0, on a node with several cards; empty: all."""


def placed_nodes(
    cluster: ClusterSpec, nodes: Sequence[AllocatedNode], *, hosts: Sequence[str] = (), components: Sequence[str] = ()
) -> tuple[PlacedNode, ...]:
    """Return the nodes of the plan in its order, each with a node of the allocation.

    Args:
        hosts: as ``--hosts`` has them, if a user says which node is of which type.
        components: the node type of each component, if the job's script says that.

    Raises:
        ConfigError: the allocation has other nodes than the plan needs, or does not say which is which.
    """
    return _Allocation(cluster, nodes).placed(hosts, components)


class _Allocation:
    """The nodes of an allocation, held against the node types of a cluster."""

    def __init__(self, cluster: ClusterSpec, nodes: Sequence[AllocatedNode]) -> None:
        self._cluster = cluster
        self._nodes = {each.name: each for each in nodes}
        self._types = {each.name: each for each in cluster.node_types}
        self._counts = {each.name: each.count for each in cluster.node_types}
        # Of a site that does not let Slurm count its GPUs, nothing can be said.
        self._knows_gpus = any(each.node.gpus for each in nodes)

    def placed(self, hosts: Sequence[str], components: Sequence[str]) -> tuple[PlacedNode, ...]:
        self._check_number()
        words = list(hosts) if hosts else self._words(components)
        placed = tuple(self._placed(host) for host in assigned_hosts(self._cluster, words))
        wrong = [each for each in placed if not self._fits(each.allocated, each.host.node_type)]
        if wrong:
            raise self._misfit({each.host.node_type.name for each in wrong})
        return placed

    def _check_number(self) -> None:
        found, needed = len(self._nodes), sum(self._counts.values())
        if found != needed:
            raise ConfigError(
                f"this allocation of Slurm has {found} node{'s' * (found != 1)} ({', '.join(self._nodes)}), the plan "
                f"needs {needed}: {nodes_in_words(self._cluster)}; submit what 'hetero launch ... --sbatch' writes, or "
                "plan for these nodes ('srun hetero discover' describes them)"
            )

    def _words(self, components: Sequence[str]) -> list[str]:
        """The assignment, as ``--hosts`` has it."""
        types = self._of_components(components) if components else self._found()
        return [
            f"{node_type}={','.join(node for node in self._nodes if types[node] == node_type)}"
            for node_type in self._types
        ]

    def _found(self) -> dict[str, str]:
        """By node, its type."""
        if len(self._types) == 1:
            return dict.fromkeys(self._nodes, next(iter(self._types)))
        names = {node: each.name for each in self._types.values() for node in each.nodes}
        if names.keys() == self._nodes.keys():
            return names
        possible = {
            node: frozenset(name for name, node_type in self._types.items() if self._fits(each, node_type))
            for node, each in self._nodes.items()
        }
        if lacking := [name for name, n in self._counts.items() if sum(name in p for p in possible.values()) < n]:
            raise self._misfit(set(lacking))
        if not all(possible.values()):
            raise self._misfit(set(self._types))
        called = {node: (p & self._marks(self._nodes[node])) or p for node, p in possible.items()}
        found = _assigned(possible, self._counts) or _assigned(called, self._counts) or self._in_order(possible)
        if found is None:
            raise ConfigError(
                f"this allocation of Slurm does not say which of its nodes ({', '.join(self._nodes)}) is of which type "
                f"({nodes_in_words(self._cluster)}); name them: --hosts "
                + " ".join(f"{name}=NODE{',...' * (count > 1)}" for name, count in self._counts.items())
            )
        return found

    def _in_order(self, possible: Mapping[str, frozenset[str]]) -> dict[str, str] | None:
        """The components in the order of the cluster file, if that is one of the ways."""
        sizes = Counter(each.component for each in self._nodes.values())
        if [sizes[i] for i in range(len(sizes))] != list(self._counts.values()):
            return None
        types = list(self._types)
        found = {node: types[each.component] for node, each in self._nodes.items()}
        return found if all(found[node] in possible[node] for node in found) else None

    def _of_components(self, components: Sequence[str]) -> dict[str, str]:
        sizes = Counter(each.component for each in self._nodes.values())
        if len(components) != len(sizes) or set(components) != self._types.keys():
            raise ConfigError(
                f"--components {','.join(components)}: must name the node type of each of the job's {len(sizes)} "
                f"components, and all of {', '.join(self._types)}"
            )
        return {node: components[each.component] for node, each in self._nodes.items()}

    def _fits(self, node: AllocatedNode, node_type: NodeType) -> bool:
        if self._cluster.device_types.of(node_type.device).is_host or not self._knows_gpus:
            return True
        return sum(self._usable(node, node_type).values()) >= node_type.gpus_per_node

    def _usable(self, node: AllocatedNode, node_type: NodeType) -> dict[str, int]:
        """GPUs of the job on a node that may be those of a node type."""
        device = self._cluster.device_types.of(node_type.device)
        if device.is_host:
            return {}
        return {
            gpu_type: count
            for gpu_type, count in node.gpus.items()
            if may_be(gpu_type, device, known=self._cluster.device_types) is not False
        }

    def _marks(self, node: AllocatedNode) -> frozenset[str]:
        return node.node.marks | node.gpus.keys() | node.node.gpus.keys()

    def _placed(self, host: NodeHost) -> PlacedNode:
        allocated = self._nodes[host.name]
        usable = self._usable(allocated, host.node_type)
        if not usable or len(usable) == len(allocated.gpus):
            return PlacedNode(host=host, allocated=allocated)
        indices = allocated.gpu_indices
        # The devices that a step sees are in the order of Slurm's numbers.
        of_job = sorted(index for of_type in indices.values() for index in of_type)
        visible = sorted(of_job.index(index) for gpu_type in usable for index in indices.get(gpu_type, ()))
        return PlacedNode(host=host, allocated=allocated, visible_gpus=tuple(visible))

    def _misfit(self, lacking: set[str]) -> ConfigError:
        needed = [each for each in self._types.values() if each.name in lacking]
        said = " and ".join(
            f"{each.count} node{'s' * (each.count > 1)} of {each.name!r} with {each.gpus_per_node} x {each.device}"
            for each in needed
        )
        has = "; ".join(f"{name} has {_gpus_in_words(node)}" for name, node in self._nodes.items())
        return ConfigError(
            f"the plan needs {said}; of this job {has}; ask Slurm for them by type (such as --gpus-per-node=TYPE:"
            f"{needed[0].gpus_per_node}), or submit what 'hetero launch ... --sbatch' writes"
        )


def _assigned(possible: Mapping[str, frozenset[str]], counts: Mapping[str, int]) -> dict[str, str] | None:
    """By node its type, where nothing else is possible; ``None`` if there are several ways, or none."""
    found: dict[str, str] = {}
    while len(found) < len(possible):
        left = {name: count - sum(each == name for each in found.values()) for name, count in counts.items()}
        open_types = {name for name, count in left.items() if count > 0}
        free = {node: types & open_types for node, types in possible.items() if node not in found}
        forced = dict(_forced(free, left))
        if not forced or min(left.values()) < 0:
            return None
        found |= forced
    return found if Counter(found.values()) == Counter(counts) else None


def _forced(free: Mapping[str, frozenset[str]], left: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Nodes that can be of one type only, or that a type needs as no others are left for it."""
    for name, count in left.items():
        able = [node for node, types in free.items() if name in types]
        if 0 < count == len(able):
            yield from ((node, name) for node in able)
            return
    yield from ((node, next(iter(types))) for node, types in free.items() if len(types) == 1)


def _gpus_in_words(node: AllocatedNode) -> str:
    if not node.gpus:
        return "no GPU"
    return " and ".join(f"{count} x {gpu_type or 'GPU'}" for gpu_type, count in node.gpus.items())
