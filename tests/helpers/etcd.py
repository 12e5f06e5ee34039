"""An etcd of a test's own, on loopback, with a data folder of the test's."""

import subprocess
import time
from pathlib import Path

from hetero.elastic.etcd import EtcdAddress, wait_until_it_answers
from tests.helpers.ports import free_ports


class EtcdServer:
    """Runs until :meth:`stop`; a start after that goes on with the same data at the same address.

    Args:
        host: to listen at; another one than loopback's is for network namespaces.
        tls: its certificate and key; clients have to show the same one.
        quota_bytes: of its data; beyond that it takes no writes.
        election_timeout_ms: after which a member without a leader wants to be one; no lease is shorter than that.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        tls: tuple[Path, Path] | None = None,
        quota_bytes: int | None = None,
        election_timeout_ms: int | None = None,
    ) -> None:
        self._folder = folder
        self._tls = tls
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
            options |= {"cert-file": certificate, "key-file": key, "trusted-ca-file": certificate}
        words = [f"--{name}={value}" for name, value in options.items()]
        words += ["--client-cert-auth"] * (self._tls is not None)
        # Tests need no data after a power failure.
        self._process = subprocess.Popen(["etcd", *words, "--unsafe-no-fsync"], stderr=subprocess.DEVNULL)
        wait_until_it_answers(self.address, attempts=200, pause=lambda: time.sleep(0.05))

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
