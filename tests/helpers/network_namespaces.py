"""Hosts that are network namespaces of this machine, on one switch: links are cut, healed and capped as real ones.

Needs root, as everything with namespaces does. What is made here goes with the context manager, whatever happens.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero.units import MIB

_numbers = itertools.count()

_NEW_NETWORK = 0x40000000
"""``CLONE_NEWNET`` of setns(2)."""


def can_make_namespaces() -> bool:
    """Whether this user may, on this machine."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        _run("ip", "netns", "delete", name)
    return made


@dataclass(frozen=True, slots=True)
class Host:
    """One namespace. ``address`` is its own on the switch; port ``name`` of the switch leads to it."""

    name: str
    address: str

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs on this host."""
        return ["ip", "netns", "exec", self.name, *words]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and what it starts, on the host's network."""
        with entered_network(Path("/run/netns", self.name)):
            yield


@dataclass(frozen=True, slots=True)
class Switch:
    """Connects hosts. Lives in a namespace of its own, so that nothing of it is seen from outside."""

    name: str
    hosts: tuple[Host, ...]

    def cut(self, host: Host) -> None:
        """From now on nothing reaches ``host`` or comes from it; nobody is told."""
        _run("ip", "-n", self.name, "link", "set", host.name, "down")

    def heal(self, host: Host) -> None:
        """Undo :meth:`cut`."""
        _run("ip", "-n", self.name, "link", "set", host.name, "up")

    def cap(self, host: Host, *, mib_per_s: float | None) -> None:
        """Let ``host`` send and receive at most so much, in each direction; ``None`` for no limit."""
        for namespace, device in ((self.name, host.name), (host.name, "eth0")):
            if mib_per_s is None:
                _run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root", check=False)
            else:
                words = ["qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{int(mib_per_s * MIB * 8)}bit"]
                _run("tc", "-n", namespace, *words, "burst", "1mb", "latency", "50ms")


@contextmanager
def switched_hosts(num_hosts: int) -> Iterator[Switch]:
    """So many hosts on one switch, with addresses of their own that nobody outside can reach."""
    # Names of devices have 15 characters at most.
    suffix = f"{os.getpid()}-{next(_numbers)}"
    switch = f"s-{suffix}"
    with ExitStack() as made:
        _namespace(switch, made)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        hosts = []
        for i in range(num_hosts):
            host = Host(f"h{i}-{suffix}", f"10.77.0.{i + 1}")
            _namespace(host.name, made)
            _run(
                "ip", "-n", switch, "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", host.name
            )
            _run("ip", "-n", switch, "link", "set", host.name, "master", "switch", "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", host.name, "link", "set", "lo", "up")
            _run("ip", "-n", host.name, "link", "set", "eth0", "up")
            hosts.append(host)
        yield Switch(switch, tuple(hosts))


@contextmanager
def entered_network(namespace: Path) -> Iterator[None]:
    """Have this thread, and what it starts, in a network namespace; Python knows ``os.setns`` from 3.12 on only."""
    with Path("/proc/thread-self/ns/net").open() as own, namespace.open() as other:
        _set_network(other.fileno())
        try:
            yield
        finally:
            _set_network(own.fileno())


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _namespace(name: str, made: ExitStack) -> None:
    _run("ip", "netns", "add", name)
    made.callback(_run, "ip", "netns", "delete", name)


def _run(*words: str, check: bool = True) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr.strip()}"
