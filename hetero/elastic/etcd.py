"""Speaks to etcd through the gRPC gateway that it serves over HTTP: reads, leases, transactions, and a watch.

A member that does not answer is asked last from then on; one that refuses a request speaks for all. Calls block; each
thread has a connection of its own.
"""

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from urllib3 import HTTPResponse

from hetero.elastic.etcd_errors import is_lease_missing, is_timeout, store_error
from hetero.errors import ConfigError, MembershipStoreError, StoreRefusalError
from hetero.listening import is_loopback
from hetero.serialization import parse_json
from hetero.shown_secrets import refuse_credentials

DEFAULT_ETCD_PORT = 2379

_API = "/v3/"
"""Of etcd 3.4 and newer."""

_ANSWER_WITHIN_S = 2.0
"""After which another member is asked."""

_PATIENT_WITHIN_S = 5.0
"""For a write, and for a read that no other member can answer. On a disk with a second and more for each fsync, two
writes that meet take longer than 2 s, and a commit of etcd's database holds up its reads as long. A member that stands
still is found by reads, for all threads."""

_NEWS_WITHIN_S = 6.0
"""A watch that says nothing for so long is made again: its connection may have been cut without a word."""

_OTHER_ANSWER = "what listens there answers in another way than etcd"

_CHUNK_BYTES = 1 << 16
"""Of a watch, read at once if that much has come; less is not waited for."""

T = TypeVar("T")


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
            refuse_credentials(
                url, name="--etcd", instead="show who you are with a certificate (--etcd-cert, --etcd-key)"
            )
            if not _is_address(url):
                raise ConfigError(f"--etcd {url!r} is no address; give http://HOST:{DEFAULT_ETCD_PORT} or https://...")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("etcd: a certificate needs its key; give --etcd-cert and --etcd-key, or neither")
        plain = [url for url in self.urls if urlsplit(url).scheme == "http"]
        if plain and (self.ca is not None or self.certificate is not None):
            raise ConfigError(
                f"--etcd {', '.join(plain)}: http has no use for certificates; give https://, where etcd listens with "
                "them, or leave --certificates, --etcd-ca, --etcd-cert and --etcd-key out"
            )

    @property
    def exposed(self) -> tuple[str, ...]:
        """Return the members that are reached in plain HTTP over a network: what they say and hear is open to it."""
        parts = {url: urlsplit(url) for url in self.urls}
        return tuple(
            url for url, part in parts.items() if part.scheme == "http" and not is_loopback(str(part.hostname))
        )


def _is_address(url: str) -> bool:
    """Whether a URL has a scheme, a host and perhaps a port: anything else in it would have no effect."""
    try:
        parts = urlsplit(url)
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_host_alone = not parts.path.strip("/") and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and is_port and is_host_alone


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


def delete_all_but(prefix: str, *, kept: str) -> list[dict[str, Any]]:
    """Parts of a transaction that delete all keys that begin with ``prefix`` but not with ``kept``, which is longer."""
    ranges = ((prefix, kept), (_end_of(kept), _end_of(prefix)))
    return [{"request_delete_range": {"key": _encoded(key), "range_end": _encoded(end)}} for key, end in ranges]


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


class MemberOrder:
    """The members of etcd in the order in which they are asked, for all connections of a process.

    One that fails goes to the end, so that no other thread has to find that out by itself.
    """

    def __init__(self, address: EtcdAddress) -> None:
        self._urls = address.urls
        self._lock = threading.Lock()

    @property
    def urls(self) -> tuple[str, ...]:
        """All members, the one to ask first."""
        return self._urls

    def move_to_end(self, url: str) -> None:
        """Ask a member last: it does not answer."""
        with self._lock:
            self._urls = (*(other for other in self._urls if other != url), url)


class EtcdConnection:
    """One connection; for one thread at a time.

    Args:
        order: in which members are asked; shared by connections that are to learn from each other.

    Raises:
        ConfigError: a file of TLS is missing or no PEM, or a key is another's.
    """

    def __init__(self, address: EtcdAddress, *, order: MemberOrder | None = None) -> None:
        _check_files(address)
        self._address = address
        self._order = MemberOrder(address) if order is None else order
        self._clients = {url: _client(url, address) for url in address.urls}
        self._is_away = False
        self._watched: tuple[str, HTTPResponse] | None = None
        self._interrupted = False

    def close(self) -> None:
        """Drop the connections that are open."""
        for client in self._clients.values():
            client.session.close()

    def read(self, prefix: str) -> StoredKeys:
        """Read all keys that begin with ``prefix``, at one revision of the store."""

        def parse(answer: Mapping[str, Any]) -> StoredKeys:
            values = {}
            for entry in answer.get("kvs", ()):
                name = base64.b64decode(entry["key"])[len(prefix.encode()) :].decode(errors="backslashreplace")
                # The gateway leaves out what is empty.
                data = base64.b64decode(entry.get("value", ""))
                values[name] = StoredValue(data=data, revision=int(entry["mod_revision"]))
            return StoredKeys(values=values, revision=_revision(answer))

        request = {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix))}
        return self._call("/kv/range", request, parse, last_within_s=_PATIENT_WITHIN_S)

    def transaction(
        self, *, conditions: Sequence[Mapping[str, Any]], then: Sequence[Mapping[str, Any]]
    ) -> TransactionResult:
        """Do all of ``then`` at once if all ``conditions`` hold."""
        return self._call(
            "/kv/txn",
            {"compare": list(conditions), "success": list(then), "failure": []},
            lambda answer: TransactionResult(
                succeeded=bool(answer.get("succeeded", False)), revision=_revision(answer)
            ),
            within_s=_PATIENT_WITHIN_S,
        )

    def grant(self, seconds: int) -> GrantedLease:
        """Ask for a lease that ends unless it is kept alive; etcd may grant another time than was asked for."""
        return self._call(
            "/lease/grant",
            {"TTL": seconds, "ID": 0},
            lambda answer: GrantedLease(number=int(answer["ID"]), seconds=int(answer["TTL"])),
            within_s=_PATIENT_WITHIN_S,
        )

    def keep_alive(self, lease: int) -> bool:
        """Start the time of a lease again; returns whether the lease was still there."""
        try:
            return self._call("/lease/keepalive", {"ID": lease}, lambda answer: int(answer["result"].get("TTL", 0)) > 0)
        except StoreRefusalError as error:
            if is_lease_missing(error):
                return False
            raise

    def revoke(self, lease: int) -> None:
        """End a lease, and delete all keys that hang on it; one that has ended is left as it is."""
        try:
            self._call("/kv/lease/revoke", {"ID": lease}, _revision)
        except StoreRefusalError as error:
            if not is_lease_missing(error):
                raise

    def changes(self, prefix: str) -> Iterator[None]:
        """Yield once when the watch has begun, and then whenever keys with ``prefix`` have changed.

        Ends when nothing has for some seconds, or :meth:`interrupt` is called.

        Raises:
            MembershipStoreError: etcd is gone, refuses the watch, or has ended it.
        """
        request = {"create_request": {"key": _encoded(prefix), "range_end": _encoded(_end_of(prefix))}}
        url = self._order.urls[0]
        self._interrupted = False
        try:
            with self._post(
                url, "/watch", request, timeout_s=(_ANSWER_WITHIN_S, _NEWS_WITHIN_S), stream=True
            ) as response:
                self._watched = (url, response.raw)
                for line in response.iter_lines(chunk_size=_CHUNK_BYTES):
                    check_watch(line)
                    yield
            raise Etcd3Exception(None, "it has ended the watch")
        except (Etcd3Exception, OSError) as error:
            has_begun, self._watched = self._watched is not None, None
            if self._interrupted or (has_begun and is_timeout(error)):
                return
            failure = self._error(error, request)
            if not isinstance(failure, StoreRefusalError):
                self._order.move_to_end(url)
            raise failure from None

    def follow_order(self) -> None:
        """End the watch, from another thread, if it is at another member than the one to ask first."""
        if (watched := self._watched) is not None and watched[0] != self._order.urls[0]:
            self.interrupt()

    def interrupt(self) -> None:
        """End the watch, from another thread."""
        self._interrupted = True
        if (watched := self._watched) is not None:
            with contextlib.suppress(ValueError, RuntimeError, OSError):
                watched[1].shutdown()

    def _call(
        self,
        path: str,
        request: Mapping[str, Any],
        parse: Callable[[dict[str, Any]], T],
        *,
        within_s: float = _ANSWER_WITHIN_S,
        last_within_s: float | None = None,
    ) -> T:
        """Ask the members one after the other until one answers.

        If none has, only one is asked the next time: who asks an etcd that is away does so again soon.

        Args:
            within_s: how long a member may take.
            last_within_s: how long the last one may, after which no other is left; ``within_s`` if it is ``None``.
        """
        last: Exception | None = None
        urls = self._order.urls
        for url in urls[: 1 if self._is_away else None]:
            timeout_s = within_s if last_within_s is None or url != urls[-1] else last_within_s
            try:
                with self._post(url, path, request, timeout_s=timeout_s) as response:
                    answer = parse(response.json())
            # A body that is no JSON raises an error of requests that is an OSError as well.
            except (ValueError, TypeError, LookupError, AttributeError):
                last = Etcd3Exception(None, _OTHER_ANSWER)
            except (Etcd3Exception, OSError) as error:
                last = error
            else:
                self._is_away = False
                return answer
            failure = self._error(last, request)
            if not isinstance(failure, MembershipStoreError) or isinstance(failure, StoreRefusalError):
                self._is_away = False
                raise failure
            self._order.move_to_end(url)
        assert last is not None
        self._is_away = True
        raise self._error(last, request)

    def _post(
        self,
        url: str,
        path: str,
        request: Mapping[str, Any],
        *,
        timeout_s: float | tuple[float, float],
        stream: bool = False,
    ) -> requests.Response:
        """Send a request to a member; its answer, which has come in part if it is a stream.

        Redirects are not followed: etcd makes none, and a proxy that asks for a login makes them without end.

        Raises:
            Etcd3Exception: the answer is another than 200.
        """
        client = self._clients[url]
        response = client.session.post(
            client.get_url(path), json=request, timeout=timeout_s, stream=stream, allow_redirects=False
        )
        if response.status_code != requests.codes.ok:
            with response:
                raise Etcd3Exception(response.text, f"HTTP {response.status_code} {response.reason}")
        return response

    def _error(self, error: Exception, request: Mapping[str, Any]) -> MembershipStoreError | ConfigError:
        return store_error(error, self._address.urls, request_bytes=len(json.dumps(request)))


def check_watch(line: bytes) -> None:
    """Check a message of a watch.

    Raises:
        Etcd3Exception: etcd has ended it, or it is no message of etcd.
    """
    try:
        message = parse_json(line.decode(), source="")
        result = message.get("result", {})
        ended = result.get("canceled", False) or "error" in message
        words = result.get("cancel_reason") or message.get("error") or "it has ended the watch"
    except (ValueError, AttributeError):
        raise Etcd3Exception(None, _OTHER_ANSWER) from None
    if ended:
        raise Etcd3Exception(None, str(words))


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
