"""Opens an object store by its URL, and says what a user can do about its errors.

Credentials, region and endpoint are those of the environment, under the names that obstore reads.
"""

import atexit
import datetime
import re
import time
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, from_url

from hetero.elastic.stored_step import first_line
from hetero.errors import ConfigError
from hetero.shown_secrets import refuse_credentials, without_secrets

RETRIES: Any = {
    "max_retries": 4,
    "retry_timeout": datetime.timedelta(seconds=60),
    "backoff": {"init_backoff": datetime.timedelta(seconds=0.2), "max_backoff": datetime.timedelta(seconds=5)},
}
_CLIENT: Any = {"connect_timeout": "5s", "read_timeout": "30s", "timeout": "120s"}

_FORMS = "give s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or file:///FOLDER"
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, of another provider, AWS_ENDPOINT_URL",
    "gcs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT, the path of a key file",
    "azure": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}

_BUSY = "it is down or asked too much: upload less often (--upload-every), or look after the store"
_REFUSALS = (
    (
        r"//169\.254\.169\.254/|//metadata\.google\.internal/",
        "no credentials are in the environment, and the host's own metadata server gives none: set those of the store",
    ),
    (r"NotSupportedError", "the store lacks what is asked of it, such as If-None-Match: take one that has it"),
    (r"ExpiredToken|TokenRefreshRequired", "start the agents with a new token, or with credentials that do not expire"),
    (r"RequestTimeTooSkewed", "set the clock of this node"),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|incorrectly configured region", "set AWS_REGION to the bucket's"),
    (r"UnauthenticatedError|401 Unauthorized", "set the credentials of the store in the environment"),
    (
        r"PermissionDeniedError|403 Forbidden",
        "these credentials may not do that: correct them, or the policy of the store",
    ),
    (r"NoSuchBucket", "check URL, bucket, endpoint and region"),
    (
        r"InvalidCertificate\(\s*Expired",
        "the certificate of the endpoint has expired: have it renewed, or set the clock of this node",
    ),
    (
        r"InvalidCertificate\(",
        "the certificate of the endpoint is not trusted here: set SSL_CERT_FILE to the PEM file of the authority that "
        "has signed it",
    ),
)
"""Patterns of an error's class and text, the narrow ones first: a listing's class is the same whatever it says. They
last until the fix is made."""

_FIXES = (
    *_REFUSALS,
    (
        r"LocalFileSystem error: Unable to rename file: (Operation not (permitted|supported)|Function not implemented)",
        "a put that may only create makes a hard link, which the file system of this folder refuses: name a folder on "
        "another one (NFS, Lustre, a local disk), or a bucket",
    ),
    (r"429 Too Many Requests|503 Service Unavailable", _BUSY),
)

_ELSE = "check URL, bucket, endpoint, region and network"

_THREADS_END_S = 0.1
"""An interpreter that ends waits so long for obstore's threads: one that still lets go of an object would abort it."""

atexit.register(time.sleep, _THREADS_END_S)


def kind_of_store(url: str) -> str:
    """Return the kind of store that a URL names: ``s3``, ``gcs``, ``azure``, ``local`` or ``memory``.

    Raises:
        ConfigError: it names none, or holds credentials.
    """
    try:
        kind = str(obstore.parse_scheme(url))
    except (BaseError, ValueError) as error:
        raise _no_store(url, first_line(error)) from None
    variables = _VARIABLES.get(kind)
    instead = "give none" if variables is None else f"set {variables} in the environment"
    refuse_credentials(url, name="object store", instead=instead)
    if kind == "http":
        raise _no_store(url, "a web server is no object store; the endpoint of one is set in the environment")
    if kind == "local" and not _folder(url).is_absolute():
        raise _no_store(url, "the path of a folder begins with a third slash")
    return kind


def open_store(url: str) -> Any:
    """The store of obstore that a URL names.

    Raises:
        ConfigError: no such kind of store, it holds credentials, what the environment says of it is not enough, or a
            folder cannot be made.
    """
    kind = kind_of_store(url)
    try:
        if kind == "local":
            return LocalStore(_folder(url), automatic_cleanup=True, mkdir=True)
        if kind == "memory":
            return from_url(url)
        # Plain HTTP is for servers in the cluster; their address says so.
        client: Any = {**_CLIENT, "allow_http": True}
        return from_url(url, client_options=client, retry_config=RETRIES)
    except (BaseError, ValueError, OSError) as error:
        fix = f"set {_VARIABLES[kind]}" if kind in _VARIABLES else "give a folder that can be made here"
        raise ConfigError(f"object store {url}: {first_line(error)}; {fix}") from None


def _no_store(url: str, why: str) -> ConfigError:
    return ConfigError(f"object store {without_secrets(url)}: {why}; {_FORMS}")


def _folder(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def fix_of(error: Exception) -> str:
    """What to do about an error of obstore, as the end of a message."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, _text_of(error))), _ELSE)


def is_refusal(error: Exception) -> bool:
    """Whether an error of obstore stays until its cause is removed: asking again does not help."""
    return fix_of(error) in {fix for _, fix in _REFUSALS}


def _text_of(error: Exception) -> str:
    """Class and text, with the causes that obstore shows last: why a connection failed stands nowhere else."""
    return f"{type(error).__name__}: {error}"
