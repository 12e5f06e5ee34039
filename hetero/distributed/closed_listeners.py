"""Closes sockets that listen to new connections, while the library that owns them holds on to them.

gloo and torch's store listen until their process ends, and hold a descriptor for every stranger that connects. A filter
of the kernel on the listening socket drops the packets that ask for a connection; the connections that exist are not
concerned. Setting one needs no privilege (``socket(7)``, SO_ATTACH_FILTER).
"""

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

# From linux/socket.h and linux/filter.h; Python's socket module has no names for them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_RETURN_CONSTANT = 0x06

_DESCRIPTORS = Path("/proc/self/fd")


def close_to_newcomers(descriptor: int) -> bool:
    """Have the kernel drop every request for a connection to a listening socket of this process.

    Returns:
        Whether it does: a sandbox may not know such filters.
    """
    # One instruction: keep 0 bytes of the packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, 0), 8)
    with _borrowed(descriptor) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        except OSError:
            return False
    return True


def open_to_newcomers(descriptor: int) -> None:
    """Let a socket that was closed by :func:`close_to_newcomers` take connections again."""
    with _borrowed(descriptor) as listener, contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


@contextlib.contextmanager
def closed_when_connected() -> Iterator[None]:
    """Close the sockets that begin to listen within the block, at its end.

    Around the creation of a process group of gloo: its listening socket serves that group alone, all of whose ranks are
    connected to this one when it has been made. A group that failed is closed as well.
    """
    before = listening_sockets()
    try:
        yield
    finally:
        # With it, gloo connects two ranks at their first message.
        if os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("0", "false", ""):
            for inode, descriptor in listening_sockets().items():
                if inode not in before:
                    close_to_newcomers(descriptor)


def listening_sockets() -> dict[str, int]:
    """Return the TCP sockets of this process that listen: descriptor by inode, which no other socket has."""
    found = {}
    for entry in _DESCRIPTORS.iterdir():
        # Other threads open and close descriptors meanwhile.
        with contextlib.suppress(OSError):
            inode = entry.readlink().name
            if inode.startswith("socket:") and _listens(int(entry.name)):
                found[inode] = int(entry.name)
    return found


def _listens(descriptor: int) -> bool:
    with _borrowed(descriptor) as candidate:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        )


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use a descriptor as a socket, without closing it afterwards."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
