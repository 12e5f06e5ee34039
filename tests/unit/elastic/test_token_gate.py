"""Connections without the job's token: what they get, what they may cost, and that peers are served meanwhile."""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from hetero.elastic import token_gate
from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.copy_tls import CopyTls, server_context
from hetero.elastic.node_probe import ProbeAnswer, probe
from hetero.elastic.records import CopyTrust, NodeInfo
from hetero.errors import SourceLostError
from hetero.peer_limits import MAX_HEAD_BYTES
from tests.helpers.certificates import make_certificates
from tests.helpers.elastic import JOB, TOKEN, Nodes, nodes
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 30.0
"""Of sockets of a test; nothing waits for so long unless it fails."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Nodes]:
    """One node without copies."""
    with nodes(tmp_path, "a") as made:
        yield made


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four strangers at once, without a grace, and with a deadline that no test waits for."""
    monkeypatch.setattr(token_gate, "MAX_STRANGERS", 4)
    monkeypatch.setattr(token_gate, "HEAD_WITHIN_S", 2 * PATIENCE_S)
    monkeypatch.setattr(token_gate, "STRANGER_GRACE_S", 0.0)


def connect(info: NodeInfo) -> socket.socket:
    return socket.create_connection((info.host, info.port), timeout=PATIENCE_S)


def read_to_end(connection: socket.socket) -> bytes:
    """All that the server sends until it ends the connection, by a reset too."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            content += data
    return content


def answer(info: NodeInfo, request: bytes) -> bytes:
    with connect(info) as connection:
        connection.sendall(request)
        return read_to_end(connection)


def ask_for_inventory(info: NodeInfo, *, token: str = TOKEN) -> str:
    client = CopyClient(info, job=JOB, token=token)
    try:
        return client.inventory().node
    finally:
        client.close()


PATH = f"/{JOB}/inventory"
SHOWS_TOKEN = f"Host: a\r\nAuthorization: Bearer {TOKEN}\r\n"
MANY_LINES = f"X: {'y' * 95}\r\n" * (MAX_HEAD_BYTES // 100 + 1)
STRANGERS: dict[str, str | bytes] = {
    "no token": f"GET {PATH} HTTP/1.1\r\nHost: a\r\n\r\n",
    "another token": f"GET {PATH} HTTP/1.1\r\nAuthorization: Bearer {TOKEN[:-1]}\r\n\r\n",
    "the token of another scheme": f"GET {PATH} HTTP/1.1\r\nAuthorization: Basic {TOKEN}\r\n\r\n",
    "the token in the second of two headers": f"GET {PATH} HTTP/1.1\r\nAuthorization: no\r\n{SHOWS_TOKEN}\r\n",
    "the token in the body": f"GET {PATH} HTTP/1.1\r\n\r\n{SHOWS_TOKEN}\r\n",
    "the token in the path": f"GET {PATH}?Authorization:%20Bearer%20{TOKEN} HTTP/1.1\r\n\r\n",
    "a header that is no UTF-8": b"GET / HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    "a request that is none": "what is there?\r\n\r\n",
    "nothing but the end of a head": "\r\n\r\n",
    "control characters": b"\x00\x1b[2J\x07\r\n\r\n",
    "another version of HTTP": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another method": f"BREW {PATH} HTTP/1.1\r\n\r\n",
    "a body": f"POST {PATH} HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello",
    "a head that is too long": "GET / HTTP/1.1\r\n" + "X: y\r\n" * MAX_HEAD_BYTES,
    "a line that is too long": "GET /" + "x" * MAX_HEAD_BYTES * 10,
    "a head that is too long, with the token": f"GET {PATH} HTTP/1.1\r\n{MANY_LINES}{SHOWS_TOKEN}\r\n",
}


@pytest.mark.parametrize("case", STRANGERS)
def test_a_stranger_gets_404_and_nothing_more(node: Nodes, caplog: pytest.LogCaptureFixture, case: str) -> None:
    caplog.set_level(logging.DEBUG)
    request = STRANGERS[case]
    with connect(node.info["a"]) as connection:
        connection.sendall(request if isinstance(request, bytes) else request.encode())
        assert connection.recv(65536) == token_gate.NOTHING
    assert ask_for_inventory(node.info["a"]) == "a"
    assert [record for record in caplog.records if record.name != "asyncio" or record.levelno > logging.DEBUG] == []


PEERS_MISTAKES = {
    "a path that is no UTF-8": b"GET /\xff\xfe/inventory HTTP/1.1\r\n",
    "a request that is none": b"what is there?\r\n",
    "a version that is none": f"GET {PATH} HTTP/x\r\n".encode(),
    "an ambiguous length": f"GET {PATH} HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n".encode(),
    "a header without a name": f"GET {PATH} HTTP/1.1\r\n: x\r\n".encode(),
    "another method": f"BREW {PATH} HTTP/1.1\r\n".encode(),
}


@pytest.mark.parametrize("case", PEERS_MISTAKES)
def test_a_mistake_of_a_peer_gets_the_same(node: Nodes, caplog: pytest.LogCaptureFixture, case: str) -> None:
    request = PEERS_MISTAKES[case] + f"{SHOWS_TOKEN}Connection: close\r\n\r\n".encode()
    assert answer(node.info["a"], request) == token_gate.NOTHING
    assert caplog.records == []


def test_a_peer_may_send_a_header_that_is_no_utf8(node: Nodes) -> None:
    request = f"GET {PATH} HTTP/1.1\r\n{SHOWS_TOKEN}Connection: close\r\nX: ".encode() + b"\xff\r\n\r\n"
    assert answer(node.info["a"], request).startswith(b"HTTP/1.1 200 OK\r\n")


def test_each_request_of_a_connection_has_to_show_the_token(node: Nodes) -> None:
    first = f"GET /{JOB}/nothing HTTP/1.1\r\n{SHOWS_TOKEN}\r\n"
    second = f"GET {PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    said = answer(node.info["a"], (first + second).encode())
    assert said.count(b"HTTP/1.1 404 Not Found") == 2
    assert b"200" not in said


def test_a_head_may_come_in_parts(node: Nodes) -> None:
    request = f"GET {PATH} HTTP/1.1\r\n{SHOWS_TOKEN}Connection: close\r\n\r\n".encode()
    with connect(node.info["a"]) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request:
            connection.sendall(bytes([byte]))
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.usefixtures("few")
def test_the_oldest_stranger_makes_room_for_the_next(node: Nodes) -> None:
    info = node.info["a"]
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208  (no path is needed)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(info)) for _ in range(40)]
        for stranger in strangers[:36]:
            assert read_to_end(stranger) == b"", "dropped without a word"
        held = len(os.listdir("/proc/self/fd")) - before - len(strangers)  # noqa: PTH208
        assert held <= 4
        assert ask_for_inventory(info) == "a"


@pytest.mark.usefixtures("few")
def test_strangers_that_have_said_nothing_give_way_first(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at once: who has sent a part of a head has its moment, which is long here."""
    monkeypatch.setattr(token_gate, "STRANGER_GRACE_S", 2 * PATIENCE_S)
    info = node.info["a"]
    with contextlib.ExitStack() as stack:
        speakers = [stack.enter_context(connect(info)) for _ in range(3)]
        for speaker in speakers:
            speaker.sendall(f"GET {PATH} HTTP/1.1\r\nHost: a\r\n".encode())
        assert ask_for_inventory(info) == "a", "the fourth place is free; by now the three have been heard"
        silent = [stack.enter_context(connect(info)) for _ in range(20)]
        for each in silent[:19]:
            assert read_to_end(each) == b""
        for speaker in speakers:
            speaker.sendall(f"Authorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n".encode())
            assert read_to_end(speaker).startswith(b"HTTP/1.1 200 OK\r\n")


def test_peers_are_served_while_strangers_come_without_end(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that speaks gets its moment, so one that has the token shows it before it is dropped."""
    monkeypatch.setattr(token_gate, "MAX_STRANGERS", 16)
    monkeypatch.setattr(token_gate, "STRANGER_GRACE_S", 0.02)
    info, is_over = node.info["a"], threading.Event()

    def besiege() -> None:
        held: list[socket.socket] = []
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((info.host, info.port), timeout=1.0))
                held[-1].sendall(b"GET / HTTP/1.1\r\n")
            time.sleep(0.002)
            if len(held) > 50:
                held.pop(0).close()
        for each in held:
            each.close()

    besieger = threading.Thread(target=besiege)
    besieger.start()
    try:
        assert [ask_for_inventory(info) for _ in range(5)] == ["a"] * 5
        assert asyncio.run(probe(info)) is ProbeAnswer.CONNECTED
    finally:
        is_over.set()
        besieger.join()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_stranger_has_a_deadline(node: Nodes, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(token_gate, "HEAD_WITHIN_S", 0.1)
    assert answer(node.info["a"], said) == b""


def test_a_byte_now_and_then_does_not_put_the_deadline_off(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_gate, "HEAD_WITHIN_S", 0.3)
    with connect(node.info["a"]) as connection, contextlib.suppress(ConnectionError):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            connection.sendall(b"x")
            time.sleep(0.01)
        pytest.fail("it was never dropped")


def test_a_peer_has_no_deadline(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_gate, "HEAD_WITHIN_S", 0.1)
    client = CopyClient(node.info["a"], job=JOB, token=TOKEN)
    try:
        client.inventory()
        connection = client._connection
        assert client.copy(epoch=1, step=1, unit="rank_00000", wait_s=0.5) is None
        assert client._connection is connection
    finally:
        client.close()


def test_one_peer_too_many_is_served_when_another_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.copy_server.max_peers", lambda _: 1)
    with nodes(tmp_path, "a") as node:
        first = CopyClient(node.info["a"], job=JOB, token=TOKEN)
        first.inventory()
        with pytest.raises(SourceLostError, match=r"node a .*does not serve copies"):
            ask_for_inventory(node.info["a"])
        first.close()
        wait_until(lambda: served(node.info["a"]), PATIENCE_S)


def served(info: NodeInfo) -> bool:
    try:
        return ask_for_inventory(info) == "a"
    except SourceLostError:
        return False


def test_an_error_of_the_server_is_logged_and_gets_nothing(
    node: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "no descriptor, as in the test")

    monkeypatch.setattr("hetero.elastic.copy_server.inventory", fail)
    request = f"GET {PATH} HTTP/1.1\r\n{SHOWS_TOKEN}\r\n".encode()
    assert answer(node.info["a"], request) == token_gate.NOTHING
    assert ["no descriptor, as in the test" in str(record.exc_info) for record in caplog.records] == [True]


class ExhaustedListener(socket.socket):
    """A socket that fails to accept some times; the kernel keeps what has connected."""

    failures: ClassVar = [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EMFILE]

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            raise OSError(self.failures.pop(0), "as in the test")
        return super().accept()


def test_a_server_goes_on_when_it_could_not_accept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(token_gate, "_PAUSE_S", 0.01)

    def listening_socket(host: str, port: int) -> socket.socket:
        listener = ExhaustedListener(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, port))
        listener.listen()
        return listener

    monkeypatch.setattr("hetero.elastic.copy_server.listening_socket", listening_socket)
    with nodes(tmp_path, "a") as node:
        assert ask_for_inventory(node.info["a"]) == "a"
    assert ExhaustedListener.failures == []
    assert caplog.records == []


class TestTls:
    @pytest.fixture
    def info(self, tmp_path: Path) -> Iterator[NodeInfo]:
        """A node whose server has TLS."""
        make_certificates(tmp_path / "tls", "ours")
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def start() -> tuple[CopyServer, int]:
            files = tmp_path / "tls"
            pair = CopyTls(certificate=str(files / "ours.pem"), key=str(files / "ours.key"), trust=self.trust(tmp_path))
            server = CopyServer(tmp_path, job=JOB, node="a", token=TOKEN, tls=server_context(pair))
            return server, await server.start("127.0.0.1")

        server, port = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield NodeInfo(
            name="a",
            incarnation="a",
            node_type="cpu",
            num_ranks=1,
            host="127.0.0.1",
            port=port,
            failure_domain="a",
            settings="",
        )
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def trust(self, tmp_path: Path) -> CopyTrust:
        return CopyTrust(file=str(tmp_path / "tls" / "ours.pem"), is_authority=False)

    def ask(self, info: NodeInfo, tmp_path: Path, *, token: str = TOKEN) -> str:
        client = CopyClient(info, job=JOB, token=token, trust=self.trust(tmp_path))
        try:
            return client.inventory().node
        finally:
            client.close()

    def test_who_speaks_no_tls_gets_nothing(
        self, info: NodeInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        said = answer(info, f"GET {PATH} HTTP/1.1\r\n{SHOWS_TOKEN}\r\n".encode())
        assert b"HTTP" not in said
        assert self.ask(info, tmp_path) == "a"
        assert caplog.records == []

    @pytest.mark.usefixtures("few")
    def test_handshakes_that_never_end_are_dropped(self, info: NodeInfo, tmp_path: Path) -> None:
        """The oldest for the next one; no descriptor stays."""
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(connect(info)) for _ in range(20)]
            for stranger in strangers[:16]:
                assert read_to_end(stranger) == b""
            assert self.ask(info, tmp_path) == "a"
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, PATIENCE_S)  # noqa: PTH208

    def test_a_handshake_has_a_deadline(self, info: NodeInfo, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(token_gate, "HEAD_WITHIN_S", 0.1)
        assert answer(info, b"\x16\x03\x01") == b""
