"""Reads the copies of another node from its server, straight into the memory where they are wanted."""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import TypeVar

from hetero.elastic.copy_tls import client_context
from hetero.elastic.records import Copy, CopyTrust, Inventory, NodeInfo
from hetero.errors import CheckpointError, ConfigError, SourceLostError
from hetero.peer_limits import MAX_ANSWER_BYTES
from hetero.serialization import from_json

T = TypeVar("T")

_SILENCE_S = 10.0
"""After which a node that does not answer is given up."""

_RETRY_PAUSES_S = (0.1, 0.2, 0.4)
"""Before each other try of a request whose connection the server has ended without an answer."""

_MAX_DIGITS = 18
_PREFIX_BYTES = 2**16
"""Bytes of a file that come with the question how long it is: most headers."""


class CopyClient:
    """A connection to one node's server of copies, over which threads ask one after the other.

    Args:
        trust: certificates that the server may show; ``None`` without TLS.
    """

    def __init__(self, node: NodeInfo, *, job: str, token: str, trust: CopyTrust | None = None) -> None:
        self._node = node
        self._job = job
        self._token = token
        self._trust = trust
        self._connection: http.client.HTTPConnection | None = None
        self._in_use = threading.Lock()
        self._is_interrupted = False

    @property
    def where(self) -> str:
        """Names the node for messages."""
        return f"node {self._node.name} ({self._node.host}:{self._node.port})"

    def copy(self, *, epoch: int, step: int, unit: str, wait_s: float = 0.0) -> Copy | None:
        """What the node has of a unit after a step, ``None`` if it has not by ``wait_s`` seconds.

        Raises:
            CheckpointError: the node cannot be reached, or answers with something else.
        """
        return self._json(Copy, f"copies/{epoch}/{step}/{unit}?wait={wait_s:g}", silence_s=_SILENCE_S + wait_s)

    def inventory(self) -> Inventory:
        """What the node has.

        Raises:
            CheckpointError: the node cannot be reached, or does not know this job.
        """
        found = self._json(Inventory, "inventory", silence_s=_SILENCE_S)
        if found is None:
            raise CheckpointError(
                f"{self.where}: it does not serve job {self._job} to the token of this run; end its agent, which is of "
                "another run or of the time before etcd lost its data, and start it again"
            )
        return found

    def file(self, copy: Copy) -> "PeerShardFile":
        """The file of a copy that the node has."""
        return PeerShardFile(self, copy)

    def read_range(self, path: str, buffer: memoryview, *, start: int) -> int:
        """Fill ``buffer`` from ``start`` of what ``path`` names, and return how many bytes that has in all.

        Raises:
            CheckpointError: it has not so many, or the node cannot be reached.
        """
        with self._in_use:
            return self._read_range(path, buffer, start=start)

    def _read_range(self, path: str, buffer: memoryview, *, start: int) -> int:
        response = self._ask(path, {"Range": f"bytes={start}-{start + len(buffer) - 1}"}, silence_s=_SILENCE_S)
        _, _, total = response.headers.get("Content-Range", "").partition("/")
        # What is longer than was asked for would be read to its end, and the total of a file has no more digits.
        is_range = response.status == http.HTTPStatus.PARTIAL_CONTENT and response.length == len(buffer)
        if not is_range or not total.isdecimal() or len(total) > _MAX_DIGITS:
            self._drop()
            raise CheckpointError(f"{self.where}: it has no bytes {start} to {start + len(buffer)} of {path}")
        done = 0
        try:
            while done < len(buffer):
                if not (read := response.readinto(buffer[done:])):
                    raise ConnectionError("the answer ended early")
                done += read
            response.read()
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise self._lost(error) from None
        return int(total)

    def interrupt(self) -> None:
        """From another thread: let whoever waits for an answer hear that there will be none."""
        self._is_interrupted = True
        connection = self._connection
        if connection is not None and (sock := connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._drop()

    def _json(self, cls: type[T], path: str, *, silence_s: float) -> T | None:
        with self._in_use:
            response = self._ask(path, {}, silence_s=silence_s)
            try:
                text = response.read(MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                raise self._lost(error) from None
        if response.status != http.HTTPStatus.OK:
            return None
        try:
            return from_json(cls, text.decode(), source=f"{self.where}: {path}")
        except (ConfigError, UnicodeDecodeError) as error:
            with self._in_use:
                self._drop()
            raise CheckpointError(f"{self.where}: an answer that is none: {error}") from None

    def _ask(self, path: str, headers: Mapping[str, str], *, silence_s: float) -> http.client.HTTPResponse:
        """Send a request and read the head of its answer.

        A server ends a connection that has been idle for long, and one that is too many while strangers besiege it:
        other tries go over fresh ones.
        """
        self._is_interrupted = False
        pauses_s = [0.0] * (self._connection is not None) + [*_RETRY_PAUSES_S]
        while True:
            try:
                connection = self._connected(silence_s)
                connection.request(
                    "GET", f"/{self._job}/{path}", headers={"Authorization": f"Bearer {self._token}", **headers}
                )
                return connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                if not pauses_s or self._is_interrupted or not _may_pass(error):
                    raise self._lost(error) from None
            time.sleep(pauses_s.pop(0))

    def _connected(self, silence_s: float) -> http.client.HTTPConnection:
        # The last answer may have said that it is the last.
        if self._connection is None or self._connection.sock is None:
            host, port = self._node.host, self._node.port
            if self._trust is None:
                self._connection = http.client.HTTPConnection(host, port, timeout=silence_s)
            else:
                context = client_context(self._trust)
                self._connection = http.client.HTTPSConnection(host, port, timeout=silence_s, context=context)
            self._connection.connect()
            self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sock.settimeout(silence_s)
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _lost(self, error: Exception) -> SourceLostError:
        return SourceLostError(f"{self.where}: does not serve copies: {error or type(error).__name__}; is it there?")


class PeerShardFile:
    """A shard file that another node serves."""

    def __init__(self, client: CopyClient, copy: Copy) -> None:
        self._client = client
        self._path = f"files/{copy.epoch}/{copy.step}/{copy.unit}"
        self._expected_bytes = copy.shard.size_bytes
        self._prefix = memoryview(b"")

    @property
    def where(self) -> str:
        """Names node, epoch, step and unit."""
        return f"{self._client.where}, {self._path}"

    def size_bytes(self) -> int:
        """Tell how long it is.

        Raises:
            CheckpointError: it is shorter than it was announced, or cannot be reached.
        """
        prefix = memoryview(bytearray(min(_PREFIX_BYTES, self._expected_bytes)))
        total = self._client.read_range(self._path, prefix, start=0)
        self._prefix = prefix
        return total

    def read_into(self, buffer: memoryview, *, start: int) -> None:
        """Fill ``buffer`` with the bytes of the file from ``start`` on.

        Raises:
            CheckpointError: it ends before, or cannot be reached.
        """
        if not len(buffer):
            return
        if start + len(buffer) <= len(self._prefix):
            buffer[:] = self._prefix[start : start + len(buffer)]
            return
        self._client.read_range(self._path, buffer, start=start)


def _may_pass(error: Exception) -> bool:
    """Whether the server has ended the connection; one that is not there, or stays silent, is lost."""
    is_end = isinstance(error, ConnectionError | ssl.SSLEOFError)
    return is_end and not isinstance(error, ConnectionRefusedError)
