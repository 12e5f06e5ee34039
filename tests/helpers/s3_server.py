"""An S3 server of the tests' own on loopback: SeaweedFS, which knows ranges and create-only puts."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from tests.helpers.ports import free_ports

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
"""Credentials that the server takes, as variables of the environment."""


class S3Server:
    """Runs until :meth:`stop`; a start after that goes on with the same data at the same address.

    Args:
        host: to listen at; another one than loopback's is for network namespaces.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._host = host
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = f"http://{host}:{self._ports['s3.port']}"
        self.environment = {**KEYS, "AWS_ENDPOINT_URL": self.endpoint, "AWS_ALLOW_HTTP": "true"}
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self, *, prefix: tuple[str, ...] = ()) -> None:
        """Start it, and wait until it answers; ``prefix`` comes before the command."""
        options = {
            **{name: str(port) for name, port in self._ports.items()},
            "dir": str(self._folder / "data"),
            "ip": self._host,
            "ip.bind": self._host,
            "filer": "true",
            "s3": "true",
            "s3.config": str(self._folder / "s3.json"),
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "filer.localSocket": str(self._folder / "filer.sock"),
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": "256",
            "volume.max": "0",
        }
        words = [f"-{name}={value}" for name, value in options.items()]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*prefix, _WEED, "server", *words], stdout=log, stderr=log)

    def wait(self) -> None:
        """Wait until it answers."""
        assert self._process is not None, "started"
        while self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.endpoint}/status", timeout=1).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError((self._folder / "log").read_text()[-2000:])

    def make_bucket(self, name: str) -> None:
        """Make a bucket: to put something there is enough, while one that is not there cannot be listed."""
        config: Any = {key.lower(): value for key, value in {**KEYS, "AWS_ENDPOINT": self.endpoint}.items()}
        obstore.put(S3Store(name, config=config, client_options={"allow_http": True}), "made", b"")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


_WEED = Path(sys.executable).with_name("weed")

_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc"),
    *("filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"),
)
