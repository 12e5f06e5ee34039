"""An Azurite of the tests' own on loopback, Microsoft's emulator of Azure's blobs, where this machine has one.

npm install azurite && AZURITE_BLOB=node_modules/.bin/azurite-blob python -m pytest tests/elastic/test_object_store.py
"""

import base64
import datetime
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from tests.helpers.ports import free_ports

ACCOUNT, KEY = "tests", base64.b64encode(b"a key that only these tests know").decode()


def azurite() -> str | None:
    """The program: what ``AZURITE_BLOB`` names, or ``azurite-blob`` on the path; ``None`` without."""
    return shutil.which(os.environ.get("AZURITE_BLOB", "azurite-blob"))


class AzuriteServer:
    """Keeps blobs in memory, from :meth:`start` to :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (self._port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://127.0.0.1:{self._port}/{ACCOUNT}"
        self.environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
        }

    def start(self) -> None:
        """Start it, and wait until it listens."""
        program = azurite()
        assert program is not None, "this machine has one"
        words = [program, "--blobHost", "127.0.0.1", "--blobPort", str(self._port)]
        # A request of obstore may name a later version of the protocol than Azurite knows.
        words += ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"]
        variables = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(words, cwd=self._folder, env=variables, stdout=log, stderr=log)
        while "successfully listens" not in (text := (self._folder / "log").read_text()):
            if self._process.poll() is not None:
                raise RuntimeError(text[-2000:])
            time.sleep(0.05)

    def make_container(self, name: str) -> None:
        """Make what Azure calls a bucket; obstore cannot."""
        now = datetime.datetime.now(datetime.UTC)
        headers = {"x-ms-date": now.strftime("%a, %d %b %Y %H:%M:%S GMT"), "x-ms-version": "2021-12-02"}
        # Of the headers that a signature has a line for, this request has none.
        lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        signature = hmac.new(base64.b64decode(KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}"
        address = f"{self.endpoint}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(address, method="PUT", headers=headers), timeout=10).close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
