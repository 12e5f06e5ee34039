"""What flags of ``hetero elastic`` say of certificates, and warnings where nothing is encrypted."""

import argparse
from typing import TYPE_CHECKING

from hetero.commands.elastic_store import DEFAULT_PORT, OWNS_JOBS
from hetero.errors import ConfigError
from hetero.listening import is_loopback

if TYPE_CHECKING:
    from hetero.elastic.copy_tls import CopyTls
    from hetero.elastic.etcd import EtcdAddress
    from hetero.elastic.records import CopyTransport

_GIVE_CERTIFICATES = "start etcd with hetero elastic store --certificates FOLDER, and give https:// and the folder here"


def etcd_address(args: argparse.Namespace) -> "EtcdAddress":
    """Where the flags say that etcd is.

    Raises:
        ConfigError: they name no address, half of a certificate, or a folder of certificates that is none.
    """
    from hetero.elastic.certificate_folder import CertificateFolder
    from hetero.elastic.etcd import EtcdAddress

    files = {"ca": args.etcd_ca, "certificate": args.etcd_cert, "key": args.etcd_key}
    has_files = any(path is not None for path in files.values())
    if has_files and args.certificates is not None:
        raise ConfigError("--certificates stands for --etcd-ca, --etcd-cert and --etcd-key; leave those out")
    is_secure = has_files or args.certificates is not None
    given = args.etcd or f"{'https' if is_secure else 'http'}://127.0.0.1:{DEFAULT_PORT}"
    urls = tuple(url.rstrip("/") for url in given.split(",") if url)
    if args.certificates is not None:
        return CertificateFolder(args.certificates).address(*urls)
    return EtcdAddress(urls=urls, **files)


def copy_tls(args: argparse.Namespace, etcd: "EtcdAddress") -> "CopyTls | None":
    """By which certificates the flags say that copies travel: those of their own, or those that etcd is shown.

    Raises:
        ConfigError: they name half of a pair.
    """
    from hetero.elastic.copy_tls import CopyTls, tls_of_etcd
    from hetero.elastic.records import CopyTrust

    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key: give both or neither")
    if args.tls_cert is not None:
        trust = CopyTrust(file=str(args.tls_cert), is_authority=False)
        return CopyTls(certificate=str(args.tls_cert), key=str(args.tls_key), trust=trust)
    return tls_of_etcd(etcd)


def transport_of(tls: "CopyTls | None") -> "CopyTransport":
    """Return how copies travel, as all nodes of a job have to agree on."""
    if tls is None:
        return "http"
    return "authority" if tls.trust.is_authority else "certificate"


def etcd_warning(address: "EtcdAddress") -> str | None:
    """Say what follows if etcd is reached in plain HTTP over a network, ``None`` if it is not."""
    if not address.exposed:
        return None
    return (
        f"etcd at {', '.join(address.exposed)} is reached in plain HTTP: whoever reaches it, or reads this network, "
        f"{OWNS_JOBS}; {_GIVE_CERTIFICATES}"
    )


def copies_warning(host: str, tls: "CopyTls | None") -> str | None:
    """Say what follows if a node serves copies in plain HTTP over a network, ``None`` if it does not."""
    if tls is not None or is_loopback(host):
        return None
    return (
        f"copies travel in plain HTTP, as does the token that opens them: whoever reads the network of {host} can read "
        "the weights, and who changes what travels is noticed by no more than a CRC-32; "
        f"{_GIVE_CERTIFICATES}, or give --tls-cert and --tls-key"
    )
