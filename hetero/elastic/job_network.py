"""Looks at the network of an elastic job from outside: who can speak to etcd, and whether copies travel encrypted.

It tries what a stranger would: it asks etcd without a certificate, and each node for a TLS handshake.
"""

import dataclasses
import socket
import ssl
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from hetero.doctor.findings import Finding, Severity
from hetero.elastic.etcd import EtcdAddress, EtcdConnection
from hetero.elastic.job_store import JobState, JobStore
from hetero.elastic.records import NodeInfo
from hetero.errors import MembershipStoreError
from hetero.listening import is_loopback

_ANSWER_WITHIN_S = 3.0
"""For a node to take a connection, and for its handshake."""

_NODES_AT_ONCE = 32
"""Nodes that are asked at the same time: one without TLS may take all of ``_ANSWER_WITHIN_S``."""

_OWNS = "who reaches etcd owns the job: it reads the token of the copies and names the store to which ranks connect"


def check_job_network(address: EtcdAddress, job: str) -> tuple[Finding, ...]:
    """What can be found out about the etcd at ``address`` and about the nodes of a job; problems of reaching it too.

    Raises:
        ConfigError: a file of TLS is missing or no PEM.
    """
    findings = [check_etcd(url, address) for url in address.urls]
    store = JobStore(address, job)
    try:
        state = store.read()
    except MembershipStoreError as error:
        # A single member has said so already.
        return tuple(dict.fromkeys((*findings, _unreached(str(error)))))
    finally:
        store.close()
    return (*findings, *check_copies(state.nodes.values(), job), *_store_of_ranks(state))


def check_etcd(url: str, address: EtcdAddress) -> Finding:
    """Judge the member of etcd at ``url`` by who may speak to it; of ``address``, the authority is used."""
    parts = urlsplit(url)
    certificates = "give etcd certificates and a client authority (docs/elastic.md)"
    if parts.scheme == "https":
        member = dataclasses.replace(address, urls=(url,))
        if (reason := _refusal(member)) is not None:
            return _unreached(reason)
        if _refusal(dataclasses.replace(member, certificate=None, key=None)) is None:
            found = f"{url} answers without a certificate of the client's: {_OWNS}"
            return _finding("problem", "etcd", found, "start etcd with a client authority (docs/elastic.md)")
        return _finding("ok", "etcd", f"{url}: TLS, and clients have to show a certificate")
    if is_loopback(str(parts.hostname)):
        found = f"{url}: no TLS, on loopback: every user of this host reaches it; {_OWNS}"
        return _finding("warning", "etcd", found, f"on a host with other users, {certificates}")
    return _finding("problem", "etcd", f"{url}: no TLS, beyond loopback; {_OWNS}", certificates)


def _unreached(reason: str) -> Finding:
    return _finding("problem", "etcd", reason, "look at --etcd and at the files of TLS")


def _refusal(address: EtcdAddress) -> str | None:
    """Why etcd does not let this client read, ``None`` if it does."""
    connection = EtcdConnection(address)
    try:
        connection.read("/")
    except MembershipStoreError as error:
        return str(error)
    finally:
        connection.close()
    return None


def check_copies(nodes: Collection[NodeInfo], job: str) -> Iterator[Finding]:
    """Judge the servers of copies of all nodes, with a finding for all that are alike."""
    if not nodes:
        yield _finding("ok", "copies", f"no node is in job {job}: nothing can be said of its copies")
        return
    judged: dict[tuple[Severity, str, str], list[str]] = {}
    with ThreadPoolExecutor(_NODES_AT_ONCE) as pool:
        for node, verdict in zip(nodes, pool.map(_copies_of, nodes), strict=True):
            judged.setdefault(verdict, []).append(node.name)
    for (severity, found, todo), names in judged.items():
        yield _finding(severity, "copies", f"{found}: {_listed(names)}", todo)


def _copies_of(node: NodeInfo) -> tuple[Severity, str, str]:
    """How bad it is, what was found, and what to do, without the name of the node."""
    try:
        has_tls = _speaks_tls(node.host, node.port)
    except OSError:
        return "ok", "not reached from here", ""
    if has_tls:
        return "ok", "served by TLS", ""
    if is_loopback(node.host):
        return "ok", "served without TLS, on loopback", ""
    return (
        "warning",
        "served without TLS, beyond loopback: who listens on that network reads the token and the weights",
        "start the agents with certificates (docs/elastic.md)",
    )


def _speaks_tls(host: str, port: int) -> bool:
    """Whether what listens there begins a TLS handshake, whatever its certificate.

    Raises:
        OSError: nothing answers.
    """
    # Nothing is sent that needs to be kept secret, and nothing is believed.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((host, port), timeout=_ANSWER_WITHIN_S) as connection:
        try:
            with context.wrap_socket(connection):
                return True
        except ssl.SSLError as error:
            # An alert is TLS too: of a server that asks for a certificate of the client's.
            return "ALERT" in (error.reason or "")
        except (ConnectionError, TimeoutError):
            # A server without TLS takes the handshake for a request, and may wait for its end.
            return False


def _store_of_ranks(state: JobState) -> Iterator[Finding]:
    if state.epoch is not None:
        host, port = state.epoch.rendezvous_host, state.epoch.rendezvous_port
        reached = "loopback alone" if is_loopback(host) else "every host of that network reaches it"
        yield _finding("ok", "store of the epoch", f"listens on {host}, port {port}: {reached}")


def _finding(severity: Severity, subject: str, found: str, todo: str = "") -> Finding:
    return Finding(severity=severity, subject=f"job: {subject}", found=found, todo=todo)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
