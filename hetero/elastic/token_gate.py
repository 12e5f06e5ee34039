"""Accepts connections, and lets those through that show the job's token: a stranger costs little, and not for long.

Strangers reach no HTTP parser: the gate reads a head up to its limits, looks for the token, and hands transport and
head to the server's own protocol, or answers 404 and nothing more. However many connect, the gate keeps
:data:`hetero.peer_limits.MAX_STRANGERS` of them, and each for :data:`hetero.peer_limits.HEAD_WITHIN_S` at most.
"""

import asyncio
import contextlib
import enum
import hmac
import socket
import ssl
from collections.abc import Callable

from hetero.peer_limits import HEAD_WITHIN_S, MAX_HEAD_BYTES, MAX_STRANGERS, STRANGER_GRACE_S

NOTHING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
"""The answer to whoever does not show the token, whatever was asked."""

_ACCEPTS_PER_TURN = 32
"""Connections accepted between two looks of the event loop at all else."""

_PAUSE_S = 0.1
"""Without accepting, after the kernel has refused a descriptor or memory."""

_END_OF_HEAD = b"\r\n\r\n"


class TokenGate:
    """Takes the connections of one listening socket.

    Args:
        listener: the gate closes it.
        authorization: value of the header that shows the token.
        admit: makes the protocol that serves a peer from its first request on; ``None`` if there are too many peers.
        tls: with the server's certificate and key; ``None`` for a server without encryption.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        authorization: bytes,
        admit: Callable[[], asyncio.Protocol | None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._authorization = authorization
        self._admit = admit
        self._tls = tls
        self._strangers: dict[_Stranger, None] = {}
        self._loop = asyncio.get_running_loop()
        self._resume: asyncio.TimerHandle | None = None
        listener.setblocking(False)

    def open(self) -> None:
        """Accept connections from now on."""
        self._resume = None
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept no more, and drop all strangers."""
        self._loop.remove_reader(self._listener)
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        self._listener.close()
        for stranger in list(self._strangers):
            stranger.drop()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            leaves = self._next_to_leave()
            # What has come has to be looked at first; the kernel keeps those who wait.
            if leaves is not None and leaves.progress is _Progress.ARRIVING:
                wait_s = leaves.came_s + STRANGER_GRACE_S - self._loop.time()
                if wait_s > 0:
                    self._pause(wait_s)
                    return
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor or no memory is left, or the connection has ended before it was accepted.
                if self._strangers:
                    next(iter(self._strangers)).drop()
                self._pause(_PAUSE_S)
                return
            if leaves is not None:
                leaves.drop()
            connection.setblocking(False)
            self._strangers[_Stranger(connection, self)] = None

    def _next_to_leave(self) -> "_Stranger | None":
        """Return who makes room for one more; ``None`` while there is room.

        It is the oldest that has sent nothing, else the oldest that has sent a part of a head: a peer sends it whole.
        """
        if len(self._strangers) < MAX_STRANGERS:
            return None
        return min(self._strangers, key=lambda stranger: stranger.progress)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(seconds, self.open)

    def forget(self, stranger: "_Stranger") -> None:
        """Count a connection no more: it is gone, or a peer's. Who waits for its place need not wait longer."""
        self._strangers.pop(stranger, None)
        if self._resume is not None:
            self._resume.cancel()
            self.open()

    def is_peer(self, head: bytes) -> bool:
        """Whether a head shows the token; compared in constant time."""
        return hmac.compare_digest(_shown(head), self._authorization)

    def admit(self) -> asyncio.Protocol | None:
        """Return what serves a peer; ``None`` for one too many."""
        return self._admit()

    async def connect(self, stranger: "_Stranger", connection: socket.socket) -> None:
        """Make a transport, after the handshake if there is TLS."""
        # What fails with an OSError speaks no TLS, trusts another certificate, or is gone.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(lambda: stranger, connection, ssl=self._tls)


class _Progress(enum.IntEnum):
    """How far the head of a stranger has come, in the order in which strangers make room.

    SILENT: no byte has come.
    INCOMPLETE: a part has been read; or it was refused, and its answer is on its way.
    ARRIVING: bytes had come when it was accepted, and have not been read yet. Under TLS, a handshake may go on.
    """

    SILENT = 0
    INCOMPLETE = 1
    ARRIVING = 2


class _Stranger(asyncio.Protocol):
    """A connection that has not shown the token.

    came_s: when it was accepted, on the loop's clock.
    progress: how far its head has come.
    """

    def __init__(self, connection: socket.socket, gate: TokenGate) -> None:
        loop = asyncio.get_running_loop()
        self.came_s = loop.time()
        self.progress = _Progress.ARRIVING if _has_bytes(connection) else _Progress.SILENT
        self._connection = connection
        self._gate = gate
        self._transport: asyncio.Transport | None = None
        self._head = bytearray()
        self._is_refused = False
        self._deadline = loop.call_later(HEAD_WITHIN_S, self.drop)
        self._connecting = loop.create_task(gate.connect(self, connection))
        self._connecting.add_done_callback(self._close_without_transport)

    def drop(self) -> None:
        """End the connection, however far it has come."""
        self._leave()
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _close_without_transport(self, _: object) -> None:
        # A handshake that was cut off has left its transport to asyncio by now, which has given the descriptor up.
        if self._transport is None:
            self._leave()
            self._connection.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; called after the handshake if there is TLS."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read on until the head has ended, and decide who that is."""
        self.progress = _Progress.INCOMPLETE
        if self._is_refused:
            return
        self._head += data
        end = self._head.find(_END_OF_HEAD)
        if end < 0 and len(self._head) <= MAX_HEAD_BYTES:
            return
        if not (0 <= end <= MAX_HEAD_BYTES and self._gate.is_peer(bytes(self._head[:end]))):
            self._refuse()
        elif (protocol := self._gate.admit()) is not None:
            self._hand_over(protocol)
        else:
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        """Give the place up."""
        self._leave()

    def _refuse(self) -> None:
        assert self._transport is not None
        self._is_refused = True
        self._head.clear()
        self._transport.write(NOTHING)
        # What is still on its way is read and dropped until the deadline: closed with bytes unread, the kernel would
        # reset the connection, and the answer be lost.
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _hand_over(self, protocol: asyncio.Protocol) -> None:
        assert self._transport is not None
        self._leave()
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(bytes(self._head))

    def _leave(self) -> None:
        self._deadline.cancel()
        self._gate.forget(self)


def _has_bytes(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def _shown(head: bytes) -> bytes:
    """Return the value of the first authorization header."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"authorization":
            return value.strip()
    return b""
