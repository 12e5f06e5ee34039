"""Speaks to etcd through the gRPC gateway that it serves over HTTP: reads, leases, transactions, and a watch.

An address that does not answer is left for the next one. Calls block; each thread has a connection of its own.
"""

import base64
import contextlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from etcd3gw.lease import Lease

from hetero.errors import ConfigError, MembershipStoreError

DEFAULT_ETCD_PORT = 2379

_API = "/v3/"
"""Of etcd 3.4 and newer."""

_ANSWER_WITHIN_S = 2.0

_NEWS_WITHIN_S = 5.0
"""A watch that says nothing for so long is made again: its connection may have been cut without a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdAddress:
    """Where the members of etcd listen, and the files of TLS.

    urls: ``http://HOST:PORT`` or ``https://HOST:PORT``, one of each member.
    ca: of etcd's certificate. certificate, key: that show who this client is.
    """

    urls: tuple[str, ...]
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError("etcd: no address; give --etcd http://HOST:2379")
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"--etcd {url!r} is no address; give http://HOST:{DEFAULT_ETCD_PORT} or https://...")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("etcd: a certificate needs its key; give --etcd-cert and --etcd-key, or neither")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredValue:
    """A value, as it was written, and the revision of the store at which it was."""

    data: bytes
    revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKeys:
    """All keys with a prefix, without it, and the revision of the store at which they were read.

    values: by key; bytes of a key that are no UTF-8 are written as escapes.
    """

    values: Mapping[str, StoredValue]
    revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TransactionResult:
    """Whether the conditions of a transaction held, and the revision of the store after it."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedLease:
    """A lease by its number, and for how many seconds etcd keeps it between two signs of life."""

    number: int
    seconds: int


def put_request(key: str, value: str, *, lease: int | None = None) -> dict[str, Any]:
    """The part of a transaction that writes ``value``."""
    request: dict[str, Any] = {"key": _encoded(key), "value": _encoded(value)}
    return {"request_put": request if lease is None else {**request, "lease": lease}}


def delete_request(key: str, *, prefix: bool = False) -> dict[str, Any]:
    """The part of a transaction that deletes ``key``, or all that begin with it."""
    request = {"key": _encoded(key)}
    return {"request_delete_range": {**request, "range_end": _encoded(_end_of(key))} if prefix else request}


def is_absent(key: str, *, prefix: bool = False) -> dict[str, Any]:
    """The condition of a transaction that ``key`` is not there, or no key that begins with it."""
    request = {"key": _encoded(key), "target": "CREATE", "result": "EQUAL", "create_revision": 0}
    return {**request, "range_end": _encoded(_end_of(key))} if prefix else request


def has_value(key: str, value: str) -> dict[str, Any]:
    """The condition of a transaction that ``key`` is ``value``."""
    return {"key": _encoded(key), "target": "VALUE", "result": "EQUAL", "value": _encoded(value)}


def is_below(key: str, value: str) -> dict[str, Any]:
    """The condition of a transaction that ``key`` is there, and comes before ``value`` byte by byte."""
    return {"key": _encoded(key), "target": "VALUE", "result": "LESS", "value": _encoded(value)}


def has_revision(key: str, revision: int) -> dict[str, Any]:
    """The condition of a transaction that ``key`` was last written at ``revision``, 0: never."""
    return {"key": _encoded(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision}


class EtcdConnection:
    """One connection; for one thread at a time.

    Raises:
        ConfigError: a file of TLS is missing or no PEM, or a key is another's.
    """

    def __init__(self, address: EtcdAddress) -> None:
        _check_files(address)
        self._address = address
        self._clients = [_client(url, address) for url in address.urls]

    def close(self) -> None:
        """Drop the connections that are open."""
        for client in self._clients:
            client.session.close()

    def read(self, prefix: str) -> StoredKeys:
        """Read all keys that begin with ``prefix``, at one revision of the store."""
        answer = self._post("/kv/range", {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix))})
        values = {}
        for each in answer.get("kvs", ()):
            name = base64.b64decode(each["key"])[len(prefix.encode()) :].decode(errors="backslashreplace")
            # The gateway leaves out what is empty.
            data = base64.b64decode(each.get("value", ""))
            values[name] = StoredValue(data=data, revision=int(each["mod_revision"]))
        return StoredKeys(values=values, revision=_revision(answer))

    def transaction(
        self, *, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
    ) -> TransactionResult:
        """Do all of ``then`` at once if all ``conditions`` hold."""
        answer = self._post("/kv/txn", {"compare": list(conditions), "success": list(then), "failure": []})
        return TransactionResult(succeeded=bool(answer.get("succeeded", False)), revision=_revision(answer))

    def grant(self, seconds: int) -> GrantedLease:
        """Ask for a lease that ends unless it is kept alive; etcd may grant another time than was asked for."""
        answer = self._post("/lease/grant", {"TTL": seconds, "ID": 0})
        return GrantedLease(number=int(answer["ID"]), seconds=int(answer["TTL"]))

    def keep_alive(self, lease: int) -> bool:
        """Whether the lease was still there; if so it begins anew."""
        return bool(self._call(lambda client: Lease(lease, client).refresh()) > 0)

    def revoke(self, lease: int) -> None:
        """End a lease, and delete all keys that hang on it."""
        self._call(lambda client: Lease(lease, client).revoke())

    def changes(self, prefix: str) -> Iterator[None]:
        """Yield once when the watch has begun, and then whenever keys with ``prefix`` have changed.

        Ends when nothing has for some seconds.

        Raises:
            MembershipStoreError: etcd is gone.
        """
        request = {"create_request": {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix))}}
        client = self._clients[0]
        try:
            with client.session.post(
                client.get_url("/watch"), json=request, stream=True, timeout=(_ANSWER_WITHIN_S, _NEWS_WITHIN_S)
            ) as response:
                for _ in response.iter_content(chunk_size=None):
                    yield
        except requests.exceptions.RequestException as error:
            # A silent watch says so here too.
            if "timed out" not in str(error).lower():
                self._turn()
                raise self._away(error) from None

    def _post(self, path: str, request: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._call(lambda client: client.post(client.get_url(path), json=request))
        return answer

    def _call(self, request: Callable[[Etcd3Client], Any]) -> Any:
        last: Exception | None = None
        for _ in self._clients:
            try:
                return request(self._clients[0])
            except (Etcd3Exception, requests.exceptions.RequestException) as error:
                last = error
                self._turn()
        assert last is not None
        raise self._away(last)

    def _turn(self) -> None:
        """Begin with the next member from now on."""
        self._clients.append(self._clients.pop(0))

    def _away(self, error: Exception) -> MembershipStoreError:
        causes = list(_causes(error))
        detail = " ".join(str(causes[-1]).split())[:200] or type(causes[-1]).__name__
        where = f"etcd at {', '.join(self._address.urls)}"
        if any(isinstance(cause, requests.exceptions.SSLError) for cause in causes):
            return MembershipStoreError(
                f"{where}: no TLS with it ({detail}); give the certificate of who has signed etcd's (--etcd-ca), and "
                "one that etcd trusts if it asks for that (--etcd-cert, --etcd-key)"
            )
        return MembershipStoreError(
            f"{where} does not answer ({detail}); start one (hetero elastic store), or give its address (--etcd)"
        )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error of etcd's client, down to what the network said, of which the client itself says nothing."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _check_files(address: EtcdAddress) -> None:
    """Requests would read them only later, and say less."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if address.ca is not None:
            context.load_verify_locations(address.ca)
        if address.certificate is not None:
            context.load_cert_chain(address.certificate, address.key)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join(each for each in (address.ca, address.certificate, address.key) if each is not None)
        raise ConfigError(
            f"etcd: {names}: no certificate to trust, or none with its key: {error}; give PEM files to --etcd-ca, "
            "--etcd-cert and --etcd-key"
        ) from None


def _client(url: str, address: EtcdAddress) -> Etcd3Client:
    parts = urlsplit(url)
    session = requests.Session()
    # A proxy of the user's for the web is none for etcd.
    session.trust_env = False
    if address.ca is not None:
        session.verify = address.ca
    if address.certificate is not None and address.key is not None:
        session.cert = (address.certificate, address.key)
    return Etcd3Client(
        host=str(parts.hostname),
        port=parts.port or DEFAULT_ETCD_PORT,
        protocol=parts.scheme,
        timeout=_ANSWER_WITHIN_S,
        api_path=_API,
        session=session,
    )


def _revision(answer: Mapping[str, Any]) -> int:
    """The revision of the store that an answer was made at."""
    return int(answer["header"]["revision"])


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _end_of(prefix: str) -> str:
    """The first key behind all that begin with ``prefix``."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def wait_until_it_answers(address: EtcdAddress, *, attempts: int, pause: Callable[[], None]) -> None:
    """Ask etcd until it answers, ``attempts`` times at most.

    Raises:
        MembershipStoreError: it did not.
    """
    connection = EtcdConnection(address)
    with contextlib.closing(connection):
        for left in reversed(range(attempts)):
            try:
                connection.read("/hetero-answers-")
                return
            except MembershipStoreError:
                if left == 0:
                    raise
                pause()
