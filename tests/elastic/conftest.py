"""One etcd and object stores for all tests of a pytest process; each test has a job, and a URL, of its own in them."""

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.membership import Membership
from tests.helpers.azurite_server import AzuriteServer, azurite
from tests.helpers.etcd import EtcdServer
from tests.helpers.gcs_double import GcsDouble
from tests.helpers.job_records import node
from tests.helpers.s3_server import S3Server

_JOBS = itertools.count()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    if shutil.which("etcd") is None:
        pytest.fail("these tests need etcd: apt-get install etcd-server")
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def job() -> str:
    """A name that no other test of this process has."""
    return f"test-{next(_JOBS)}"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    try:
        server.wait()
        server.make_bucket("bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def gs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsDouble]:
    server = GcsDouble(tmp_path_factory.mktemp("gs"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def az_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    if azurite() is None:
        pytest.skip("no azurite-blob on the path nor in AZURITE_BLOB: npm install azurite")
    server = AzuriteServer(tmp_path_factory.mktemp("az"))
    try:
        server.start()
        server.make_container("bucket")
        yield server
    finally:
        server.stop()


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The URL that this test has in a store of a kind, with what the environment says of that store."""

    def url(kind: str) -> str:
        if kind == "memory":
            return "memory:///"
        if kind == "file":
            return f"file://{tmp_path}/store"
        for name, value in request.getfixturevalue(f"{kind}_server").environment.items():
            monkeypatch.setenv(name, value)
        return f"{kind}://bucket/{tmp_path.name}"

    return url


@pytest.fixture
def join(etcd: EtcdServer, job: str) -> Iterator[Callable[..., Membership]]:
    """Makes members of a job, with leases of 2 s."""
    members = []

    def make(name: str, *, incarnation: str = "first", address: EtcdAddress = etcd.address) -> Membership:
        member = Membership(address, job, lease_s=2, on_change=lambda: None)
        members.append(member)
        member.start()
        assert member.join(node(name, incarnation))
        return member

    yield make
    for member in members:
        member.close()
