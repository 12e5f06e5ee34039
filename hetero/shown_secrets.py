"""Keeps secrets out of what is shown: messages, logs, tables, documents, and lines that others read.

A URL may hold a user and a password in front of its host, and a key or a signature in its query, and so may what a
library says about a request. :func:`without_secrets` masks both in any text. :func:`refuse_credentials` refuses such a
URL where a user gives one: command lines stand in the list of processes, in histories and in plans.
"""

import re
import shlex
from collections.abc import Iterator, Sequence

from hetero.errors import ConfigError

_MASK = "***"

_SECRET_PARAMETERS = (
    r"[\w.-]*(?:signature|credentials?|token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key(?:[_-]?id)?|account[_-]?key)"
    r"|sig|pwd|key"
)
"""Names in a query whose values let others in: of signed URLs of S3, Google and Azure, and the usual ones."""

_SECRETS = (
    # The user and the password in front of a host. Of abfs://CONTAINER@ACCOUNT the first part is no user.
    re.compile(r"(?<!abfs:)(?<!abfss:)(//)[^\s/?#\"']+(?=@)"),
    # The same where the password has a character that ends the host in a correct URL. Digits after a colon are a port.
    re.compile(r"(//)[^\s/?#:@\[\"']*:(?!\d*(?:[/,\"']|\s|$))\S{0,256}(?=@)"),
    re.compile(rf"([?&;#](?:{_SECRET_PARAMETERS})=)[^&;#\s\"'<>]+", re.IGNORECASE),
)
"""Group 1 stays, the rest of a match is the secret."""

_ENV_FLAG = "--env"
"""Flag of ``hetero launch`` whose value, ``NAME=VALUE``, may be a secret."""


def without_secrets(text: str) -> str:
    """Return ``text`` with the credentials of URLs masked: ``s3://***@bucket``, ``https://host/?sig=***``."""
    for pattern in _SECRETS:
        text = pattern.sub(rf"\g<1>{_MASK}", text)
    return text


def refuse_credentials(url: str, *, name: str, instead: str) -> None:
    """Refuse a URL with a user, a password, a key or a signature in it.

    Args:
        name: what messages call it, such as its flag.
        instead: where the credentials belong, as the end of a message.

    Raises:
        ConfigError: the URL has one.
    """
    if any(pattern.search(url) for pattern in _SECRETS):
        raise ConfigError(
            f"{name} {without_secrets(url)}: a user, password, key or signature in a URL is seen in lists of processes "
            f"and in what is logged; take it out of the URL, and {instead}"
        )


def shown_command(words: Sequence[str]) -> str:
    """Return a command line as a plan, a profile or a script may keep it: a shell reads the words again.

    ``--env NAME=VALUE`` becomes ``--env NAME``, which takes the value from the environment.
    """
    return shlex.join(map(without_secrets, _without_values(words)))


def _without_values(words: Sequence[str]) -> Iterator[str]:
    own = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words):
        if index < own and word.startswith(f"{_ENV_FLAG}="):
            yield "=".join(word.split("=")[:2])
        elif 0 < index < own and words[index - 1] == _ENV_FLAG:
            yield word.partition("=")[0]
        else:
            yield word
