"""Opens sockets that listen, on one address each, and lists all that a run opens.

``LISTENING_SOCKETS`` is the one list: docs/network.md and ``hetero doctor`` show it, tests hold runs against it.
"""

import ipaddress
import socket
from dataclasses import dataclass
from typing import Literal

_BACKLOG = 65_535
"""Connections that the kernel keeps until they are accepted: Linux cuts the number to ``net.core.somaxconn``, 4,096 by
default. A client that finds the queue full tries again after a second, so a burst of strangers has to fit in."""


def is_loopback(host: str) -> bool:
    """Whether a name or an address is one that every machine has for itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int = 0) -> socket.socket:
    """Listen on ``host`` alone, and not on the other addresses of this machine.

    Args:
        host: a name or an address of this machine; of a name, the first address that it has here.
        port: 0 for a free one, which the kernel chooses.

    Raises:
        OSError: the address is none of this machine's, or the port is taken.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except BaseException:
        found.close()
        raise
    return found


ALL_INTERFACES = ("0.0.0.0", "::")
"""Addresses of sockets that take connections to any address of this machine."""

LaunchKind = Literal["plain", "Slurm", "elastic", "tools"]
"""Kinds of runs that open sockets: plain ones under torchrun, those of Slurm, elastic jobs, and measuring ones."""

Reach = Literal["loopback", "one address", "all interfaces", "one user"]
"""Who can connect: processes of this host, who reaches one of its addresses or any, or processes of one user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListeningSocket:
    """A kind of socket that a run opens, as docs/network.md lists it.

    process: what opens it.
    runs: in which it is there.
    reach: who can connect with the defaults.
    address: where it listens, and what chooses another address.
    port: likewise; for a socket in the file system, its path.
    reached_by: who has to reach it.
    power: what whoever connects to it may do.
    firewall: what to let through, and what else helps.
    """

    name: str
    process: str
    runs: tuple[LaunchKind, ...]
    reach: Reach
    address: str
    port: str
    reached_by: str
    power: str
    firewall: str


_AS_AT_TORCHRUN = "as at the store of torchrun"

_RANDOM_PORT = "random, chosen by the kernel for each socket (`net.ipv4.ip_local_port_range`)"

LISTENING_SOCKETS: tuple[ListeningSocket, ...] = (
    ListeningSocket(
        name="store of torchrun",
        process="torchrun of node 0, started by `hetero launch`",
        runs=("plain", "Slurm"),
        reach="one address",
        address="`--master-addr`; by default the host of node 0, loopback for a single host, under Slurm the address "
        "by which Slurm reaches the first node. All, with a warning, where that is not an address of its own host",
        port="drawn at random for each launch, under Slurm by the script when it runs; `--master-port`",
        reached_by="torchrun and ranks of all nodes",
        power="no token is asked for: reads, writes and deletes all keys. So it can end the run, name the addresses to "
        "which ranks connect, and take the place of a rank: **who reaches it while ranks meet owns the run**. Once "
        "all ranks are connected, new connections are dropped",
        firewall="let the nodes of the run through, and no others",
    ),
    ListeningSocket(
        name="store of torchrun, typed by hand",
        process="torchrun of node 0, started without `hetero launch`",
        runs=("plain", "Slurm", "tools"),
        reach="all interfaces",
        address="all, with the static rendezvous, `c10d` and `--standalone` alike",
        port="29500, or `--master-port`; with `--standalone` two random ones",
        reached_by="torchrun and ranks of all nodes",
        power="the same, and stays open; with `c10d` and `--standalone` torchrun unpickles what the store says, which "
        "**runs code**",
        firewall="close the port to all but the nodes of the run, or use the lines of `hetero launch`",
    ),
    ListeningSocket(
        name="store of rank 0",
        process="rank 0, where `srun`, `mpirun` or another launcher without a store has started it",
        runs=("Slurm", "tools"),
        reach="one address",
        address="`MASTER_ADDR`; under `srun` by default the address by which Slurm reaches the node of task 0. All, "
        "with a warning, where that is not an address of its own host",
        port="`MASTER_PORT`; under `srun` by default one of 20000 to 29999, by the numbers of job and step, which "
        "others can guess",
        reached_by="all ranks",
        power=_AS_AT_TORCHRUN,
        firewall="let the nodes of the run through, and no others",
    ),
    ListeningSocket(
        name="store of an epoch",
        process="a process of the agent that leads, in each epoch",
        runs=("elastic",),
        reach="one address",
        address="`--host` of the agent (default: loopback)",
        port=_RANDOM_PORT,
        reached_by="ranks of all nodes",
        power=_AS_AT_TORCHRUN,
        firewall="let the nodes of the job through, and no others",
    ),
    ListeningSocket(
        name="gloo",
        process="each rank, one for each group that it is in, and one more for the world",
        runs=("plain", "Slurm", "elastic", "tools"),
        reach="one address",
        address="that of the interface in `GLOO_SOCKET_IFNAME`; by default loopback where all ranks are on one host, "
        "else the address of the host's name",
        port=_RANDOM_PORT,
        reached_by="ranks of all nodes",
        power="no token is asked for and nothing is encrypted. Who connects before a rank does may take its place: "
        "reads and changes tensors, and sends objects that the other ranks unpickle, which **runs code**. Once a group "
        "is connected, new connections are dropped",
        firewall="let the nodes of the run through to all ports, and no others: a network of the cluster's own",
    ),
    ListeningSocket(
        name="NCCL",
        process="each rank with a GPU, some for each communicator",
        runs=("plain", "Slurm", "elastic", "tools"),
        reach="one address",
        address="that of the interface in `NCCL_SOCKET_IFNAME`; by default loopback where all ranks are on one host, "
        "else what NCCL takes: `ib*` before others, `docker*` and `lo` last",
        port=_RANDOM_PORT,
        reached_by="ranks of all nodes",
        power="nothing is encrypted. Its first messages carry a number that ranks have from the store: who knows it "
        "may take the place of a rank, and read and change tensors. RDMA is guarded by the fabric alone",
        firewall="let the nodes of the run through to all ports, and no others: a network of the cluster's own",
    ),
    ListeningSocket(
        name="NCCL RAS",
        process="the first rank with a GPU on a host, NCCL 2.24 and newer",
        runs=("plain", "Slurm", "elastic", "tools"),
        reach="loopback",
        address="`localhost`; `NCCL_RAS_ADDR`, and `NCCL_RAS_ENABLE=0` for none",
        port="28028; `NCCL_RAS_ADDR`",
        reached_by="`ncclras`, if you use it",
        power="reads the state of the communicators of all ranks: hosts, process numbers, devices",
        firewall="",
    ),
    ListeningSocket(
        name="metrics",
        process="rank 0, with `--hetero-metrics-port`",
        runs=("plain", "Slurm", "elastic"),
        reach="loopback",
        address="loopback; `--hetero-metrics-host`",
        port="`--hetero-metrics-port`",
        reached_by="Prometheus",
        power="reads the figures of the run: loss, speed, memory",
        firewall="with another `--hetero-metrics-host`, let Prometheus through",
    ),
    ListeningSocket(
        name="etcd",
        process="etcd of `hetero elastic store` and `hetero elastic run`",
        runs=("elastic",),
        reach="loopback",
        address="loopback; `--host` of `hetero elastic store`",
        port="2379, or `--port`; of `hetero elastic run` a free one",
        reached_by="all agents, `hetero elastic status`, `leave` and `forget`",
        power="**owns the job**: reads the token of the copies, writes epochs, and names the store to which ranks "
        "connect. With certificates (`--certificates`, `--client-ca`) only who has one of that authority",
        firewall="let the nodes of the job and those who look after it through; certificates on every network that "
        "others share",
    ),
    ListeningSocket(
        name="etcd peers",
        process="etcd, as above",
        runs=("elastic",),
        reach="loopback",
        address="loopback",
        port="`--port` plus one; of `hetero elastic run` a free one",
        reached_by="no other process: the store has one member",
        power="speaks the protocol of etcd's members, and could pose as one; with certificates, only who has one of "
        "that authority",
        firewall="",
    ),
    ListeningSocket(
        name="copies",
        process="each agent",
        runs=("elastic",),
        reach="one address",
        address="`--host` of the agent (default: loopback)",
        port="a free one, or `--port`",
        reached_by="agents and ranks of all nodes",
        power="with the token of the job reads its copies: weights, optimizer state, random state. Without it, gets "
        "404 and nothing more. Writes nothing",
        firewall="let the nodes of the job through; TLS on every network that others share",
    ),
    ListeningSocket(
        name="reports of ranks",
        process="each agent, a Unix socket for datagrams",
        runs=("elastic",),
        reach="one user",
        address="in the file system",
        port="`reports.sock` in the folder of copies, mode 0700",
        reached_by="ranks of this node",
        power="says how ranks are: a false report ends an epoch",
        firewall="",
    ),
    ListeningSocket(
        name="fork server",
        process="the fork server of each agent, a Unix socket",
        runs=("elastic",),
        reach="one user",
        address="in the file system",
        port="`pymp-*/listener-*` in the folder for temporary files (`TMPDIR`), mode 0700",
        reached_by="the agent",
        power="starts processes of this user",
        firewall="",
    ),
    ListeningSocket(
        name="data readers",
        process="each process that reads data (`--num-workers`), a Unix socket",
        runs=("plain", "Slurm", "elastic"),
        reach="one user",
        address="in the file system",
        port="`pymp-*/listener-*` in the folder for temporary files (`TMPDIR`), mode 0700",
        reached_by="its rank",
        power="after a handshake with a key of this process tree, gets descriptors of shared memory",
        firewall="",
    ),
    ListeningSocket(
        name="Weights & Biases",
        process="wandb's own processes, with `--wandb-project`, Unix sockets",
        runs=("plain", "Slurm", "elastic"),
        reach="one user",
        address="in the file system",
        port="`wandb-*/socket` and `wandb_gpu_stats-*.sock` in the folder for temporary files",
        reached_by="rank 0",
        power="writes the figures of the run",
        firewall="",
    ),
    ListeningSocket(
        name="srun",
        process="`srun` on the first node: Slurm's own",
        runs=("Slurm",),
        reach="all interfaces",
        address="all",
        port="random; `SrunPortRange` in slurm.conf",
        reached_by="`slurmctld` and `slurmd` of the nodes of the job",
        power="what Slurm lets a message with a signature of munge, or a step's own key, do",
        firewall="as your Slurm needs it",
    ),
)
"""Every socket that waits for connections, of everything that this project starts.

`tests/e2e/test_listening_sockets.py` holds it against what the kernel lists.
"""
