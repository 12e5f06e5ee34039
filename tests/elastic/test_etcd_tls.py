"""An etcd that is spoken to over TLS, and shows its certificate to those alone who show one."""

import contextlib
import http.server
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.commands.elastic_store import StoreTls, etcd_command
from hetero.elastic.certificate_authority import make_certificates as make_authority
from hetero.elastic.certificate_folder import CertificateFolder
from hetero.elastic.etcd import EtcdAddress, EtcdConnection, wait_until_it_answers
from hetero.elastic.job_store import JobStore
from hetero.elastic.membership import Membership
from hetero.elastic.records import Notice
from hetero.errors import ConfigError, HeteroError, MembershipStoreError
from tests.helpers.certificates import make_certificates, make_expired_certificate
from tests.helpers.etcd import EtcdServer
from tests.helpers.ports import free_ports

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


class TestMadeCertificates:
    """An etcd as ``hetero elastic store --certificates`` and ``hetero elastic run`` start it."""

    @pytest.fixture(scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> CertificateFolder:
        return make_authority(tmp_path_factory.mktemp("made") / "certificates", host="127.0.0.1")

    @pytest.fixture(scope="class")
    def ports(self, made: CertificateFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
        """Ports for clients and for members."""
        with running_etcd(tmp_path_factory.mktemp("data"), made) as ports:
            yield ports

    def test_who_has_the_folder_reads_and_writes(self, made: CertificateFolder, ports: tuple[int, int]) -> None:
        store = JobStore(made.address(f"https://127.0.0.1:{ports[0]}"), "job")
        store.put_notice(Notice(node="a", reason="leave"))
        assert set(store.read().notices) == {"a"}
        store.close()

    def test_nobody_else_reaches_a_port_of_it(
        self, made: CertificateFolder, ports: tuple[int, int], tmp_path: Path
    ) -> None:
        """Neither the one for clients nor that for members, through which its state could be replaced."""
        ca = str(made.authority.certificate)
        other = make_authority(tmp_path / "other", host="127.0.0.1").client
        shown = {"certificate": str(other.certificate), "key": str(other.key)}
        for port in ports:
            url = f"https://127.0.0.1:{port}"
            for address in (EtcdAddress(urls=(url,), ca=ca), EtcdAddress(urls=(url,), ca=ca, **shown)):
                refused(address, r"no TLS with it .*--certificates")
            plain = EtcdAddress(urls=(f"http://127.0.0.1:{port}",))
            refused(plain, r"does not answer .*https:// and --certificates")

    def test_one_for_another_host(self, tmp_path: Path) -> None:
        made = make_authority(tmp_path / "made", host="192.0.2.7")
        names = StoreTls.of_folder(made, host="192.0.2.7")
        with running_etcd(tmp_path / "data", made, tls=names, waits_as="localhost") as (port, _):
            address = made.address(f"https://127.0.0.2:{port}")
            refused(address, r"(?i)mismatch.*; give the name or address that etcd's")

    def test_tls_to_an_etcd_without(self, etcd: EtcdServer, made: CertificateFolder) -> None:
        refused(
            made.address(etcd.url.replace("http:", "https:")), r"no TLS with it .*or http://, if it listens without"
        )

    def test_data_that_were_begun_without_certificates_go_on_with_them(
        self, made: CertificateFolder, tmp_path: Path
    ) -> None:
        with running_etcd(tmp_path, None) as (port, _):
            store = JobStore(EtcdAddress(urls=(f"http://127.0.0.1:{port}",)), "job")
            store.put_notice(Notice(node="a", reason="kept"))
            store.close()
        with running_etcd(tmp_path, made) as (port, _):
            store = JobStore(made.address(f"https://127.0.0.1:{port}"), "job")
            assert store.read().notices["a"].reason == "kept"
            store.close()


def refused(address: EtcdAddress, message: str) -> None:
    """See that nothing can be read at an address, and what is said then."""
    with contextlib.closing(EtcdConnection(address)) as client, pytest.raises(MembershipStoreError, match=message):
        client.read("/")


@contextlib.contextmanager
def running_etcd(
    data: Path, made: CertificateFolder | None, *, tls: StoreTls | None = None, waits_as: str = "127.0.0.1"
) -> Iterator[tuple[int, int]]:
    """Run an etcd with a folder of certificates; yields its ports for clients and for members."""
    if made is not None and tls is None:
        tls = StoreTls.of_folder(made, host="127.0.0.1")
    port, peer_port = free_ports(2)
    # On 127.0.0.2 as well, by which no certificate knows it.
    words = etcd_command(data=data, host="127.0.0.1", port=port, peer_port=peer_port, tls=tls)
    urls = f"https://127.0.0.1:{port},https://127.0.0.2:{port}"
    words = [f"--listen-client-urls={urls}" if "listen-client" in word and tls is not None else word for word in words]
    process = subprocess.Popen([*words, "--unsafe-no-fsync"], stderr=subprocess.DEVNULL)
    try:
        url = f"{'http' if made is None else 'https'}://{waits_as}:{port}"
        address = EtcdAddress(urls=(url,)) if made is None else made.address(url)
        wait_until_it_answers(address, attempts=200, pause=lambda: time.sleep(0.05))
        yield port, peer_port
    finally:
        process.kill()
        process.wait()
