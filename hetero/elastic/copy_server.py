"""Shows the copies of a node to the ranks and agents of its job, and to nobody else. It writes nothing.

    GET /JOB/inventory                          :class:`hetero.elastic.records.Inventory`
    GET /JOB/copies/EPOCH/STEP/UNIT?wait=5      :class:`hetero.elastic.records.Copy`, within so many seconds
    GET /JOB/files/EPOCH/STEP/UNIT              one range of the unit's file

Whoever does not show the job's token, and whatever is not there, gets the same answer: 404 and nothing more. A stranger
gets it from :mod:`hetero.elastic.token_gate` before the request is parsed or any file looked for, so that it takes as
long whether there is one or not.
"""

import asyncio
import hmac
import http
import os
import re
import ssl
from pathlib import Path

from aiohttp import hdrs, web

from hetero.elastic.copy_folder import SLOTS, UNIT_NAME, copy_path, inventory, read_copy, shard_path, slot_folder
from hetero.elastic.records import Copy
from hetero.elastic.token_gate import NOTHING, TokenGate
from hetero.errors import CheckpointError, ConfigError
from hetero.listening import listening_socket
from hetero.peer_limits import IDLE_S, LONGEST_WAIT_S, max_peers, raise_descriptor_limit
from hetero.serialization import to_compact_json

_LOOK_EVERY_S = 0.01

_TLS_CHUNK_BYTES = 2**20
"""That are read and encrypted at once: from 256 KiB on it takes as long, and the agent's other work waits for one."""

_COPY = re.compile(r"(copies|files)/(\d{1,12})/(\d{1,12})/([A-Za-z0-9_.]{1,80})")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class CopyServer:
    """Serves one folder of copies to one job.

    Args:
        folder: see :mod:`hetero.elastic.copy_folder`.
        node: name of this node.
        token: that requests have to show.
        tls: with the server's certificate and key; ``None`` serves without encryption.
    """

    def __init__(self, folder: Path, *, job: str, node: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self._folder = folder
        self._job = job
        self._node = node
        self._authorization = f"Bearer {token}".encode()
        self._tls = tls
        self._runner: web.AppRunner | None = None
        self._gate: TokenGate | None = None
        self._read: dict[Path, tuple[os.stat_result, Copy | None]] = {}

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address, and return the port: a free one for 0.

        Raises:
            ConfigError: the address is none of this host's, or the port is taken.
        """
        try:
            listener = listening_socket(host, port)
        except OSError as error:
            raise ConfigError(
                f"copies cannot be served on {host} port {port}: {error.strerror or error}; name an address of this "
                "host, or another port"
            ) from None
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        app.on_response_prepare.append(_say_nothing_of_oneself)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        server, most = runner.server, max_peers(raise_descriptor_limit())
        assert server is not None, "set up"

        def admit() -> asyncio.Protocol | None:
            return _Peer(server) if len(server.connections) < most else None

        self._runner = runner
        self._gate = TokenGate(listener, authorization=self._authorization, admit=admit, tls=self._tls)
        self._gate.open()
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Stop listening; who is being answered is cut off."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        shown = os.fsencode(request.headers.get("Authorization", ""))
        job, _, path = request.match_info["path"].partition("/")
        is_ours = hmac.compare_digest(shown, self._authorization)
        is_ours &= hmac.compare_digest(os.fsencode(job), self._job.encode())
        if is_ours and request.method == "GET":
            if path == "inventory":
                found = await asyncio.to_thread(inventory, self._folder, node=self._node)
                return _json(found)
            if (match := _COPY.fullmatch(path)) and UNIT_NAME.fullmatch(match[4]):
                kind, epoch, step, unit = match[1], int(match[2]), int(match[3]), match[4]
                answer = self._copy if kind == "copies" else self._file
                return await answer(request, epoch=epoch, step=step, unit=unit)
        return _nothing()

    async def _copy(self, request: web.Request, *, epoch: int, step: int, unit: str) -> web.StreamResponse:
        try:
            wait_s = min(float(request.query.get("wait", "0")), LONGEST_WAIT_S)
        except ValueError:
            return _nothing()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while (found := self._find(epoch, step, unit)) is None and loop.time() < deadline:
            await asyncio.sleep(_LOOK_EVERY_S)
        return _nothing() if found is None else _json(found[1])

    async def _file(self, request: web.Request, *, epoch: int, step: int, unit: str) -> web.StreamResponse:
        wanted = _RANGE.fullmatch(request.headers.get("Range", ""))
        found = self._find(epoch, step, unit)
        if wanted is None or found is None:
            return _nothing()
        path = shard_path(found[0], unit)
        start, end = int(wanted[1]), int(wanted[2])
        if not path.is_file() or not start <= end < path.stat().st_size:
            return _nothing()
        if self._tls is None:
            # The kernel sends it.
            return web.FileResponse(path)
        return await _encrypted_range(request, path, start=start, end=end)

    def _find(self, epoch: int, step: int, unit: str) -> tuple[Path, Copy] | None:
        """As :func:`hetero.elastic.copy_folder.find_copy`; a description is parsed once, however often one asks."""
        for number in SLOTS:
            slot = slot_folder(self._folder, epoch, number)
            path = copy_path(slot, unit)
            try:
                status = path.stat()
                before, copy = self._read.get(path, (None, None))
                if before is None or (before.st_ino, before.st_mtime_ns) != (status.st_ino, status.st_mtime_ns):
                    copy = read_copy(slot, unit)
                    self._read[path] = status, copy
            except (OSError, CheckpointError):
                self._read.pop(path, None)
                continue
            if copy is not None and (copy.epoch, copy.step, copy.unit) == (epoch, step, unit):
                return slot, copy
        return None


class _Peer(web.RequestHandler):
    """Serves the connection of one peer; a request that cannot be parsed or answered gets what a stranger's gets."""

    __slots__ = ()

    def __init__(self, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=IDLE_S,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp's own runners say that there is none
        )

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer as to a stranger, and end the connection; log the error if it is this server's.

        Raises:
            ConnectionError: always, which ends the connection.
        """
        # aiohttp asks again about the error that this raises.
        if self.transport is not None and not self.transport.is_closing():
            if status >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
                self.log_exception("Copies cannot be served", exc_info=exc)
            if request.writer.output_size == 0:
                self.transport.write(NOTHING)
            self.transport.close()
        raise ConnectionError("the request cannot be answered")


async def _say_nothing_of_oneself(request: web.Request, response: web.StreamResponse) -> None:
    is_nothing = response.status == http.HTTPStatus.NOT_FOUND
    for name in (hdrs.SERVER, hdrs.DATE, *((hdrs.CONTENT_TYPE,) if is_nothing else ())):
        response.headers.popall(name, None)


async def _encrypted_range(request: web.Request, path: Path, *, start: int, end: int) -> web.StreamResponse:
    """Send the bytes ``start`` to ``end`` of a file, the last one included, by TLS.

    :class:`aiohttp.web.FileResponse` would have asyncio read 16 KiB at a time, each in another thread: six times the
    work.
    """
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        response = web.StreamResponse(
            status=http.HTTPStatus.PARTIAL_CONTENT, headers={"Content-Range": f"bytes {start}-{end}/{size_bytes}"}
        )
        response.content_length = end + 1 - start
        await response.prepare(request)
        for offset in range(start, end + 1, _TLS_CHUNK_BYTES):
            length = min(_TLS_CHUNK_BYTES, end + 1 - offset)
            chunk = await asyncio.to_thread(os.pread, file.fileno(), length, offset)
            if len(chunk) < length and request.transport is not None:
                # It has become shorter: whoever asked is to hear that at once.
                request.transport.abort()
            await response.write(chunk)
        await response.write_eof()
        return response


def _nothing() -> web.Response:
    return web.Response(status=404)


def _json(value: object) -> web.Response:
    return web.Response(body=to_compact_json(value), content_type="application/json")
