"""Turns what goes wrong with a request to etcd into one error: etcd is away, or it has answered and refuses.

Another member is asked only if one is away. etcd's gateway answers an error with JSON that has etcd's own words and a
code of gRPC; what a proxy says instead has none, and means that etcd is away.
"""

import http.client
import ssl
from collections.abc import Iterator, Sequence

import requests
from etcd3gw.exceptions import Etcd3Exception

from hetero.elastic.exhaustion import exhaustion_of, is_exhaustion
from hetero.errors import ConfigError, MembershipStoreError, StoreRefusalError
from hetero.serialization import parse_json
from hetero.shown_secrets import without_secrets

_AWAY_CODES = frozenset({1, 2, 4, 13, 14})
"""Codes of gRPC that a member without a leader, or one that is ending, answers with: CANCELLED, UNKNOWN,
DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE. Source: grpc/statuscodes, and etcd's api/v3rpc/rpctypes/error.go."""

_MAX_SHOWN = 200
"""Characters of an error's text that a message repeats."""

_TOO_LARGE = ("request is too large", "larger than max")
"""In the words of etcd, and of the gateway in front of it."""

_NO_USER = "agents give no user: switch its authentication off (etcdctl auth disable), and use certificates"

_REFUSAL_FIXES = (
    (
        "database space exceeded",
        "it takes no writes until there is room: compact, defragment, and disarm its alarm (docs/elastic.md)",
    ),
    (
        "user name is empty",
        _NO_USER,
    ),
    ("auth token", _NO_USER),
    ("permission denied", "agents need to read and write all keys under /hetero/"),
)

_SPACES = str.maketrans("_-", "  ")
"""OpenSSL writes its words in several ways."""

_TRUSTED = "--certificates, or --etcd-ca"
_SHOWN = "--certificates, or --etcd-cert, --etcd-key"

_TLS_FIXES = (
    ("certificate has expired", "renew the certificate of etcd, or of who has signed it, and start etcd with that"),
    ("not yet valid", "set the clock of this host, or wait until etcd's certificate is valid"),
    ("hostname mismatch", "give the name or address that etcd's certificate is made out to (--etcd)"),
    ("ip address mismatch", "give the name or address that etcd's certificate is made out to (--etcd)"),
    ("alert certificate expired", f"renew the certificate that is shown to etcd ({_SHOWN})"),
    ("alert bad certificate", f"give a certificate that etcd trusts and that has not expired ({_SHOWN})"),
    ("alert certificate required", f"give a certificate that etcd trusts ({_SHOWN})"),
    ("alert unknown ca", f"give a certificate that an authority has signed which etcd trusts ({_SHOWN})"),
    ("self signed certificate", f"give the certificate of who has signed etcd's ({_TRUSTED})"),
    ("unable to get local issuer", f"give the certificate of who has signed etcd's ({_TRUSTED})"),
)
_TLS_FIX = (
    f"give the certificate of who has signed etcd's ({_TRUSTED}), and one that etcd trusts, and that has not expired, "
    f"if it asks for that ({_SHOWN}); or http://, if it listens without TLS"
)


def store_error(error: Exception, urls: Sequence[str], *, request_bytes: int) -> MembershipStoreError | ConfigError:
    """Make the error of a request: a :class:`StoreRefusalError` if etcd has answered.

    Args:
        request_bytes: size of the request, for one that etcd finds too large: that is a :class:`ConfigError`, as it
            would be too large again.
    """
    where = f"etcd at {', '.join(urls)}"
    causes = list(_causes(error))
    code, words = _answer(error) or (None, str(causes[-1]))
    detail = without_secrets(" ".join(words.split()))[:_MAX_SHOWN] or type(causes[-1]).__name__
    if code is not None and code not in _AWAY_CODES:
        return _refusal(detail, where, request_bytes)
    if is_exhaustion(error):
        return MembershipStoreError(f"{where} cannot be asked: {exhaustion_of(error)}")
    if any(isinstance(cause, ssl.SSLError | requests.exceptions.SSLError) for cause in causes):
        fix = next((fix for words, fix in _TLS_FIXES if words in detail.lower().translate(_SPACES)), _TLS_FIX)
        return MembershipStoreError(f"{where}: no TLS with it ({detail}); {fix}")
    fix = "start one (hetero elastic store), or give its address (--etcd)"
    if any(isinstance(cause, http.client.RemoteDisconnected) for cause in causes):
        # So etcd answers plain HTTP where it listens with TLS.
        fix += ", with https:// and --certificates if it listens with TLS"
    return MembershipStoreError(f"{where} does not answer ({detail}); {fix}")


def is_lease_missing(error: MembershipStoreError) -> bool:
    """Whether etcd has refused a request because the lease has ended."""
    return isinstance(error, StoreRefusalError) and "lease not found" in str(error)


def is_timeout(error: BaseException) -> bool:
    """Whether nothing has come within the time."""
    return any(isinstance(cause, TimeoutError) for cause in _causes(error))


def _refusal(words: str, where: str, request_bytes: int) -> MembershipStoreError | ConfigError:
    if any(part in words for part in _TOO_LARGE):
        return ConfigError(
            f"{where} refuses a request of {request_bytes:,} bytes ({words}); start etcd with a larger "
            "--max-request-bytes"
        )
    fix = next((f"; {fix}" for part, fix in _REFUSAL_FIXES if part in words), "")
    return StoreRefusalError(f"{where} refuses a request ({words}){fix}")


def _answer(error: Exception) -> tuple[int, str] | None:
    """The code and the words of etcd's own answer; ``None`` if there is none, or it is a proxy's."""
    if not isinstance(error, Etcd3Exception):
        return None
    try:
        said = parse_json(error.detail_text or "", source="")
        return int(said["code"]), str(said.get("message") or said["error"])
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error of etcd's client, down to what the network said, of which the client itself says nothing."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
