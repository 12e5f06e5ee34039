#!/usr/bin/env bash
# aiohttp's FileResponse reads a file 16 KiB at a time once the server has TLS, whatever its chunk_size is.
#
# Expected: FileResponse(path, chunk_size=1 MiB) reads 1 MiB at a time where the kernel cannot send the file itself.
# Happens:  over TLS it calls loop.sendfile as over plain HTTP; asyncio falls back to reads of 16 KiB, each in another
#     thread, and chunk_size has no effect: 256 reads for 4 MiB. With AIOHTTP_NOSENDFILE=1 there are 3. On large files
#     that is several times the processor time.
# Version:  aiohttp 3.14.5, Python 3.11 (named by PYTHON311). Source: aiohttp/web_fileresponse.py (_sendfile),
#     Lib/asyncio/base_events.py (_sendfile_fallback).
# Exits with 0 as long as it is so, with 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON311:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check aiohttp==3.14.5
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost \
    -keyout "$folder/key.pem" -out "$folder/cert.pem" 2>/dev/null
cat > "$folder/serve.py" <<'PYTHON'
import asyncio
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
from aiohttp import web

FOLDER = Path(sys.argv[1])
MIB = 2**20


class Counting(ThreadPoolExecutor):
    reads = 0

    def submit(self, function, /, *arguments):
        self.reads += getattr(function, "__name__", "") in ("read", "readinto")
        return super().submit(function, *arguments)


async def main():
    executor = Counting()
    asyncio.get_running_loop().set_default_executor(executor)
    (FOLDER / "data").write_bytes(bytes(4 * MIB))

    async def answer(request):
        return web.FileResponse(FOLDER / "data", chunk_size=MIB)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(FOLDER / "cert.pem", FOLDER / "key.pem")
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server).start()
    client = ssl.create_default_context(cafile=FOLDER / "cert.pem")
    async with aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{runner.addresses[0][1]}/"
        async with session.get(url, ssl=client, server_hostname="localhost") as response:
            assert len(await response.read()) == 4 * MIB
    await runner.cleanup()
    print(executor.reads)


asyncio.run(main())
PYTHON
"$folder/venv/bin/python" -c "import aiohttp, sys; print('aiohttp', aiohttp.__version__, 'Python', sys.version.split()[0])"
by_sendfile=$("$folder/venv/bin/python" "$folder/serve.py" "$folder")
by_chunks=$(AIOHTTP_NOSENDFILE=1 "$folder/venv/bin/python" "$folder/serve.py" "$folder")
echo "reads of a 4 MiB file by TLS: $by_sendfile, with AIOHTTP_NOSENDFILE=1: $by_chunks"
test "$by_sendfile" -ge 256 && test "$by_chunks" -le 6
