"""Shows the copies of a node to the ranks and agents of its job, and to nobody else. It writes nothing.

    GET /JOB/inventory                          :class:`hetero.elastic.records.Inventory`
    GET /JOB/copies/EPOCH/STEP/UNIT?wait=5      :class:`hetero.elastic.records.Copy`, within so many seconds
    GET /JOB/files/EPOCH/STEP/UNIT              one range of the unit's file

Whoever does not show the job's token, and whatever is not there, gets the same answer: 404 and nothing more. A stranger
gets it before any file is looked for, so that it takes as long whether there is one or not.
"""

import asyncio
import hmac
import os
import re
import ssl
from pathlib import Path

from aiohttp import web

from hetero.elastic.copy_folder import SLOTS, UNIT_NAME, copy_path, inventory, read_copy, shard_path, slot_folder
from hetero.elastic.records import Copy
from hetero.errors import CheckpointError, ConfigError
from hetero.serialization import to_compact_json

LONGEST_WAIT_S = 30.0
"""That a request may ask for."""

_LOOK_EVERY_S = 0.01

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
        self._read: dict[Path, tuple[os.stat_result, Copy | None]] = {}

    async def start(self, host: str, port: int = 0) -> int:
        """Listen on one address, and return the port: a free one for 0.

        Raises:
            ConfigError: the address is none of this host's, or the port is taken.
        """
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        app.on_response_prepare.append(_say_nothing_of_oneself)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=self._tls).start()
        except OSError as error:
            await self.stop()
            raise ConfigError(
                f"copies cannot be served on {host} port {port}: {error.strerror or error}; name an address of this "
                "host, or another port"
            ) from None
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening; who is being answered is cut off."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "").encode()
        job, _, path = request.match_info["path"].partition("/")
        is_ours = hmac.compare_digest(shown, self._authorization)
        is_ours &= hmac.compare_digest(job.encode(), self._job.encode())
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
        if not path.is_file() or not int(wanted[1]) <= int(wanted[2]) < path.stat().st_size:
            return _nothing()
        return web.FileResponse(path, chunk_size=2**20)

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


def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a :class:`CopyServer` needs to show ``certificate``.

    Raises:
        ConfigError: one of the files is missing or no PEM, or they do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{certificate} and {key}: no certificate with its key: {error}; give PEM files") from None
    return context


async def _say_nothing_of_oneself(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.popall("Server", None)


def _nothing() -> web.Response:
    return web.Response(status=404)


def _json(value: object) -> web.Response:
    return web.Response(body=to_compact_json(value), content_type="application/json")
