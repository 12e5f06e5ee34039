"""Metadata servers of clouds, as a local server answers for them."""

import asyncio
import dataclasses

import pytest
from aiohttp import web

from hetero.elastic.notices import METADATA_SOURCES, metadata_source, watch_metadata

BEFORE = {
    "aws": (404, ""),
    "gcp": (200, "FALSE"),
    "azure": (200, '{"DocumentIncarnation": 1, "Events": [{"EventType": "Freeze"}]}'),
}
AFTER = {
    "aws": (200, '{"action": "terminate", "time": "2026-01-01T00:00:00Z"}'),
    "gcp": (200, "TRUE"),
    "azure": (200, '{"DocumentIncarnation": 2, "Events": [{"EventType": "Preempt"}]}'),
}


@pytest.mark.parametrize("cloud", METADATA_SOURCES)
def test_a_notice_is_told_once_it_is_there(cloud: str) -> None:
    """A server that is not there yet, says nothing, fails, says no, and then says yes."""
    asked: list[tuple[str, str, dict[str, str]]] = []
    told: list[tuple[str, float | None]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.method, request.path_qs, dict(request.headers)))
        if request.method == "PUT":
            return web.Response(text="a-token")
        num_asked = sum(method == "GET" for method, _, _ in asked)
        status, text = (
            (500, "TRUE action Preempt") if num_asked == 1 else BEFORE[cloud] if num_asked < 4 else AFTER[cloud]
        )
        return web.Response(status=status, text=text)

    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        source = dataclasses.replace(metadata_source(cloud, url=f"http://127.0.0.1:{port}"), poll_every_s=0.01)
        await watch_metadata(source, lambda reason, seconds: told.append((reason, seconds)))
        await runner.cleanup()

    asyncio.run(run())
    source = METADATA_SOURCES[cloud]
    assert told == [(f"a notice of {cloud}", source.seconds)]
    gets = [(path, headers) for method, path, headers in asked if method == "GET"]
    assert len(gets) == 4
    assert source.url.endswith(gets[0][0])
    for name, value in source.headers.items():
        assert gets[0][1][name] == value
    if cloud == "aws":
        assert gets[0][1]["X-aws-ec2-metadata-token"] == "a-token"


def test_a_server_that_is_not_there_says_nothing() -> None:
    source = dataclasses.replace(metadata_source("gcp", url="http://127.0.0.1:9"), poll_every_s=0.01)
    told: list[object] = []

    async def run() -> None:
        await asyncio.wait_for(watch_metadata(source, lambda *words: told.append(words)), 0.3)

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert told == []
