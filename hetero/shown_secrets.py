"""Keeps secrets out of what is shown: messages, logs, tables, documents, and lines that others read."""

import re

_CREDENTIALS = re.compile(r"(?<=//)[^/@]*@")


def without_secrets(url: str) -> str:
    """The URL as it may be shown."""
    return _CREDENTIALS.sub("", url.rstrip("/"))
