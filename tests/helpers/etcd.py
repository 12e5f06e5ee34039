"""An etcd of a test's own, on loopback, with a data folder of the test's."""

import base64
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests

from hetero.elastic.etcd import EtcdAddress, wait_until_it_answers
from tests.helpers.ports import free_ports

_FILLER = "/filler/"
_FILLER_BYTES = 1 << 20


class EtcdServer:
    """Runs until :meth:`stop`; a start after that goes on with the same data at the same address.

    Args:
        host: to listen at; another one than loopback's is for network namespaces.
        tls: its certificate and key; clients have to show the same one.
        asks_clients: with ``tls``; without, clients need not show a certificate.
        quota_bytes: of its data; beyond that it takes no writes.
        election_timeout_ms: after which a member without a leader wants to be one; no lease is shorter than that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        tls: tuple[Path, Path] | None = None,
        asks_clients: bool = True,
        quota_bytes: int | None = None,
        election_timeout_ms: int | None = None,
    ) -> None:
        self._folder = folder
        self._tls = tls
        self._asks_clients = asks_clients
        self._quota_bytes = quota_bytes
        self._election_timeout_ms = election_timeout_ms
        self._port, self._peer_port = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"{'http' if tls is None else 'https'}://{host}:{self._port}"
        self.address = EtcdAddress(urls=(self.url,))
        if tls is not None:
            certificate, key = map(str, tls)
            self.address = EtcdAddress(urls=(self.url,), ca=certificate, certificate=certificate, key=key)

    def start(self) -> None:
        peer = f"http://127.0.0.1:{self._peer_port}"
        options = {
            "data-dir": str(self._folder),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            "logger": "zap",
            "log-level": "error",
        }
        if self._quota_bytes is not None:
            options["quota-backend-bytes"] = str(self._quota_bytes)
        if self._election_timeout_ms is not None:
            options["election-timeout"] = str(self._election_timeout_ms)
        if self._tls is not None:
            certificate, key = map(str, self._tls)
            options |= {"cert-file": certificate, "key-file": key}
            # etcd asks clients for a certificate as soon as it is given an authority.
            options |= {"trusted-ca-file": certificate} if self._asks_clients else {}
        words = [f"--{name}={value}" for name, value in options.items()]
        words += ["--client-cert-auth"] * (self._tls is not None and self._asks_clients)
        # Tests need no data after a power failure.
        self._process = subprocess.Popen(["etcd", *words, "--unsafe-no-fsync"], stderr=subprocess.DEVNULL)
        wait_until_it_answers(self.address, attempts=200, pause=lambda: time.sleep(0.05))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def keep_data(self, folder: Path) -> None:
        """Copy the data, as a snapshot does; etcd is away for a moment."""
        self.stop()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._folder, folder)
        self.start()

    def put_back(self, folder: Path) -> None:
        """Replace the data by what :meth:`keep_data` has kept. Only while etcd is stopped."""
        assert self._process is None, "stop it first"
        shutil.rmtree(self._folder)
        shutil.copytree(folder, self._folder)

    def put(self, key: str, value: bytes) -> None:
        """Write any bytes, as another program than ours might."""
        answer = self._post("kv/put", {"key": _encoded(key.encode()), "value": _encoded(value)})
        assert answer.status_code == requests.codes.ok, answer.text

    def get(self, key: str) -> bytes | None:
        """The value of a key, ``None`` if it is not there."""
        found = self._post("kv/range", {"key": _encoded(key.encode())}).json().get("kvs")
        return base64.b64decode(found[0]["value"]) if found else None

    def fill(self) -> None:
        """Write until the quota is used up: from then on etcd refuses writes, and answers reads."""
        assert self._quota_bytes is not None, "needs a quota"
        for number in range(2 * self._quota_bytes // _FILLER_BYTES):
            request = {"key": _encoded(f"{_FILLER}{number}".encode()), "value": _encoded(os.urandom(_FILLER_BYTES))}
            if self._post("kv/put", request).status_code != requests.codes.ok:
                return
        raise AssertionError("etcd took more than its quota")

    def free(self) -> None:
        """Undo :meth:`fill`: delete, compact, defragment, and disarm the alarm."""
        end = _encoded(_FILLER[:-1].encode() + bytes([ord(_FILLER[-1]) + 1]))
        self._post("kv/deleterange", {"key": _encoded(_FILLER.encode()), "range_end": end})
        revision = self._post("kv/range", {"key": _encoded(b"none")}).json()["header"]["revision"]
        self._post("kv/compaction", {"revision": revision, "physical": True})
        self._post("maintenance/defragment", {})
        for alarm in self._post("maintenance/alarm", {"action": "GET"}).json().get("alarms", []):
            self._post("maintenance/alarm", {**alarm, "action": "DEACTIVATE"})

    def _post(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        with requests.Session() as session:
            session.trust_env = False
            return session.post(f"{self.url}/v3/{path}", json=body, timeout=20)


def _encoded(value: bytes) -> str:
    return base64.b64encode(value).decode()
