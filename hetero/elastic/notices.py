"""Asks a cloud's metadata server whether this node is about to be taken away.

Clouds answer on a link-local address, each in its own way, which is data here: what is asked, with which headers, and
which answer means that the node has to leave. A server that does not answer says nothing.

* AWS, https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html: 404 until the notice,
  two minutes ahead.
* Google Cloud, https://cloud.google.com/compute/docs/instances/spot: ``TRUE`` after the notice, 30 seconds ahead.
* Azure, https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events: a list of events, ``Preempt`` at
  least 30 seconds ahead.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import aiohttp

from hetero.errors import ConfigError
from hetero.serialization import parse_json
from hetero.shown_secrets import refuse_credentials

_ANSWER_WITHIN_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MetadataSource:
    """How to ask one cloud.

    url: that is polled.
    headers: of the request.
    says_leave: whether an answer of status 200 with this text is a notice.
    seconds: that the node is still there after one.
    token_url: where a session's token is drawn first, with ``token_headers``; it goes into ``token_header``.
    """

    name: str
    url: str
    says_leave: Callable[[str], bool]
    seconds: float
    headers: Mapping[str, str] = field(default_factory=dict)
    token_url: str | None = None
    token_headers: Mapping[str, str] = field(default_factory=dict)
    token_header: str = ""
    poll_every_s: float = 2.0


def _is_preempted(text: str) -> bool:
    """Of Azure's document."""
    try:
        document: Any = parse_json(text, source="scheduled events")
    except ConfigError:
        return False
    events = document.get("Events", []) if isinstance(document, dict) else []
    return any(isinstance(each, dict) and each.get("EventType") in ("Preempt", "Terminate") for each in events)


METADATA_SOURCES: Mapping[str, MetadataSource] = MappingProxyType(
    {
        each.name: each
        for each in (
            MetadataSource(
                name="aws",
                url="http://169.254.169.254/latest/meta-data/spot/instance-action",
                says_leave=lambda text: "action" in text,
                seconds=120.0,
                token_url="http://169.254.169.254/latest/api/token",
                token_headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"},
                token_header="X-aws-ec2-metadata-token",
            ),
            MetadataSource(
                name="gcp",
                url="http://metadata.google.internal/computeMetadata/v1/instance/preempted",
                says_leave=lambda text: text.strip().upper() == "TRUE",
                seconds=30.0,
                headers={"Metadata-Flavor": "Google"},
            ),
            MetadataSource(
                name="azure",
                url="http://169.254.169.254/metadata/scheduledevents?api-version=2020-07-01",
                says_leave=_is_preempted,
                seconds=30.0,
                headers={"Metadata": "true"},
            ),
        )
    }
)
"""By name of the cloud."""


def metadata_source(name: str, *, url: str | None = None) -> MetadataSource:
    """The source of a cloud, at another address if ``url`` is given: ``http://HOST:PORT`` in place of its own.

    Raises:
        ConfigError: no such cloud is known, or the URL holds credentials.
    """
    if name not in METADATA_SOURCES:
        raise ConfigError(f"no metadata server of {name!r} is known; give one of {', '.join(METADATA_SOURCES)}")
    source = METADATA_SOURCES[name]
    if url is None:
        return source
    refuse_credentials(
        url, name="--metadata-url", instead="give http://HOST:PORT alone: a metadata server asks for none"
    )
    return replace(
        source,
        url=_moved(source.url, url),
        token_url=None if source.token_url is None else _moved(source.token_url, url),
    )


async def watch_metadata(source: MetadataSource, leave: Callable[[str, float | None], None]) -> None:
    """Ask until there is a notice, and tell ``leave`` its reason and the seconds that are left."""
    timeout = aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                if await _has_notice(session, source):
                    leave(f"a notice of {source.name}", source.seconds)
                    return
            await asyncio.sleep(source.poll_every_s)


async def _has_notice(session: aiohttp.ClientSession, source: MetadataSource) -> bool:
    headers = dict(source.headers)
    if source.token_url is not None:
        async with session.put(source.token_url, headers=dict(source.token_headers)) as response:
            if response.status == 200:
                headers[source.token_header] = await response.text()
    async with session.get(source.url, headers=headers) as response:
        return response.status == 200 and source.says_leave(await response.text())


def _moved(url: str, to: str) -> str:
    """``url`` with another scheme, host and port."""
    path = url.split("/", 3)[3]
    return f"{to.rstrip('/')}/{path}"
