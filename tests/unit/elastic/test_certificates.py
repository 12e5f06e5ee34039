"""Folders of certificates: private, made once, and trusted by those alone who have them."""

import dataclasses
import itertools
import os
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509

from hetero.elastic.certificate_authority import make_certificates
from hetero.elastic.certificate_folder import CertificateFolder, CertificatePair
from hetero.elastic.copy_tls import CopyTls, client_context, server_context, tls_of_etcd
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.job_settings import COPIES_TRAVEL, check_settings
from hetero.elastic.records import CopyTransport, CopyTrust, JobSettings
from hetero.errors import CheckpointError, ConfigError
from tests.helpers import certificates as self_signed

URL = "https://127.0.0.1:1"


def certificate_of(pair: CertificatePair) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pair.certificate.read_bytes())


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_nobody_else_reads_what_is_made(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = make_certificates(tmp_path / "made", host="127.0.0.1")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}
    names = ("ca", "client", "server-127.0.0.1")
    assert files == {f"{name}.{kind}": 0o600 for name in names for kind in ("pem", "key")}


def test_a_later_start_signs_for_its_host_and_keeps_what_clients_have(tmp_path: Path) -> None:
    first = make_certificates(tmp_path, host="127.0.0.1")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir() if not path.name.startswith("server-")}
    second = make_certificates(tmp_path, host="192.0.2.7")
    assert {path: path.read_bytes() for path in kept} == kept
    for folder, host in ((first, "127.0.0.1"), (second, "192.0.2.7")):
        certificate = certificate_of(folder.server(host))
        certificate.verify_directly_issued_by(certificate_of(folder.authority))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert host in map(str, names.get_values_for_type(x509.IPAddress))
        assert "localhost" in names.get_values_for_type(x509.DNSName)


def test_two_starts_at_once_make_one_authority(tmp_path: Path) -> None:
    path = tmp_path / "made"
    path.mkdir(mode=0o700)
    hosts = [f"192.0.2.{number}" for number in range(4)]
    threads = [threading.Thread(target=make_certificates, args=(path,), kwargs={"host": host}) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    folder = CertificateFolder(path)
    authority = certificate_of(folder.authority)
    for pair in (folder.client, *map(folder.server, hosts)):
        certificate_of(pair).verify_directly_issued_by(authority)


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o710, 0o770])
def test_a_folder_that_others_may_read_is_refused_by_who_makes_and_who_uses_it(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "made"
    folder = make_certificates(path, host="127.0.0.1")
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{path}: has mode {mode:04o}, so that other users.*chmod 700 {path}"):
        folder.address(URL)
    with pytest.raises(ConfigError, match=f"has mode {mode:04o}"):
        make_certificates(path, host="127.0.0.1")


def test_a_folder_with_other_files_is_not_made_private_by_the_way(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="has mode 0755"):
        make_certificates(tmp_path, host="127.0.0.1")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: No such file or directory; name the folder that hetero elastic store"):
        CertificateFolder(tmp_path / "none").address(URL)
    made = make_certificates(tmp_path / "made", host="127.0.0.1")
    (tmp_path / "link").symlink_to(made.path)
    with pytest.raises(ConfigError, match="is a link or a file; name a folder"):
        CertificateFolder(tmp_path / "link").address(URL)
    made.client.key.unlink()
    with pytest.raises(ConfigError, match=r"has no client\.key; .*copies of its ca\.pem, client\.pem and client\.key"):
        made.address(URL)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "made", host="127.0.0.1")
    os.chown(made.path, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to another user \(uid 12345\)"):
        made.address(URL)


def test_a_copy_for_clients_signs_nothing(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path, host="127.0.0.1")
    folder.authority.key.unlink()
    assert folder.address(URL).ca == str(folder.authority.certificate)
    with pytest.raises(ConfigError, match=r"ca\.key: is missing, without which no certificate can be signed"):
        make_certificates(tmp_path, host="127.0.0.1")


def test_damaged_and_expired_authorities_are_named(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "made", host="127.0.0.1")
    folder.authority.certificate.write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca\.pem and .*ca\.key: no authority with its key"):
        make_certificates(folder.path, host="127.0.0.1")
    old = tmp_path / "old"
    old.mkdir(mode=0o700)
    self_signed.make_expired_certificate(old, "ca")
    with pytest.raises(ConfigError, match=r"ca\.pem: has expired on 2020-01-02; give --certificates a new folder"):
        make_certificates(old, host="127.0.0.1")


def test_a_host_without_address_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host no such host: has no address"):
        make_certificates(tmp_path / "made", host="no such host")
    assert not (tmp_path / "made").exists()


def test_a_strict_client_takes_what_etcd_shows(tmp_path: Path) -> None:
    """Python 3.13 checks what RFC 5280 asks for by default."""
    folder = make_certificates(tmp_path, host="192.0.2.7")
    strict = ssl.create_default_context(cafile=folder.authority.certificate)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder.server("192.0.2.7").certificate, folder.server("192.0.2.7").key)
    for name in ("192.0.2.7", "127.0.0.1", "localhost"):
        shake_hands(strict, server, name=name)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake_hands(strict, server, name="192.0.2.8")


def handshake(tls: CopyTls, trust: CopyTrust) -> None:
    """Meet a server with ``tls`` as a client with ``trust``."""
    shake_hands(client_context(trust), server_context(tls))


def shake_hands(trusting: ssl.SSLContext, serving: ssl.SSLContext, *, name: str | None = None) -> None:
    """Have a client that asks for ``name`` meet a server, in memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(to_client, to_server, server_hostname=name)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue


class TestCopies:
    def test_nodes_trust_each_other_by_what_they_show_etcd(self, tmp_path: Path) -> None:
        tls = tls_of_etcd(make_certificates(tmp_path, host="127.0.0.1").address(URL))
        assert tls is not None
        assert tls.trust.is_authority
        handshake(tls, tls.trust)

    def test_another_authority_is_not_trusted(self, tmp_path: Path) -> None:
        ours, theirs = (make_certificates(tmp_path / name, host="127.0.0.1").address(URL) for name in ("a", "b"))
        tls, other = tls_of_etcd(ours), tls_of_etcd(theirs)
        assert tls is not None
        assert other is not None
        with pytest.raises(ssl.SSLCertVerificationError):
            handshake(other, tls.trust)

    def test_an_expired_certificate_of_an_authority_is_refused_at_the_start(self, tmp_path: Path) -> None:
        self_signed.make_expired_certificate(tmp_path, "old")
        files = {"certificate": str(tmp_path / "old.pem"), "key": str(tmp_path / "old.key")}
        trust = CopyTrust(file=files["certificate"], is_authority=True)
        with pytest.raises(ConfigError, match=r"old\.pem: copies cannot be served with it.*certificate has expired"):
            server_context(CopyTls(**files, trust=trust))

    def test_a_pair_of_another_authority_than_etcds_is_refused_at_the_start(self, tmp_path: Path) -> None:
        ours, theirs = (make_certificates(tmp_path / name, host="127.0.0.1") for name in ("a", "b"))
        tls = CopyTls(
            certificate=str(ours.client.certificate),
            key=str(ours.client.key),
            trust=CopyTrust(file=str(theirs.authority.certificate), is_authority=True),
        )
        with pytest.raises(
            ConfigError, match=r"nodes that trust .*ca\.pem refuse it \(.*\); give --tls-cert and --tls"
        ):
            server_context(tls)

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        folder = tmp_path / "tls"
        self_signed.make_certificates(folder, "ours", "theirs")
        trust = CopyTrust(file=str(folder / "ours.pem"), is_authority=False)
        with pytest.raises(ConfigError, match="no certificate with its key"):
            server_context(CopyTls(certificate=str(folder / "ours.pem"), key=str(folder / "theirs.key"), trust=trust))
        with pytest.raises(CheckpointError, match="no certificate to trust"):
            client_context(CopyTrust(file=str(tmp_path / "missing.pem"), is_authority=False))

    def test_connections_of_a_process_share_one_context(self, tmp_path: Path) -> None:
        """Reading the file of an authority for each connection would take longer than the handshake."""
        tls = tls_of_etcd(make_certificates(tmp_path, host="127.0.0.1").address(URL))
        assert tls is not None
        assert client_context(tls.trust) is client_context(CopyTrust(file=tls.trust.file, is_authority=True))
        assert client_context(tls.trust).verify_mode == ssl.CERT_REQUIRED

    @pytest.mark.parametrize(("there", "here"), list(itertools.permutations(COPIES_TRAVEL, 2)))
    def test_all_nodes_of_a_job_agree_on_how_copies_travel(self, there: CopyTransport, here: CopyTransport) -> None:
        settings = JobSettings(program="p", flags=(), versions={})
        with pytest.raises(
            ConfigError, match=f"copies travel {COPIES_TRAVEL[here]} here and {COPIES_TRAVEL[there]} in"
        ):
            check_settings(
                dataclasses.replace(settings, copy_transport=there), dataclasses.replace(settings, copy_transport=here)
            )

    @pytest.mark.parametrize(("ca", "certificate"), [(None, "c"), ("ca", None)])
    def test_without_an_authority_or_a_pair_copies_travel_plainly(
        self, ca: str | None, certificate: str | None
    ) -> None:
        """The authorities of the web would let everyone in."""
        assert tls_of_etcd(EtcdAddress(urls=(URL,), ca=ca, certificate=certificate, key=certificate)) is None
