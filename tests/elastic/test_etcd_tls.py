"""An etcd that is spoken to over TLS, and shows its certificate to those alone who show one."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.elastic.etcd import EtcdAddress, EtcdConnection
from hetero.elastic.job_store import JobStore
from hetero.elastic.membership import Membership
from hetero.elastic.records import Notice
from hetero.errors import ConfigError, HeteroError, MembershipStoreError
from tests.helpers.certificates import make_certificates, make_expired_certificate
from tests.helpers.etcd import EtcdServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder, "ours", "theirs")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    made = EtcdServer(tmp_path_factory.mktemp("etcd"), tls=(folder / "ours.pem", folder / "ours.key"))
    made.start()
    yield made
    made.stop()


def test_a_job_over_tls(server: EtcdServer) -> None:
    """Reads, transactions, leases and the watch."""
    changes = iter(EtcdConnection(server.address).changes("/hetero/job/"))
    next(changes)
    member = Membership(server.address, "job", lease_s=2, on_change=lambda: None)
    try:
        member.start()
        token = member.claim_token()
        next(changes)
        JobStore(server.address, "job").put_notice(Notice(node="a", reason="leave"))
        next(changes)
        state = JobStore(server.address, "job").read()
        assert (state.token, set(state.notices)) == (token, {"a"})
    finally:
        member.close()


@pytest.mark.parametrize(
    ("ca", "certificate", "key", "error", "message"),
    # How etcd refuses a client depends on how far that has come.
    [
        ("theirs.pem", "ours.pem", "ours.key", MembershipStoreError, "self.signed certificate.*--etcd-ca"),
        (None, "ours.pem", "ours.key", MembershipStoreError, "self.signed certificate.*--etcd-ca"),
        ("ours.pem", None, None, MembershipStoreError, "no TLS with it .*--etcd-cert, --etcd-key"),
        ("ours.pem", "theirs.pem", "theirs.key", MembershipStoreError, "no TLS with it .*--etcd-cert, --etcd-key"),
        ("none.pem", None, None, ConfigError, "none.pem: no certificate to trust.* No such file.*--etcd-ca"),
        ("ours.key", None, None, ConfigError, "ours.key: no certificate to trust"),
        ("ours.pem", "ours.pem", "theirs.key", ConfigError, "theirs.key: .*none with its key: .*MISMATCH"),
    ],
)
def test_wrong_certificates(
    server: EtcdServer,
    folder: Path,
    ca: str | None,
    certificate: str | None,
    key: str | None,
    error: type[HeteroError],
    message: str,
) -> None:
    files = {name: None if file is None else str(folder / file) for name, file in (("ca", ca), ("key", key))}
    address = EtcdAddress(
        urls=(server.url,), certificate=None if certificate is None else str(folder / certificate), **files
    )
    with pytest.raises(error, match=message):
        EtcdConnection(address).read("/")


def test_an_expired_certificate(tmp_path: Path) -> None:
    """Another file for --etcd-ca would not help."""
    make_expired_certificate(tmp_path, "old")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "old.pem", tmp_path / "old.key")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as listener:
        listener.handle_error = lambda *_: None  # type: ignore[method-assign]  # The client hangs up.
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            address = EtcdAddress(urls=(f"https://127.0.0.1:{listener.server_port}",), ca=str(tmp_path / "old.pem"))
            with pytest.raises(
                MembershipStoreError, match=r"certificate has expired.*; renew the certificate"
            ) as caught:
                EtcdConnection(address).read("/")
            assert "--etcd-ca" not in str(caught.value)
        finally:
            listener.shutdown()
            thread.join()
