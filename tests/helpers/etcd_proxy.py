"""Stands between a client and the gateway of etcd: counts requests, and fails them as a proxy or a slow disk does."""

import http.client
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit


class EtcdProxy:
    """Passes requests on to an etcd, within a context.

    Attributes:
        own_answer: status and text with which every request is answered at once, as by a proxy without an etcd.
        is_silent: nothing is passed on, in either direction, as by a host that stands still.
        write_delay_s, read_delay_s: how much later a transaction or a read is answered.
        drops_watches: a watch is ended as soon as it has begun.
        requests: how many there were, by path.
    """

    def __init__(self, url: str) -> None:
        self.own_answer: tuple[int, str] | None = None
        self.is_silent = False
        self.write_delay_s = self.read_delay_s = 0.0
        self.drops_watches = False
        self.requests: Counter[str] = Counter()
        self._etcd = urlsplit(url)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                proxy.serve(self)

            def do_GET(self) -> None:
                proxy.serve(self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "EtcdProxy":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_silent = False
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def serve(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("Content-Length", 0)))
        self.requests[client.path] += 1
        if self.own_answer is not None:
            status, text = self.own_answer
            client.send_response(status)
            client.send_header("Location", client.path)
            client.send_header("Connection", "close")
            client.send_header("Content-Length", str(len(text)))
            client.end_headers()
            client.wfile.write(text.encode())
            client.close_connection = True
            return
        while self.is_silent:
            time.sleep(0.05)
        delays_s = {"/v3/kv/txn": self.write_delay_s, "/v3/kv/range": self.read_delay_s}
        time.sleep(delays_s.get(client.path, 0.0))
        etcd = http.client.HTTPConnection(str(self._etcd.hostname), self._etcd.port)
        try:
            etcd.request("POST", client.path, body, {"Content-Type": "application/json"})
            answer = etcd.getresponse()
            client.send_response(answer.status)
            client.send_header("Transfer-Encoding", "chunked")
            client.end_headers()
            while (part := answer.read1(1 << 16)) and self.own_answer is None:
                while self.is_silent:
                    time.sleep(0.05)
                client.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
                client.wfile.flush()
                if self.drops_watches and client.path.endswith("/watch"):
                    break
            client.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            client.close_connection = True
        finally:
            etcd.close()
