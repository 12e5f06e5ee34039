"""One etcd and one object store for all tests of a pytest process; each test has a job, and a URL, of its own in it."""

import itertools
import shutil
from collections.abc import Iterator

import pytest

from tests.helpers.etcd import EtcdServer
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
