"""Decides what each node type asks of Slurm, and the order of the job's components.

Slurm places the components of a heterogeneous job one after the other, each on whatever nodes can serve it, and gives
no node to two of them. A component that can run on many nodes may take the only ones of a later component, and then
the job never starts. Where Slurm's commands are at hand, its nodes say which GPUs to ask for and what goes first.
"""

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.launch.sbatch_options import GpuRequest, SbatchOption, gpu_requests, options_of, read_options
from hetero.slurm.controller import SlurmNode, all_nodes, default_partition
from hetero.slurm.gpu_types import may_be
from hetero.slurm.job import hostnames
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType

_SIMPLE_CONSTRAINT = re.compile(r"\[?([\w.:-]+(?:\|[\w.:-]+)*|[\w.:-]+(?:[&,][\w.:-]+)*)\]?")
"""One feature, one of several, or all of several; others are left to Slurm."""

_NODE_CHOICES = ("constraint", "nodelist", "nodefile", "reservation")
"""Options by which a user may have chosen nodes with the right GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSite:
    """The nodes of a Slurm, and the partition of jobs that name none."""

    nodes: tuple[SlurmNode, ...]
    default_partition: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentRequest:
    """What the nodes of one type ask of Slurm.

    gpus: on each node; ``None`` for hosts without GPUs.
    says_gpus: whether an option of the user asks for them on each node.
    nodes: names of those that could serve it; ``None`` if Slurm is not at hand.
    """

    node_type: NodeType
    options: Mapping[str, SbatchOption]
    gpus: GpuRequest | None
    says_gpus: bool
    nodes: frozenset[str] | None

    @property
    def lines(self) -> list[str]:
        """The options of ``sbatch``, without their dashes."""
        lines = [f"nodes={self.node_type.count}", "ntasks-per-node=1"]
        if self.gpus is not None and not self.says_gpus:
            lines.append(self.gpus.words)
        if "exclusive" not in self.options:
            lines.append("exclusive")
        return lines + [option.words for option in self.options.values()]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """The components of a job, in its order.

    why_this_order: lines, none if any order would do.
    notes: what the user should know before the job is submitted.
    """

    components: tuple[ComponentRequest, ...]
    why_this_order: tuple[str, ...]
    notes: tuple[str, ...]


def site_at_hand() -> SlurmSite | None:
    """Return the Slurm that this host belongs to; ``None`` if none answers."""
    if shutil.which("scontrol") is None:
        return None
    try:
        return SlurmSite(nodes=tuple(all_nodes()), default_partition=default_partition())
    except ConfigError:
        return None


def job_request(cluster: ClusterSpec, sbatch_options: Sequence[str], site: SlurmSite | None) -> JobRequest:
    """Return what a job for all nodes of a cluster asks of Slurm.

    Args:
        sbatch_options: ``account=me`` for all components, ``fast:constraint=a100`` for that of a node type.
        site: ``None`` if Slurm is not at hand; then GPUs have no type, and components the order of the cluster file.

    Raises:
        ConfigError: an option for a node type that the cluster does not have, or one that contradicts the plan.
    """
    options = read_options(sbatch_options, cluster.node_types)
    if any(option.name == "clusters" for option in options):
        # The nodes of another cluster.
        site = None
    reasons: dict[str, list[ComponentRequest]] = {}
    components = []
    for node_type in cluster.node_types:
        component, why_untyped = _component(node_type, options_of(node_type, options), cluster, site)
        components.append(component)
        if why_untyped and not _has_chosen_nodes(component):
            reasons.setdefault(why_untyped, []).append(component)
    ordered = _ordered(components)
    return JobRequest(
        components=tuple(ordered),
        why_this_order=tuple(_why_this_order(ordered)),
        notes=tuple(_untyped_note(why, untyped) for why, untyped in reasons.items()),
    )


def _component(
    node_type: NodeType, options: Mapping[str, SbatchOption], cluster: ClusterSpec, site: SlurmSite | None
) -> tuple[ComponentRequest, str]:
    """Return a component, and why its GPUs have no type; empty if they have one, or there are none."""
    device = cluster.device_types.of(node_type.device)
    requests = gpu_requests(node_type, options, needed=0 if device.is_host else node_type.gpus_per_node)
    nodes = None if site is None else _chosen_nodes(site, node_type, options)
    gpus, why_untyped = next(iter(requests), None), ""
    if gpus is None and not device.is_host:
        gpu_type, why_untyped = _gpu_type(node_type, device, cluster, nodes)
        gpus = GpuRequest(gpu_type=gpu_type, per_node=node_type.gpus_per_node)
    component = ComponentRequest(
        node_type=node_type,
        options=options,
        gpus=gpus,
        says_gpus=any(request.says_each_node for request in requests),
        nodes=None if nodes is None else frozenset(node.name for node in nodes if _has(node, gpus)),
    )
    return component, why_untyped


def _gpu_type(
    node_type: NodeType, device: DeviceType, cluster: ClusterSpec, nodes: Sequence[SlurmNode] | None
) -> tuple[str, str]:
    """Return Slurm's type of a device, or an empty one and why."""
    if nodes is None:
        return "", "no Slurm answers here that could say what it calls them"
    num_nodes: dict[str, int] = {}
    for node in nodes:
        for gpu_type, count in node.gpus.items():
            if gpu_type:
                num_nodes[gpu_type] = num_nodes.get(gpu_type, 0) + (count >= node_type.gpus_per_node)
    if not num_nodes:
        return "", "no node that the job may use has GPUs with a type"
    fits = {gpu_type: may_be(gpu_type, device, known=cluster.device_types) for gpu_type in num_nodes}
    named = [found for found in num_nodes if found.lower() == node_type.name.lower() and fits[found] is not False]
    found = [gpu_type for gpu_type in named or num_nodes if (named or fits[gpu_type]) and num_nodes[gpu_type]]
    if len(found) > 1:
        found = [gpu_type for gpu_type in found if num_nodes[gpu_type] >= node_type.count] or found
    if len(found) == 1:
        return found[0], ""
    if found:
        return "", f"several types of this Slurm may be {device.name} ({', '.join(sorted(found))})"
    listed = ", ".join(sorted(num_nodes))
    return "", f"no type of this Slurm with {node_type.gpus_per_node} on a node is known to be {device.name} ({listed})"


def _has_chosen_nodes(component: ComponentRequest) -> bool:
    """Return whether options choose nodes for a component, and not just a partition for all components."""
    partition = component.options.get("partition")
    return any(name in component.options for name in _NODE_CHOICES) or bool(partition and partition.node_type)


def _untyped_note(why: str, components: Sequence[ComponentRequest]) -> str:
    names = ", ".join(repr(component.node_type.name) for component in components)
    first = components[0].node_type
    return (
        f"the job takes any GPUs for {names}: {why}; name the type with --sbatch-option "
        f"{first.name}:gpus-per-node=TYPE:{first.gpus_per_node}, or the nodes with {first.name}:constraint=FEATURE"
    )


def _has(node: SlurmNode, gpus: GpuRequest | None) -> bool:
    if gpus is None:
        return True
    return (node.gpus.get(gpus.gpu_type, 0) if gpus.gpu_type else sum(node.gpus.values())) >= gpus.per_node


def _chosen_nodes(site: SlurmSite, node_type: NodeType, options: Mapping[str, SbatchOption]) -> list[SlurmNode]:
    """Return the nodes that partition, constraint, nodelist and exclude leave, as far as they can be read here."""

    def value(name: str) -> str:
        return (options[name].value if name in options else None) or ""

    partitions = set((value("partition") or site.default_partition or "").split(",")) - {""}
    listed, excluded = _listed(value("nodelist")), _listed(value("exclude"))
    meets = _constraint(value("constraint"))
    return [
        node
        for node in site.nodes
        if (not partitions or partitions & node.partitions)
        and meets(node.features)
        # Slurm adds others to a list that is too short.
        and (len(listed) < node_type.count or node.name in listed)
        and node.name not in excluded
    ]


def _listed(names: str) -> frozenset[str]:
    """Return the nodes of a list; none of one that ``sbatch`` reads from a file, or that Slurm cannot read."""
    if "/" in names:
        return frozenset()
    try:
        return frozenset(hostnames(names))
    except ConfigError:
        return frozenset()


def _constraint(text: str) -> Callable[[frozenset[str]], bool]:
    """Return the check of features against a constraint; all meet one that cannot be read here."""
    if not (simple := _SIMPLE_CONSTRAINT.fullmatch(text)):
        return lambda features: True
    names = set(re.split(r"[|&,]", simple[1]))
    return (lambda features: bool(names & features)) if "|" in text else names.issubset


def _ordered(components: Sequence[ComponentRequest]) -> list[ComponentRequest]:
    """Return the components, scarce ones first, so that Slurm's choice for one leaves enough for the later ones.

    The order is built from its end: the component that has most nodes left after all others have taken theirs comes
    last. Components that share no node, for which any order will do, keep that of the cluster file.
    """
    if not _share_nodes(components):
        return list(components)
    left, from_the_end = list(components), []
    while left:
        last = max(reversed(left), key=lambda component: _margin(component, left))
        left.remove(last)
        from_the_end.append(last)
    return from_the_end[::-1]


def _margin(component: ComponentRequest, others: Sequence[ComponentRequest]) -> int:
    """Return how many nodes a component has more than it needs, if the others take all of its nodes that they can."""
    nodes = component.nodes or frozenset()
    taken = sum(
        min(other.node_type.count, len(nodes & (other.nodes or frozenset())))
        for other in others
        if other is not component
    )
    return len(nodes) - component.node_type.count - taken


def _share_nodes(components: Sequence[ComponentRequest]) -> bool:
    return any(a.nodes and b.nodes and a.nodes & b.nodes for i, a in enumerate(components) for b in components[i + 1 :])


def _why_this_order(components: Sequence[ComponentRequest]) -> list[str]:
    if not _share_nodes(components):
        return []
    return [
        "Slurm places one component after the other, each on nodes of its own; what is scarcest comes first:",
        *(
            f"  {component.node_type.name} needs {component.node_type.count} of the {len(component.nodes or ())} nodes "
            "that could serve it"
            for component in components
        ),
    ]
