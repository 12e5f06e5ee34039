"""The server of copies tells the ranks of its job what they ask for, and nobody anything else."""

import asyncio
import contextlib
import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero.checkpoint.manifest import Shard
from hetero.elastic.certificate_authority import make_certificates as make_authority
from hetero.elastic.copy_client import CopyClient
from hetero.elastic.copy_folder import shard_path, slot_folder, write_copy, write_placement
from hetero.elastic.copy_server import CopyServer
from hetero.elastic.copy_tls import CopyTls, server_context, tls_of_etcd
from hetero.elastic.records import Copy, CopyPlacement, CopyTrust, HeldStep, NodeInfo, Unit
from hetero.errors import CheckpointError, ConfigError
from hetero.listening import listening_socket
from tests.helpers.certificates import make_certificates, make_expired_certificate
from tests.helpers.checkpoints import plan_of, state_of
from tests.helpers.elastic import JOB, TOKEN, Nodes, nodes

CONTENT = bytes(range(256)) * 300
UNIT = "rank_00003"


def copy_of(step: int, *, epoch: int = 4, unit: str = UNIT) -> Copy:
    return Copy(
        epoch=epoch,
        step=step,
        unit=unit,
        shard=Shard(file=f"{unit}.safetensors", size_bytes=len(CONTENT), header_crc32=0, boxes=(), rank=3),
        tensors={},
        state=state_of(plan_of(), step=step),
    )


def fill(folder: Path, *, step: int = 7, epoch: int = 4, slot: int = 1) -> None:
    unit = Unit(name=UNIT, owner=3, keeper=None, held=False, blocks=(), num_bytes=0)
    write_placement(folder, epoch, CopyPlacement(units=(unit,)), epoch_id=f"id{epoch}")
    shard_path(slot_folder(folder, epoch, slot), UNIT).write_bytes(CONTENT)
    write_copy(slot_folder(folder, epoch, slot), copy_of(step, epoch=epoch))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Nodes]:
    """One node with one copy."""
    with nodes(tmp_path, "a") as made:
        fill(made.folder("a"))
        (made.folder("a") / "secret.txt").write_text("secret")
        yield made


@pytest.fixture
def client(node: Nodes) -> Iterator[CopyClient]:
    made = CopyClient(node.info["a"], job=JOB, token=TOKEN)
    yield made
    made.close()


def ask(
    node: Nodes, path: str, *, method: str = "GET", token: str | None = TOKEN, range_: str | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """Status, content and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", node.info["a"].port, timeout=10)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if range_ is not None:
        headers["Range"] = range_
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        # Who belongs to the job may ask again over the same connection.
        found = {name: value for name, value in response.getheaders() if name != "Connection"}
        return response.status, response.read(), found
    finally:
        connection.close()


def test_who_belongs_to_the_job_reads_inventory_descriptions_and_ranges(node: Nodes, client: CopyClient) -> None:
    inventory = client.inventory()
    assert inventory.node == "a"
    assert inventory.steps == (HeldStep(epoch=4, step=7, units=frozenset({UNIT})),)
    assert inventory.units_of_epoch == {4: frozenset({UNIT})}
    copy = client.copy(epoch=4, step=7, unit=UNIT)
    assert copy == copy_of(7)
    file = client.file(copy)
    assert file.size_bytes() == len(CONTENT)
    for start, length in ((0, 8), (100, 70_000), (len(CONTENT) - 1, 1)):
        buffer = bytearray(length)
        file.read_into(memoryview(buffer), start=start)
        assert buffer == CONTENT[start : start + length]


def test_threads_read_over_one_connection(client: CopyClient) -> None:
    """Each gets the bytes that it has asked for, as ranks do that read several files of a node side by side."""
    copy = client.copy(epoch=4, step=7, unit=UNIT)
    assert copy is not None
    file = client.file(copy)

    def read(start: int) -> bool:
        buffer = bytearray(1000)
        file.read_into(memoryview(buffer), start=start)
        return buffer == CONTENT[start : start + 1000]

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(0, len(CONTENT) - 1000, 377)))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("headers", [f"Content-Length: {10**12}", "Transfer-Encoding: chunked", "Connection: close"])
def test_a_node_that_sends_more_than_was_asked_for_is_not_read_to_its_end(headers: str) -> None:
    """Who answers is whom the membership store names; all of it was kept in memory."""
    with listening_socket("127.0.0.1") as listener:
        info = NodeInfo(
            name="x",
            incarnation="1",
            node_type="cpu",
            num_ranks=1,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            failure_domain="x",
            settings="",
        )
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-7/76800\r\n{headers}\r\n\r\n".encode()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(2**16)
                connection.sendall(head)
                while True:
                    connection.sendall(b"8\r\n01234567\r\n" * 1000)

        server = threading.Thread(target=serve)
        server.start()
        client = CopyClient(info, job=JOB, token=TOKEN)
        try:
            with pytest.raises(CheckpointError, match=r"node x .*: it has no bytes 0 to 8 of files/4/7/rank_00003"):
                client.read_range(f"files/4/7/{UNIT}", memoryview(bytearray(8)), start=0)
        finally:
            client.close()
            server.join()


def test_a_copy_is_waited_for(node: Nodes, client: CopyClient) -> None:
    assert client.copy(epoch=4, step=8, unit=UNIT, wait_s=0.05) is None
    loop = asyncio.new_event_loop()
    waiting = loop.run_in_executor(None, lambda: client.copy(epoch=4, step=8, unit=UNIT, wait_s=20.0))
    fill(node.folder("a"), step=8, slot=0)
    assert loop.run_until_complete(waiting) == copy_of(8)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


FILE = f"/{JOB}/files/4/7/{UNIT}"
REFUSED = {
    "no token": (f"/{JOB}/inventory", {"token": None}),
    "another token": (f"/{JOB}/inventory", {"token": TOKEN[:-1]}),
    "an expired token, of the run before": (f"/{JOB}/copies/4/7/{UNIT}", {"token": "a token of another run"}),
    "another job": ("/other/inventory", {}),
    "nothing": ("/", {}),
    "another epoch": (f"/{JOB}/copies/5/7/{UNIT}", {}),
    "another step": (f"/{JOB}/copies/4/6/{UNIT}", {}),
    "another unit": (f"/{JOB}/copies/4/7/rank_00004", {}),
    "a path out of the folder": (f"/{JOB}/files/4/7/..%2f..%2f..%2fsecret.txt", {"range_": "bytes=0-1"}),
    "the same, plain": (f"/{JOB}/files/4/7/../../../secret.txt", {"range_": "bytes=0-1"}),
    "a file of the folder that is no unit": (f"/{JOB}/files/4/7/placement.json", {"range_": "bytes=0-1"}),
    "a whole file": (FILE, {}),
    "a range beyond the end": (FILE, {"range_": f"bytes=0-{len(CONTENT)}"}),
    "a range that ends before it begins": (FILE, {"range_": "bytes=5-4"}),
    "an open range": (FILE, {"range_": "bytes=5-"}),
    "several ranges": (FILE, {"range_": "bytes=0-1,3-4"}),
    "a range of other units": (FILE, {"range_": "items=0-1"}),
    "a wait that is no time": (f"/{JOB}/copies/4/8/{UNIT}?wait=soon", {}),
    "a wait that is no number": (f"/{JOB}/copies/4/8/{UNIT}?wait=nan", {}),
    "a put": (FILE, {"method": "PUT"}),
    "a delete": (FILE, {"method": "DELETE"}),
    "a post": (f"/{JOB}/inventory", {"method": "POST"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_everything_else_gets_one_and_the_same_answer(node: Nodes, case: str) -> None:
    path, options = REFUSED[case]
    nothing = ask(node, "/nothing/of/the/kind")
    assert nothing[:2] == (404, b"")
    assert nothing[2] == {"Content-Length": "0"}
    assert ask(node, path, **options) == nothing


@pytest.mark.parametrize(("job", "token"), [(JOB, "a token of another run"), ("other", TOKEN)])
def test_a_reader_of_another_run_is_told_what_to_do(node: Nodes, job: str, token: str) -> None:
    stranger = CopyClient(node.info["a"], job=job, token=token)
    try:
        with pytest.raises(
            CheckpointError, match=r"node a .*: it does not serve job .*; end its agent, .* start it"
        ) as e:
            stranger.inventory()
        assert token not in str(e.value)
        assert stranger.copy(epoch=4, step=7, unit=UNIT) is None, "to a rank it is as if it had nothing"
    finally:
        stranger.close()


def test_nobody_writes(node: Nodes) -> None:
    before = {path: path.read_bytes() for path in node.folder("a").rglob("*") if path.is_file()}
    for method in ("PUT", "POST", "DELETE", "PATCH"):
        assert ask(node, FILE, method=method)[0] == 404
    assert {path: path.read_bytes() for path in node.folder("a").rglob("*") if path.is_file()} == before


def test_a_stranger_is_refused_before_any_file_is_looked_for(node: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it takes as long whether a copy is there or not; the token is compared in constant time."""
    monkeypatch.setattr(CopyServer, "_find", lambda *_: pytest.fail("looked"))
    monkeypatch.setattr("hetero.elastic.copy_server.inventory", lambda *_, **__: pytest.fail("looked"))
    for path in (f"/{JOB}/inventory", f"/{JOB}/copies/4/7/{UNIT}", FILE):
        assert ask(node, path, token="wrong", range_="bytes=0-1")[0] == 404


def test_it_listens_on_the_address_that_it_is_told_alone(node: Nodes) -> None:
    sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port = f"{node.info['a'].port:04X}"
    listening = [local for _, local, _, state, *_ in sockets if state == "0A" and local.endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]


def test_an_address_of_somebody_else_is_refused(tmp_path: Path) -> None:
    server = CopyServer(tmp_path, job=JOB, node="a", token=TOKEN)
    with pytest.raises(ConfigError, match=r"cannot be served on 192\.0\.2\.1 port 0: .*name an address of this host"):
        asyncio.run(server.start("192.0.2.1"))


def test_a_node_that_is_not_there_is_named() -> None:
    node = NodeInfo(
        name="b",
        incarnation="b",
        node_type="cpu",
        num_ranks=1,
        host="127.0.0.1",
        port=1,
        failure_domain="b",
        settings="",
    )
    with pytest.raises(CheckpointError, match=r"node b \(127\.0\.0\.1:1\): does not serve copies"):
        CopyClient(node, job=JOB, token=TOKEN).inventory()


def test_a_file_that_became_shorter_is_no_copy(node: Nodes, client: CopyClient) -> None:
    shard_path(slot_folder(node.folder("a"), 4, 1), UNIT).write_bytes(CONTENT[:100])
    file = client.file(copy_of(7))
    with pytest.raises(CheckpointError, match="it has no bytes 0 to 65536"):
        file.size_bytes()
    assert client.inventory().node == "a", "the next question is answered"


class TestTls:
    @pytest.fixture
    def certificates(self, tmp_path: Path) -> Path:
        folder = tmp_path / "tls"
        make_certificates(folder, "ours", "theirs")
        return folder

    def copy_over_tls(self, folder: Path, tls: CopyTls, trust: CopyTrust | None) -> None:
        """Read a copy from a server with ``tls`` as a client with ``trust``."""
        fill(folder / "copies")

        async def talk() -> None:
            server = CopyServer(folder / "copies", job=JOB, node="a", token=TOKEN, tls=server_context(tls))
            port = await server.start("127.0.0.1")
            info = NodeInfo(
                name="a",
                incarnation="a",
                node_type="cpu",
                num_ranks=1,
                host="127.0.0.1",
                port=port,
                failure_domain="a",
                settings="",
            )
            client = CopyClient(info, job=JOB, token=TOKEN, trust=trust)
            try:
                found = await asyncio.to_thread(client.copy, epoch=4, step=7, unit=UNIT)
                assert found is not None
                file = client.file(found)
                assert await asyncio.to_thread(file.size_bytes) == len(CONTENT)
                for start, length in ((0, len(CONTENT)), (100, 70_000), (len(CONTENT) - 1, 1)):
                    buffer = bytearray(length)
                    await asyncio.to_thread(file.read_into, memoryview(buffer), start=start)
                    assert buffer == CONTENT[start : start + length]
            finally:
                client.close()
                await server.stop()

        asyncio.run(talk())

    def pinned(self, certificates: Path, name: str = "ours") -> CopyTls:
        trust = CopyTrust(file=str(certificates / f"{name}.pem"), is_authority=False)
        return CopyTls(certificate=trust.file, key=str(certificates / f"{name}.key"), trust=trust)

    def test_the_certificate_of_the_job_is_trusted(self, tmp_path: Path, certificates: Path) -> None:
        tls = self.pinned(certificates)
        self.copy_over_tls(tmp_path, tls, tls.trust)

    def test_so_is_one_that_etcds_authority_has_signed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ranges that are longer than what is encrypted at once arrive whole."""
        monkeypatch.setattr("hetero.elastic.copy_server._TLS_CHUNK_BYTES", 1000)
        made = make_authority(tmp_path / "made", host="127.0.0.1")
        tls = tls_of_etcd(made.address("https://127.0.0.1:1"))
        assert tls is not None
        self.copy_over_tls(tmp_path, tls, tls.trust)

    def test_it_is_trusted_beyond_its_last_day(self, tmp_path: Path) -> None:
        """A run that outlives it would lose all copies at the next loss of a node."""
        (tmp_path / "old").mkdir()
        make_expired_certificate(tmp_path / "old", "ours")
        tls = self.pinned(tmp_path / "old")
        self.copy_over_tls(tmp_path, tls, tls.trust)

    def test_no_other(self, tmp_path: Path, certificates: Path) -> None:
        for trust in (self.pinned(certificates, "theirs").trust, None):
            with pytest.raises(CheckpointError, match="does not serve copies"):
                self.copy_over_tls(tmp_path, self.pinned(certificates), trust)
