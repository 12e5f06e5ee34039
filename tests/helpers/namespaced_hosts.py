"""Hosts in namespaces of this machine, each with a network, a name, mounts and shared memory of its own.

The machine's network is not touched. All processes of all hosts share a PID namespace whose first process lives as long
as the test process at most: the kernel ends them all with it.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.helpers.network_namespaces import entered_network

HEAD = "head"
HEAD_ADDRESS = "10.77.0.1"

_COMMANDS = ("setpriv", "unshare", "nsenter", "script", "ip")
_UNSHARE = ("unshare", "--net", "--mount", "--uts")
# Dies with the thread that starts it, and everything in its PID namespace with it.
_UNSHARE_PROCESSES = (*_UNSHARE, "--pid", "--fork", "--kill-child", "--mount-proc")
_UNSHARE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL", *_UNSHARE_PROCESSES)
# bash, because a first process has to reap orphans.
_WAIT_FOR_EVER = ("bash", "-c", "echo ready; sleep infinity & wait")


def why_no_hosts() -> str:
    """Return what is missing for such hosts here; empty if nothing is."""
    if os.geteuid() != 0:
        return "needs root, for hosts in namespaces"
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        return f"needs {', '.join(missing)}, for hosts in namespaces: apt-get install util-linux iproute2"
    tried = subprocess.run([*_UNSHARE_PROCESSES, "true"], capture_output=True, text=True, check=False)
    return f"needs a kernel that lets root unshare namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamespacedHost:
    """A host: ``host_name`` is what ``hostname`` prints there, ``pid`` a process in its namespaces."""

    host_name: str
    address: str
    pid: int

    def command(self, words: Sequence[str], *, folder: Path | None = None) -> list[str]:
        """Return ``words`` as a command that runs on this host, in ``folder`` or where the test process is."""
        # To enter mounts is to be in their root.
        there = ["env", f"--chdir={folder or Path.cwd()}"]
        return ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--pid", "--", *there, *words]

    def run(self, *words: str) -> str:
        """Return what a command prints on this host.

        Raises:
            RuntimeError: it failed.
        """
        done = subprocess.run(self.command(words), capture_output=True, text=True, check=False, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{self.host_name}: {' '.join(words)}: {done.stderr}")
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and what it starts, on the host's network."""
        with entered_network(Path(f"/proc/{self.pid}/ns/net")):
            yield


class NamespacedHosts:
    """The host ``head`` and others, on one switch at the head. They run until :meth:`stop`.

    Args:
        folder: for their ``/etc/hosts``.
        host_names: by the name that tests have for a host, the name that it has itself.
        hosts_file: returns the ``/etc/hosts`` of a host from its name for tests and the addresses of all host names.
    """

    def __init__(
        self, folder: Path, host_names: Mapping[str, str], hosts_file: Callable[[str, Mapping[str, str]], str]
    ) -> None:
        self._folder = folder
        self.host_names = {HEAD: HEAD, **host_names}
        self._hosts_file = hosts_file
        self._processes: list[subprocess.Popen[str]] = []
        self._hosts: dict[str, NamespacedHost] = {}
        self.addresses = {name: f"10.77.0.{i}" for i, name in enumerate(self.host_names, start=1)}

    @property
    def head(self) -> NamespacedHost:
        return self._hosts[HEAD]

    def __getitem__(self, name: str) -> NamespacedHost:
        return self._hosts[name]

    def start(self) -> None:
        """Make all hosts and connect them."""
        self._unshare(HEAD, _UNSHARE_WITH_PARENT)
        self.head.run(
            "sh", "-ec", f"{self._setup(HEAD)}; ip link add switch type bridge; {_address(HEAD_ADDRESS, 'switch')}"
        )
        for name in list(self.host_names)[1:]:
            self._unshare(name, self.head.command(_UNSHARE))
            # Process 1 is the head's.
            cable = f"ip link add eth0 type veth peer name {self._port(name)} netns 1"
            self[name].run("sh", "-ec", f"{self._setup(name)}; {cable}; {_address(self.addresses[name], 'eth0')}")
            self.head.run("ip", "link", "set", self._port(name), "master", "switch", "up")

    def stop(self) -> None:
        """End all processes of all hosts, also after a start that failed."""
        if HEAD in self._hosts:
            # The kernel ends all others, and only then is this one reaped.
            os.kill(self.head.pid, signal.SIGKILL)
        for process in self._processes:
            if HEAD not in self._hosts:
                process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def cut(self, name: str) -> None:
        """Pull a host's cable: nothing reaches it or comes from it, and no process notices."""
        self.head.run("ip", "link", "set", self._port(name), "down")

    def heal(self, name: str) -> None:
        """Undo :meth:`cut`."""
        self.head.run("ip", "link", "set", self._port(name), "up")

    def _unshare(self, name: str, words: Sequence[str]) -> None:
        with (self._folder / f"{name}.namespaces").open("wb") as errors:
            process = subprocess.Popen(
                [*words, *_WAIT_FOR_EVER], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"no namespaces for host {name}: {Path(errors.name).read_text()}")
        # What changes the PID namespace forks; tests know processes by their numbers outside.
        (child,) = psutil.Process(process.pid).children()
        self._hosts[name] = NamespacedHost(host_name=self.host_names[name], address=self.addresses[name], pid=child.pid)

    def _setup(self, name: str) -> str:
        path, addresses = self._folder / f"{name}.hosts", self.addresses
        path.write_text(self._hosts_file(name, {self.host_names[each]: addresses[each] for each in addresses}))
        mounts = f"mount --bind {path} /etc/hosts; mount -t tmpfs tmpfs /dev/shm"
        return f"{mounts}; hostname {self.host_names[name]}; ip link set lo up"

    def _port(self, name: str) -> str:
        """Return the head's end of a host's cable; names of devices have 15 characters at most."""
        return f"port{list(self.host_names).index(name)}"


def _address(address: str, device: str) -> str:
    return f"ip address add {address}/24 dev {device}; ip link set {device} up"
