"""Ports of this machine that nobody uses."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_held: list[IO[str]] = []
"""Locks of the ports that this process was given; the kernel releases them when it ends."""


def free_ports(count: int) -> list[int]:
    """So many different ones that are free on loopback, and that no other process gets from here while this one lives.

    They are below those that the kernel gives to outgoing connections and to whoever asks for any port: a server that
    is started a second later, or once more, still finds them free.
    """
    first_ephemeral = int(_EPHEMERAL.read_text().split()[0])
    candidates = list(range(first_ephemeral // 2, first_ephemeral))
    random.Random(os.urandom(8)).shuffle(candidates)
    ports: list[int] = []
    for port in candidates:
        if len(ports) == count:
            break
        if _is_locked_now(port) and _is_free(port):
            ports.append(port)
    return ports


def _is_locked_now(port: int) -> bool:
    """Whether this process has locked the port, which nobody had."""
    folder = Path(tempfile.gettempdir()) / f"test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    lock = (folder / str(port)).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return False
    _held.append(lock)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
