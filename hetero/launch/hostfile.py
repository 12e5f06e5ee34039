"""Reads hostfiles, as DeepSpeed, FlagScale, Open MPI, MPICH and PBS write them.

    worker-1 slots=8                 DeepSpeed, Open MPI; FlagScale adds type=NODE_TYPE
    worker-1 slots=8 max_slots=16    Open MPI
    worker-1:8                       MPICH
    worker-1                         as often as it has slots (PBS), or once

Empty lines count for nothing, and neither does what follows a ``#``.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.launch.hosts import NodeHost, assigned_hosts
from hetero.printable_fields import check_name
from hetero.serialization import near_match, read_text
from hetero.spec.cluster import ClusterSpec

_KEYS = ("slots", "max_slots", "max-slots", "type")
"""Words that a line may have after the host, each with ``=`` and a value."""

_HOST_AND_SLOTS = re.compile(r"([^\s:]+):(\d{1,3})")
"""MPICH's form. Longer numbers are ports, and an IPv6 address has several colons."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostfileLine:
    """A host of a hostfile.

    number: its line, from 1.
    slots: processes that it takes, ``None`` if the file does not say.
    node_type: empty if the file does not say.
    """

    number: int
    host: str
    slots: int | None
    node_type: str


def hosts_of_file(cluster: ClusterSpec, path: Path) -> tuple[NodeHost, ...]:
    """Return the nodes of ``cluster``, in its order, each with a host of the hostfile ``path``.

    Raises:
        ConfigError: the file cannot be read, a line is none of a hostfile, a host has fewer slots than its node has
            devices in the plan, or as :func:`hetero.launch.hosts.assigned_hosts` does.
    """
    where = f"--hostfile {path}"
    lines = _merged(list(_lines(read_text(path), where)))
    if not lines:
        raise ConfigError(f"{where}: it names no host; write one per line, such as 'worker-1 slots=8'")
    _check_types(lines, cluster, where)
    words = [f"{line.node_type}={line.host}" if line.node_type else line.host for line in lines]
    hosts = assigned_hosts(cluster, words, given_by=where)
    _check_slots(hosts, {line.host: line for line in lines}, where)
    return hosts


def _lines(text: str, where: str) -> Iterator[HostfileLine]:
    for number, line in enumerate(text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"), start=1):
        line = line.partition("#")[0].replace("\t", " ")
        check_name(line, what=f"{where}: line {number}")
        words = line.split()
        if not words:
            continue
        if set(words[0]) & set(",="):
            raise ConfigError(f"{where}: line {number}: {words[0]!r} is no host; a line is one 'HOST slots=N'")
        values = {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals or key not in _KEYS or (key != "type" and not value.isdecimal()):
                raise ConfigError(
                    f"{where}: line {number}: unexpected {word!r} after host {words[0]}; a line is 'HOST slots=N'"
                )
            values[key] = value
        parts = _HOST_AND_SLOTS.fullmatch(words[0])
        host, slots = (words[0], values.get("slots")) if parts is None else parts.groups()
        yield HostfileLine(
            number=number,
            host=host,
            slots=None if slots is None else int(slots),
            node_type=values.get("type", ""),
        )


def _merged(lines: Sequence[HostfileLine]) -> list[HostfileLine]:
    """Return one line per host: where all lines are bare names, a host stands there as often as it has slots."""
    counts: dict[str, list[HostfileLine]] = {}
    for line in lines:
        counts.setdefault(line.host, []).append(line)
    if len(counts) == len(lines) or any(line.slots is not None or line.node_type for line in lines):
        return list(lines)
    return [
        HostfileLine(number=same[0].number, host=host, slots=len(same), node_type="") for host, same in counts.items()
    ]


def _check_types(lines: Sequence[HostfileLine], cluster: ClusterSpec, where: str) -> None:
    known = [node_type.name for node_type in cluster.node_types]
    for line in lines:
        if not line.node_type and any(each.node_type for each in lines):
            raise ConfigError(
                f"{where}: line {line.number}: other lines have type=NODE_TYPE; add it, or take theirs out"
            )
        if line.node_type and line.node_type not in known:
            hint = near_match(line.node_type, known) or f" (known: {', '.join(known)})"
            raise ConfigError(
                f"{where}: line {line.number}: type={line.node_type} is no node type of the cluster{hint}; correct it, "
                "or take type= out of all lines, which then count in the order of the cluster file"
            )


def _check_slots(hosts: Sequence[NodeHost], lines: Mapping[str, HostfileLine], where: str) -> None:
    for host in hosts:
        line = lines[host.name]
        if line.slots is not None and line.slots < len(host.ranks):
            raise ConfigError(
                f"{where}: line {line.number}: {host.name} has {line.slots} slots, the plan has {len(host.ranks)} x "
                f"{host.node_type.device} on node {host.node} ({host.node_type.name}); put the hosts in the order of "
                "the cluster file, or plan for as many devices as there are slots"
            )
