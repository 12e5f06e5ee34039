"""Opens sockets that listen, on one address each, and tells which addresses no other host reaches."""

import ipaddress
import socket

_BACKLOG = 1024
"""Connections that the kernel keeps until they are taken; Linux cuts it to ``net.core.somaxconn``."""


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
