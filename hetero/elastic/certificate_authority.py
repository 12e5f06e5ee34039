"""Makes the certificates of an etcd for users who have no authority of their own.

The first start makes an authority and a pair for all clients. Each start signs a pair for the addresses at which etcd
listens then. Keys are P-256 (NIST SP 800-186), extensions are those that RFC 5280 asks for.
"""

import contextlib
import datetime
import fcntl
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hetero.elastic.certificate_folder import CertificateFolder, CertificatePair
from hetero.errors import ConfigError
from hetero.private_files import make_private_folder, write_private
from hetero.serialization import read_bytes

_VALID = datetime.timedelta(days=3650)
"""How long certificates last: longer than any run. A folder is replaced as a whole."""

_CLOCK_ERROR = datetime.timedelta(days=1)
"""How far the clocks of hosts may be behind the one that signs."""


def make_certificates(path: Path, *, host: str) -> CertificateFolder:
    """Make a folder of certificates, or what it lacks, and sign a pair for the etcd on ``host``.

    Args:
        path: the folder; it is made private to its user.
        host: address or name at which etcd listens; 0.0.0.0 and :: stand for all of this machine.

    Raises:
        ConfigError: others may read the folder, it cannot be written, it is a client's copy, its certificates have
            expired, or ``host`` is no address.
    """
    folder = CertificateFolder(path)
    names = _names_of(host)
    try:
        if not path.is_dir() or not any(path.iterdir()):
            make_private_folder(path, fix="name another folder")
        folder.check_is_private()
        with _locked(path):
            authority = _authority(folder)
            if not folder.client.is_complete:
                _make_pair(folder.client, "hetero client", authority)
            _make_pair(folder.server(host), "hetero etcd", authority, names=names)
    except OSError as error:
        raise ConfigError(
            f"--certificates {path}: cannot be written: {error.strerror}; name a folder of your own"
        ) from None
    return folder


_Signer = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


def _authority(folder: CertificateFolder) -> _Signer:
    """Return the authority of a folder, made if there is none.

    Raises:
        ConfigError: it has expired, is damaged, or its key is missing.
    """
    files = folder.authority
    if files.certificate.exists():
        if not files.key.exists():
            raise ConfigError(
                f"{files.key}: is missing, without which no certificate can be signed; give --certificates the folder "
                "in which the authority was made, or a new one"
            )
        try:
            certificate = x509.load_pem_x509_certificate(read_bytes(files.certificate))
            key = serialization.load_pem_private_key(read_bytes(files.key), password=None)
            if certificate.public_key() != key.public_key() or not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ValueError("they do not belong together")
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{files.certificate} and {files.key}: no authority with its key: {error}; give --certificates a new "
                "folder"
            ) from None
        if certificate.not_valid_after_utc <= _now():
            raise ConfigError(
                f"{files.certificate}: has expired on {certificate.not_valid_after_utc:%Y-%m-%d}; give --certificates "
                "a new folder, here and to all agents"
            )
        return certificate, key
    return _make_pair(files, "hetero elastic authority", None)


def _make_pair(
    files: CertificatePair, name: str, authority: _Signer | None, *, names: Sequence[x509.GeneralName] = ()
) -> _Signer:
    """Make a key and its certificate, signed by ``authority``; without one it is an authority itself.

    All but an authority serve and ask: etcd's gateway shows etcd the certificate of the server as its own.

    Args:
        names: names and addresses that a client may know the holder by.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signing_key = (subject, key) if authority is None else (authority[0].subject, authority[1])
    now = _now()
    is_authority = authority is None
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_ERROR)
        .not_valid_after(now + _VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(_key_usage(is_authority=is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
    )
    if not is_authority:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(signing_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    # The certificate comes last: where it is, its key is too.
    _write(
        files.key,
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    _write(files.certificate, certificate.public_bytes(pem))
    return certificate, key


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names_of(host: str) -> list[x509.GeneralName]:
    """Return all names and addresses by which clients may reach what listens on ``host``.

    Raises:
        ConfigError: it is no address, and no name of one.
    """
    own = socket.gethostname()
    names = {"localhost", own, socket.getfqdn()}
    addresses = {"127.0.0.1", "::1", *_addresses(own)}
    try:
        ipaddress.ip_address(host)
        addresses.add(host)
    except ValueError:
        if not (found := _addresses(host)):
            raise ConfigError(f"--host {host}: has no address; give one of this machine") from None
        names.add(host)
        addresses |= found
    return [
        *(x509.DNSName(name) for name in sorted(names) if name.isascii()),
        *(x509.IPAddress(address) for address in sorted(map(ipaddress.ip_address, addresses), key=str)),
    ]


def _addresses(name: str) -> set[str]:
    try:
        return {str(found[4][0]).partition("%")[0] for found in socket.getaddrinfo(name, None)}
    except OSError:
        return set()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep another start, of an etcd with the same folder, from making another authority meanwhile."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _write(path: Path, content: bytes) -> None:
    """Write a file that its user alone may read; it appears complete or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    write_private(partial, content.decode())
    partial.replace(path)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
