"""Keeps secrets out of what is shown: messages, logs, tables, documents, and lines that others read.

A URL may hold a user and a password in front of its host, and a key or a signature in its query, and so may what a
library says about a request. :func:`without_secrets` masks both in any text. :func:`refuse_credentials` refuses such a
URL where a user gives one: command lines stand in the list of processes, in histories and in plans.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from hetero.errors import ConfigError
from hetero.printable import encodable

_MASK = "***"

_SECRET_PARAMETERS = (
    r"[\w.%-]{0,64}(?:signature|credentials?|token|secret|passw(?:or)?d|passphrase|authorization"
    r"|api[_-]?key|access[_-]?key(?:[_-]?id)?|account[_-]?key)"
    r"|sig|sas|jwt|pwd|pass|auth|key"
)
"""Names in a query whose values let others in: of signed URLs of S3, Google and Azure, and the usual ones."""

_SECRETS = (
    # The user and the password in front of a host. Of abfs://CONTAINER@ACCOUNT the first part is no user.
    re.compile(r"(?<!abfs:)(?<!abfss:)(//)[^\s/?#\"']+(?=@)"),
    # The same where the password has a character that ends the host in a correct URL. Digits after a colon are a port.
    re.compile(r"(//)[^\s/?#:@\[\"']*:(?!\d*(?:[/,\"']|\s|$))\S{0,256}(?=@)"),
    # In a query of a URL within another one, and in JSON of some writers, what separates them is an escape.
    re.compile(rf"((?:[?&;#]|%3F|%26|\\u0026)(?:{_SECRET_PARAMETERS})(?:=|%3D))[^&;#\s\"'<>]+", re.IGNORECASE),
)
"""Group 1 stays, the rest of a match is the secret."""

_SECRETS_OF_URL = (
    # A user and a password at the beginning, with a wrong scheme or none: user:password@host, http:/user:password@host.
    re.compile(r"\A(\s*(?:[a-z][a-z0-9+.-]*:/+)?)[^/?#]*:[^/?#]*(?=@)", re.IGNORECASE),
    *_SECRETS,
)
"""The same for a text that is to be a URL, and nothing else."""

_ENV_FLAG = "--env"
"""Flag of ``hetero launch`` whose value, ``NAME=VALUE``, may be a secret."""


def without_secrets(text: str) -> str:
    """Return ``text`` with the credentials of URLs masked: ``s3://***@bucket``, ``https://host/?sig=***``."""
    return _masked(text, _SECRETS)


def refuse_credentials(url: str, *, name: str, instead: str) -> None:
    """Refuse a URL with a user, a password, a key or a signature in it.

    Args:
        name: what messages call it, such as its flag.
        instead: where the credentials belong, as the end of a message.

    Raises:
        ConfigError: the URL has one.
    """
    if any(pattern.search(url) for pattern in _SECRETS_OF_URL):
        raise ConfigError(
            f"{name} {_masked(url, _SECRETS_OF_URL)}: a user, password, key or signature in a URL is seen in lists of "
            f"processes and in what is logged; take it out of the URL, and {instead}"
        )


def shown_command(words: Sequence[str]) -> str:
    """Return a command line as a plan, a profile or a script may keep it: a shell reads the words again.

    ``--env NAME=VALUE`` becomes ``--env NAME``, which takes the value from the environment. Bytes of a path that are no
    UTF-8 are written as escapes: no file of JSON can hold them.
    """
    return encodable(shlex.join(map(without_secrets, _without_values(words))))


def _masked(text: str, patterns: Sequence[re.Pattern[str]]) -> str:
    for pattern in patterns:
        text = pattern.sub(rf"\g<1>{_MASK}", text)
    return text


def _without_values(words: Sequence[str]) -> Iterator[str]:
    own = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words):
        if index < own and word.startswith(f"{_ENV_FLAG}="):
            yield "=".join(word.split("=")[:2])
        elif 0 < index < own and words[index - 1] == _ENV_FLAG:
            yield word.partition("=")[0]
        else:
            yield word
