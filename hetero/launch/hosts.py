"""Gives every node of a cluster a host, and checks that the hosts are those that a plan needs."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.launch.machine_names import check_names_differ
from hetero.listening import is_loopback
from hetero.serialization import near_match
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.text import numbered

_HOST = re.compile(r"(?:[\w.][\w.-]*@)?[\w.:]([\w.:-]*)")
"""A name or an address, with a user in front of it for ssh. It cannot be taken for an option."""

_HOST_AND_PORT = re.compile(r"[^:]*:(\d+)")
"""An IPv6 address has more than one colon."""

_WORD_OF_HOSTFILE = re.compile(r"(?:^|\s)(?:slots|max[_-]slots)=")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeHost:
    """A node of the cluster and the host that it is.

    node: its number, which is its node rank: nodes are numbered as in the cluster file, and so are the ranks on them.
    ranks: of the plan, one per device.
    """

    name: str
    node: int
    node_type: NodeType
    ranks: range

    @property
    def address(self) -> str:
        """The host without the user that ssh takes."""
        return self.name.rpartition("@")[2]

    @property
    def title(self) -> str:
        """``gpu-3 (node 3, a100)``."""
        return f"{self.name} (node {self.node}, {self.node_type.name})"

    @property
    def devices(self) -> str:
        """``8 x A100-40, ranks 0-7``."""
        return f"{len(self.ranks)} x {self.node_type.device}, {numbered('rank', self.ranks)}"


def assigned_hosts(cluster: ClusterSpec, words: Sequence[str], *, given_by: str = "--hosts") -> tuple[NodeHost, ...]:
    """Return the nodes of ``cluster``, in its order, each with a host of ``words``.

    Args:
        words: ``a,b`` or ``TYPE=a,b``, where TYPE is a node type. Without types, hosts count in the order of the nodes.
        given_by: what messages name, a flag or a file.

    Raises:
        ConfigError: too few or too many hosts, one machine twice by its names, what is no name, or an unknown node
            type.
    """
    assign = _by_type if any("=" in word for word in words) else _in_order
    of_type = assign(cluster, words, given_by)
    names = [name for node_type in cluster.node_types for name in of_type[node_type.name]]
    check_names_differ(list(map(_address, names)), given_by=given_by)
    return tuple(_nodes(cluster, names))


def check_others_reach(address: str, hosts: Sequence[NodeHost]) -> None:
    """Checks that ``address``, where all meet, is not one that every machine has for itself.

    Raises:
        ConfigError: it is, and there are hosts that are not this machine by their names.
    """
    others = [host for host in hosts if not is_loopback(host.address)]
    if is_loopback(address) and others:
        raise ConfigError(
            f"hosts: all meet at node 0, which is {address}; to {others[0].name} that is another machine: name it as "
            "the others know it, or give its address with --master-addr"
        )


def invented_hosts(cluster: ClusterSpec) -> tuple[NodeHost, ...]:
    """The nodes with made-up names: ``localhost`` for a single one, else such as ``a100-0``."""
    if sum(node_type.count for node_type in cluster.node_types) == 1:
        return tuple(_nodes(cluster, ["localhost"]))
    return tuple(_nodes(cluster, [f"{each.name}-{i}" for each in cluster.node_types for i in range(each.count)]))


def nodes_in_words(cluster: ClusterSpec) -> str:
    """``2 x fast (8 A100-40), 1 x slow (4 V100-16)``: the nodes by type, with the devices of each."""
    return ", ".join(f"{each.count} x {each.name} ({each.gpus_per_node} {each.device})" for each in cluster.node_types)


def _nodes(cluster: ClusterSpec, names: Sequence[str]) -> Iterator[NodeHost]:
    types = itertools.chain.from_iterable(itertools.repeat(each, each.count) for each in cluster.node_types)
    first = 0
    for node, (name, node_type) in enumerate(zip(names, types, strict=True)):
        ranks = range(first, first + node_type.gpus_per_node)
        yield NodeHost(name=name, node=node, node_type=node_type, ranks=ranks)
        first = ranks.stop


def _by_type(cluster: ClusterSpec, words: Sequence[str], given_by: str) -> dict[str, list[str]]:
    known = [node_type.name for node_type in cluster.node_types]
    for word in words:
        if _WORD_OF_HOSTFILE.search(word) and word.partition("=")[0] not in known:
            shown = " ".join(word.split())
            raise ConfigError(f"{given_by} {shown}: that is from a hostfile; give the file itself: --hostfile FILE")
    found: dict[str, list[str]] = {name: [] for name in known}
    for word in words:
        name, equals, hosts = word.partition("=")
        if not equals:
            raise ConfigError(f"{given_by} {word}: others have their node type in front; write TYPE={word}")
        if name not in found:
            hint = near_match(name, known) or f" (known: {', '.join(known)})"
            raise ConfigError(f"{given_by} {word}: unknown node type {name!r}{hint}")
        found[name] += _names(word, hosts, given_by)
    for node_type in cluster.node_types:
        given = found[node_type.name]
        if len(given) != node_type.count:
            fix = "name more" if len(given) < node_type.count else "leave some out, or plan for a larger cluster"
            raise ConfigError(
                f"{given_by}: node type {node_type.name!r} has {len(given)} host{'s' * (len(given) != 1)}"
                f"{' (' + ', '.join(given) + ')' if given else ''}, the plan needs {node_type.count}; {fix}"
            )
    return found


def _in_order(cluster: ClusterSpec, words: Sequence[str], given_by: str) -> dict[str, list[str]]:
    names = [name for word in words for name in _names(word, word, given_by)]
    needed = sum(node_type.count for node_type in cluster.node_types)
    if len(names) != needed:
        fix = "name more" if len(names) < needed else "leave some out, or plan for a larger cluster"
        raise ConfigError(
            f"{given_by}: {len(names)} host{'s' * (len(names) != 1)} for a plan that needs {needed}, "
            f"{nodes_in_words(cluster)}; {fix}"
        )
    left = iter(names)
    return {each.name: list(itertools.islice(left, each.count)) for each in cluster.node_types}


def _names(word: str, hosts: str, given_by: str) -> list[str]:
    names = hosts.split(",")
    for name in names:
        if not _HOST.fullmatch(name):
            fix = "write names with commas between them"
            if "[" in name:
                fix = "write out what is in brackets, as 'scontrol show hostnames' does, and addresses without them"
            raise ConfigError(f"{given_by} {word}: {name!r} is no name of a host; {fix}")
        if port := _HOST_AND_PORT.fullmatch(name):
            raise ConfigError(
                f"{given_by} {word}: {name} has a number behind its name; a port of ssh goes into --ssh 'ssh -p "
                f"{port[1]}' or ~/.ssh/config, and numbers of slots into a file for --hostfile"
            )
    return names


def _address(name: str) -> str:
    return name.rpartition("@")[2]
