"""A double of Google Cloud Storage: as much of its XML API as obstore asks for, in memory, on loopback.

It answers as that API is documented: a put under ``x-goog-if-generation-match: 0`` fails with 412 where there is an
object, to delete none is a 404, listings come in pages. It knows one bucket and looks at no credentials. Emulators that
pip and npm bring know the JSON API alone.
"""

import hashlib
import itertools
import json
import re
import threading
import xml.etree.ElementTree as ElementTree
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 3
"""Of a listing, so that short ones have several."""


class GcsDouble:
    """Listens until :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        double = self

        class Handler(_Handler):
            store = double

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        key = {"gcs_base_url": self.endpoint, "disable_oauth": True}
        key_file = folder / "key.json"
        key_file.write_text(json.dumps({**key, "client_email": "", "private_key": "", "private_key_id": ""}))
        self.environment = {"GOOGLE_SERVICE_ACCOUNT": str(key_file)}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One request, with the lock held."""

    store: GcsDouble
    protocol_version = "HTTP/1.1"
    # One packet per answer: a second one waits for the receipt of the first.
    wbufsize = -1

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.store.lock:
            if bucket != "bucket":
                self.refuse(404, "NoSuchBucket")
            elif not key:
                self.list_objects(query.get("prefix", ""), query.get("continuation-token", ""))
            elif self.command in ("PUT", "POST"):
                self.take(unquote(key), query, body)
            else:
                self.give(unquote(key))

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_request

    def take(self, key: str, query: dict[str, str], body: bytes) -> None:
        objects, uploads = self.store.objects, self.store.uploads
        if "uploads" in query:
            upload = str(next(self.store.numbers))
            uploads[upload] = {}
            names = f"<Bucket>bucket</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
            self.answer(200, f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>".encode())
        elif self.command == "PUT" and "uploadId" in query:
            uploads[query["uploadId"]][int(query["partNumber"])] = body
            self.answer(200, ETag=etag(body))
        elif "uploadId" in query:
            parts = uploads.pop(query["uploadId"])
            wanted = [int(each.text or "") for each in ElementTree.fromstring(body).iter("PartNumber")]
            objects[key] = b"".join(parts[number] for number in wanted)
            result = f"<ETag>{escape(etag(objects[key]))}</ETag>"
            self.answer(200, f"<CompleteMultipartUploadResult>{result}</CompleteMultipartUploadResult>".encode())
        elif self.headers.get("x-goog-if-generation-match") == "0" and key in objects:
            self.refuse(412, "PreconditionFailed")
        else:
            objects[key] = body
            self.answer(200, ETag=etag(body))

    def give(self, key: str) -> None:
        content = self.store.objects.get(key)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if content is None:
            self.refuse(404, "NoSuchKey")
        elif self.command == "DELETE":
            del self.store.objects[key]
            self.answer(204)
        elif found is None:
            self.answer(200, content, ETag=etag(content))
        elif int(found[1]) >= len(content):
            self.refuse(416, "InvalidRange")
        else:
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            shown = f"bytes {first}-{last}/{len(content)}"
            self.answer(206, content[first : last + 1], ETag=etag(content), **{"Content-Range": shown})

    def list_objects(self, prefix: str, after: str) -> None:
        """Objects and folders right below a prefix; obstore asks with the delimiter ``/``."""
        names = {}
        for key, content in self.store.objects.items():
            if key.startswith(prefix):
                first, slash, _ = key.removeprefix(prefix).partition("/")
                names[f"{prefix}{first}{slash}"] = content
        rest = sorted(name for name in names if name > after)
        text = ""
        for name in rest[:_PAGE]:
            if name.endswith("/"):
                text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                told = f"<Key>{escape(name)}</Key>{when}<ETag>{escape(etag(names[name]))}</ETag>"
                text += f"<Contents>{told}<Size>{len(names[name])}</Size></Contents>"
        if len(rest) > _PAGE:
            text += f"<NextContinuationToken>{escape(rest[_PAGE - 1])}</NextContinuationToken>"
        self.answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        told = {"Content-Length": str(len(body)), "Last-Modified": formatdate(usegmt=True), **headers}
        for name, value in told.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    def log_message(self, *_: object) -> None:
        """Tests look at what clients say."""


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:16]}"'
