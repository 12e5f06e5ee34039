"""Assigns the nodes of an allocation to the node types of the cluster file.

The first of these that decides counts: what the user or the job's script says, names of nodes in the cluster file, the
GPUs that the job has on each node, features and partitions that are called like a node type, and the order of the job's
components.
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
    """A node of the plan and its node of the allocation.

    visible_gpus: indices into the job's GPUs on the node that ranks may use, where the node has cards of several types;
        empty for all.
    """

    host: NodeHost
    allocated: AllocatedNode
    visible_gpus: tuple[int, ...] = ()


def place_nodes(
    cluster: ClusterSpec, nodes: Sequence[AllocatedNode], *, hosts: Sequence[str] = (), components: Sequence[str] = ()
) -> tuple[PlacedNode, ...]:
    """Return the nodes of the plan in its order, each with a node of the allocation.

    Args:
        hosts: words of ``--hosts``, if the user says which node is of which type.
        components: node type of each component, if the job's script says that.

    Raises:
        ConfigError: the allocation has other nodes than the plan needs, or does not say which is which.
    """
    return _Assignment(cluster, nodes).place(hosts, components)


class _Assignment:
    """The nodes of an allocation and the node types that they may be of."""

    def __init__(self, cluster: ClusterSpec, nodes: Sequence[AllocatedNode]) -> None:
        self._cluster = cluster
        self._nodes = {node.name: node for node in nodes}
        self._types = {node_type.name: node_type for node_type in cluster.node_types}
        self._counts = {node_type.name: node_type.count for node_type in cluster.node_types}
        # Some sites do not let Slurm manage their GPUs; then nothing can be checked.
        self._knows_gpus = any(node.node.gpus for node in nodes)

    def place(self, hosts: Sequence[str], components: Sequence[str]) -> tuple[PlacedNode, ...]:
        self._check_number()
        words = list(hosts) or self._words(self._by_component(components) if components else self._find_types())
        placed = tuple(self._placed(host) for host in assigned_hosts(self._cluster, words))
        lacking = {node.host.node_type.name for node in placed if not self._fits(node.allocated, node.host.node_type)}
        if lacking:
            raise self._misfit(lacking)
        return placed

    def _check_number(self) -> None:
        num_nodes, needed = len(self._nodes), sum(self._counts.values())
        if num_nodes != needed:
            raise ConfigError(
                f"this allocation of Slurm has {num_nodes} node{'s' * (num_nodes != 1)} ({', '.join(self._nodes)}), "
                f"the plan needs {needed}: {nodes_in_words(self._cluster)}; submit what 'hetero launch ... --sbatch' "
                "writes, or plan for these nodes ('srun hetero discover' describes them)"
            )

    def _words(self, types: Mapping[str, str]) -> list[str]:
        """Return the assignment in the form of ``--hosts``."""
        return [
            f"{node_type}={','.join(node for node in self._nodes if types[node] == node_type)}"
            for node_type in self._types
        ]

    def _find_types(self) -> dict[str, str]:
        """Return the node type of each node by what Slurm and the cluster file say."""
        if len(self._types) == 1:
            return dict.fromkeys(self._nodes, next(iter(self._types)))
        types_by_name = {node: node_type.name for node_type in self._types.values() for node in node_type.nodes}
        if types_by_name.keys() == self._nodes.keys():
            return types_by_name
        candidates = {
            name: frozenset(type_name for type_name, node_type in self._types.items() if self._fits(node, node_type))
            for name, node in self._nodes.items()
        }
        num_candidates = Counter(type_name for types in candidates.values() for type_name in types)
        if lacking := {name for name, count in self._counts.items() if num_candidates[name] < count}:
            raise self._misfit(lacking)
        if not all(candidates.values()):
            raise self._misfit(set(self._types))
        namesakes = {name: (types & _labels(self._nodes[name])) or types for name, types in candidates.items()}
        types = (
            _eliminate(candidates, self._counts)
            or _eliminate(namesakes, self._counts)
            or self._in_file_order(candidates)
        )
        if types is None:
            raise ConfigError(
                f"this allocation of Slurm does not say which of its nodes ({', '.join(self._nodes)}) is of which type "
                f"({nodes_in_words(self._cluster)}); name them: --hosts "
                + " ".join(f"{name}=NODE{',...' * (count > 1)}" for name, count in self._counts.items())
            )
        return types

    def _in_file_order(self, candidates: Mapping[str, frozenset[str]]) -> dict[str, str] | None:
        """Return the types if the components can be the node types in their order; else ``None``."""
        sizes = Counter(node.component for node in self._nodes.values())
        if [sizes[index] for index in range(len(sizes))] != list(self._counts.values()):
            return None
        types = self._by_component(list(self._types))
        return types if all(types[name] in candidates[name] for name in types) else None

    def _by_component(self, components: Sequence[str]) -> dict[str, str]:
        num_components = len({node.component for node in self._nodes.values()})
        if len(components) != num_components or set(components) != self._types.keys():
            raise ConfigError(
                f"--components {','.join(components)}: must name the node type of each of the job's {num_components} "
                f"components, and all of {', '.join(self._types)}"
            )
        return {name: components[node.component] for name, node in self._nodes.items()}

    def _fits(self, node: AllocatedNode, node_type: NodeType) -> bool:
        if self._cluster.device_types.of(node_type.device).is_host or not self._knows_gpus:
            return True
        return sum(self._usable_gpus(node, node_type).values()) >= node_type.gpus_per_node

    def _usable_gpus(self, node: AllocatedNode, node_type: NodeType) -> dict[str, int]:
        """Return the job's GPUs on a node, by Slurm's type, that may be the devices of a node type."""
        device = self._cluster.device_types.of(node_type.device)
        if device.is_host:
            return {}
        return {
            gpu_type: count
            for gpu_type, count in node.gpus.items()
            if may_be(gpu_type, device, known=self._cluster.device_types) is not False
        }

    def _placed(self, host: NodeHost) -> PlacedNode:
        allocated = self._nodes[host.name]
        usable = self._usable_gpus(allocated, host.node_type)
        if not usable or len(usable) == len(allocated.gpus):
            return PlacedNode(host=host, allocated=allocated)
        # A step sees its devices in the order of Slurm's indices.
        job_indices = sorted(index for indices in allocated.gpu_indices.values() for index in indices)
        usable_indices = [index for gpu_type in usable for index in allocated.gpu_indices.get(gpu_type, ())]
        visible = sorted(job_indices.index(index) for index in usable_indices)
        return PlacedNode(host=host, allocated=allocated, visible_gpus=tuple(visible))

    def _misfit(self, lacking: set[str]) -> ConfigError:
        needed = [node_type for node_type in self._types.values() if node_type.name in lacking]
        wanted = " and ".join(
            f"{node_type.count} node{'s' * (node_type.count > 1)} of {node_type.name!r} with "
            f"{node_type.gpus_per_node} x {node_type.device}"
            for node_type in needed
        )
        present = "; ".join(f"{name} has {_gpus_in_words(node)}" for name, node in self._nodes.items())
        return ConfigError(
            f"the plan needs {wanted}; of this job {present}; ask Slurm for them by type (such as --gpus-per-node=TYPE:"
            f"{needed[0].gpus_per_node}), or submit what 'hetero launch ... --sbatch' writes"
        )


def _labels(node: AllocatedNode) -> frozenset[str]:
    """Return names that Slurm connects with a node: features, partitions, GPU types."""
    return node.node.features | node.node.partitions | node.gpus.keys() | node.node.gpus.keys()


def _eliminate(candidates: Mapping[str, frozenset[str]], counts: Mapping[str, int]) -> dict[str, str] | None:
    """Return the type of each node if there is one way only; ``None`` if there are several or none.

    Args:
        candidates: types that a node may be of, by its name.
        counts: number of nodes by type.
    """
    types: dict[str, str] = {}
    while len(types) < len(candidates):
        missing = {name: count - Counter(types.values())[name] for name, count in counts.items()}
        open_types = {name for name, count in missing.items() if count > 0}
        undecided = {node: names & open_types for node, names in candidates.items() if node not in types}
        decided = dict(_decided(undecided, missing))
        if not decided or min(missing.values()) < 0:
            return None
        types |= decided
    return types if Counter(types.values()) == Counter(counts) else None


def _decided(undecided: Mapping[str, frozenset[str]], missing: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield nodes with one candidate type, or with a type that lacks as many nodes as are left for it."""
    for type_name, count in missing.items():
        nodes = [node for node, types in undecided.items() if type_name in types]
        if 0 < count == len(nodes):
            yield from ((node, type_name) for node in nodes)
            return
    yield from ((node, next(iter(types))) for node, types in undecided.items() if len(types) == 1)


def _gpus_in_words(node: AllocatedNode) -> str:
    if not node.gpus:
        return "no GPU"
    return " and ".join(f"{count} x {gpu_type or 'GPU'}" for gpu_type, count in node.gpus.items())
