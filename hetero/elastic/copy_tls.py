"""TLS of the servers of copies: what they show, and whom ranks and agents of the job trust.

Two ways. With ``--tls-cert`` all nodes show one certificate, which is trusted for what it is: not for a name, nor for a
date, as a run that outlives it has to keep its copies. Otherwise nodes show the certificate by which etcd knows them,
and trust those that etcd's authority has signed and that have not expired.
"""

import contextlib
import functools
import itertools
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero.elastic.records import CopyTrust
from hetero.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    # Ranks have no use for what speaks to etcd, which takes long to import.
    from hetero.elastic.etcd import EtcdAddress

_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""OpenSSL's ``X509_V_FLAG_NO_CHECK_TIME``, for which the ssl module has no name."""

_HANDSHAKE_ROUNDS = 3
"""Turns of each side after which a handshake is over, in TLS 1.2 as in 1.3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTls:
    """PEM files of the certificate and key that this node's server of copies shows, and what nodes trust."""

    certificate: str
    key: str
    trust: CopyTrust


def tls_of_etcd(etcd: "EtcdAddress") -> CopyTls | None:
    """Return the TLS of a node that shows the others what it shows etcd; ``None`` if etcd is shown nothing.

    Without an authority of its own etcd is trusted by those of the whole web, and for its name, which nodes have not.
    """
    if etcd.ca is None or etcd.certificate is None or etcd.key is None:
        return None
    return CopyTls(certificate=etcd.certificate, key=etcd.key, trust=CopyTrust(file=etcd.ca, is_authority=True))


def server_context(tls: CopyTls) -> ssl.SSLContext:
    """Make the context of a node's server of copies.

    Raises:
        ConfigError: a file is missing or no PEM, key and certificate do not belong together, or the node would not
            trust its own server: no other node would.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        client = client_context(tls.trust)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{tls.certificate} and {tls.key}: no certificate with its key: {error}; give PEM files"
        ) from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    try:
        _shake_hands(client, context)
    except ssl.SSLError as error:
        detail = getattr(error, "verify_message", error)
        raise ConfigError(
            f"{tls.certificate}: copies cannot be served with it, as nodes that trust {tls.trust.file} refuse it "
            f"({detail}); give --tls-cert and --tls-key a pair that is the same on all nodes, or let the authority "
            "sign one for servers as well (extended key usage)"
        ) from None
    return context


@functools.cache
def client_context(trust: CopyTrust) -> ssl.SSLContext:
    """Make the context of a client that trusts servers as ``trust`` says; all connections of a process share it.

    Raises:
        CheckpointError: the file is missing or no PEM.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Which node a server is does not matter: every node of the job is trusted with all copies.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if not trust.is_authority:
        context.verify_flags |= _NO_CHECK_TIME
    try:
        context.load_verify_locations(trust.file)
    except (OSError, ssl.SSLError) as error:
        raise CheckpointError(f"{trust.file}: no certificate to trust: {error}; give a PEM file") from None
    return context


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """Have a client and a server of this process meet, in memory.

    Raises:
        ssl.SSLError: one of them refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for side in itertools.islice(itertools.cycle(sides), 2 * _HANDSHAKE_ROUNDS):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
