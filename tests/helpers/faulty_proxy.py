"""Stands between a client and a server of a test, and does to their connections what a bad network does."""

import asyncio
import threading
from types import TracebackType
from typing import Literal

Fault = Literal["", "refuse", "cut", "silent"]
"""``refuse``: closes at once; ``cut``: closes after some bytes of a request; ``silent``: passes nothing on."""

_PART_BYTES = 4096


class FaultyProxy:
    """Passes bytes on, within a context, from a free port of loopback.

    Attributes:
        fault: what is done to connections; may be changed at any time.
    """

    def __init__(self, port: int) -> None:
        self.fault: Fault = ""
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server: asyncio.Server | None = None

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def port(self) -> int:
        assert self._server is not None, "within its context"
        return int(self._server.sockets[0].getsockname()[1])

    async def _stop(self) -> None:
        assert self._server is not None, "within its context"
        self._server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.fault != "refuse":
                back, forth = await asyncio.open_connection("127.0.0.1", self._to)
                try:
                    await asyncio.gather(self._pass(reader, forth, is_request=True), self._pass(back, writer))
                finally:
                    forth.close()
        except OSError:
            pass
        finally:
            writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool = False
    ) -> None:
        num_bytes = 0
        while part := await reader.read(_PART_BYTES):
            num_bytes += len(part)
            while self.fault == "silent":
                await asyncio.sleep(0.01)
            if is_request and self.fault in ("refuse", "cut") and (self.fault == "refuse" or num_bytes > _PART_BYTES):
                raise ConnectionResetError
            writer.write(part)
            await writer.drain()
        writer.close()
