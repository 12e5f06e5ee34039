"""Object stores that refuse: with the errors of S3, or as they hold another run; nothing trains from or beside them."""

import asyncio
import contextlib
import datetime
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from obstore.exceptions import GenericError

from hetero.elastic import publishing
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.publishing import Publisher
from hetero.elastic.store_connection import RETRIES, fix_of
from hetero.errors import CheckpointError, ObjectStoreError, ObjectStoreRefusedError
from tests.elastic.test_agent import CLUSTER
from tests.elastic.test_object_store import LINEAGE, run, upload_all
from tests.helpers.certificates import make_certificates, make_expired_certificate
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.etcd import EtcdServer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

KEY_ID, SECRET = "a-key-id", "the-secret-of-this-test"


_NO_OBJECTS = (
    b"<ListBucketResult><Name>bucket</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
)


class Refusing:
    """An S3 that answers every request alike, as long as ``answers`` says; and then that all is well, with ``empty``.

    Args:
        certificate: what its PEM file and that of the key are called, without suffixes; without it is no TLS.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self.answers: list[tuple[int, str]] = []
        self.empty = b""
        self.asked = 0
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                refusing.asked += 1
                status, code = refusing.answers.pop(0) if refusing.answers else (200, "")
                body = (
                    f"<Error><Code>{code}</Code><Message>it says</Message></Error>".encode() if code else refusing.empty
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"tag"')
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Tests look at what clients say."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Of clients that end the handshake."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate.with_suffix(".pem"), certificate.with_suffix(".key"))
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"{'http' if certificate is None else 'https'}://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refusing]:
    made = Refusing()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", KEY_ID),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", made.endpoint),
    ):
        monkeypatch.setenv(name, value)
    at_once = {each: datetime.timedelta(seconds=0.01) for each in ("init_backoff", "max_backoff")}
    monkeypatch.setitem(RETRIES, "backoff", at_once)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "says", "fix"),
    [
        ((403, "AccessDenied"), "403 Forbidden.*AccessDenied", "these credentials may not do that"),
        ((401, "InvalidToken"), "401 Unauthorized.*InvalidToken", "set the credentials"),
        ((400, "ExpiredToken"), "400 Bad Request.*ExpiredToken", "start the agents with a new token"),
        ((400, "AuthorizationHeaderMalformed"), "400 Bad Request.*AuthorizationHeaderMalformed", "set AWS_REGION"),
        ((301, "PermanentRedirect"), "incorrectly configured region", "set AWS_REGION"),
        ((403, "RequestTimeTooSkewed"), "403 Forbidden.*RequestTimeTooSkewed", "set the clock"),
        ((404, "NoSuchBucket"), "NoSuchBucket", "check URL, bucket"),
        ((503, "SlowDown"), "503 Service Unavailable.*SlowDown", "it is down or asked too much"),
    ],
)
def test_an_error_of_s3_names_url_key_and_fix_and_no_secret(
    refusing: Refusing, answer: tuple[int, str], says: str, fix: str
) -> None:
    store = ObjectStore("s3://bucket/run")
    for asks, key in (
        (lambda: store.claim_epoch(1, holder="me", lineage=LINEAGE), "epochs/epoch_00000001.json"),
        (store.history, "epochs"),
    ):
        refusing.answers = [answer] * 100
        with pytest.raises(ObjectStoreError, match=rf"object store s3://bucket/run: {key}: .*{says}.*; {fix}") as error:
            run(asks())
        assert SECRET not in str(error.value)
        assert "Debug source" not in str(error.value)
    refusing.answers = [answer] * 100
    with pytest.raises(CheckpointError, match=r"s3://bucket/run/step_00000007/\S+: ") as of_rank:
        store.step(7)
    assert SECRET not in str(of_rank.value)


@pytest.mark.parametrize(
    ("has_expired", "fix"),
    [
        (True, "the certificate of the endpoint has expired: have it renewed, or set the clock of this node"),
        (
            False,
            "the certificate of the endpoint is not trusted here: set SSL_CERT_FILE to the PEM file of the authority",
        ),
    ],
)
def test_a_certificate_that_is_not_taken_is_named(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_expired: bool, fix: str
) -> None:
    make_certificates(tmp_path / "tls", "store")
    if has_expired:
        make_expired_certificate(tmp_path / "tls", "store")
    with contextlib.closing(Refusing(tmp_path / "tls/store")) as over_tls:
        monkeypatch.setenv("AWS_ENDPOINT_URL", over_tls.endpoint)
        with pytest.raises(ObjectStoreRefusedError, match=fix):
            run(ObjectStore("s3://bucket/run").history())


def test_a_password_in_the_endpoint_is_not_shown(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore repeats the URL of a request."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", refusing.endpoint.replace("//", f"//name:{SECRET}@"))
    refusing.answers = [(403, "AccessDenied")] * 100
    with pytest.raises(ObjectStoreRefusedError, match=r"//\*\*\*@127\.0\.0\.1:.*403 Forbidden") as error:
        run(ObjectStore("s3://bucket/run").history())
    assert SECRET not in str(error.value)


def test_no_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As obstore says it where nothing in the environment names any."""
    url = "http://169.254.169.254/latest/api/token"
    assert "no credentials are in the environment" in fix_of(GenericError(f"Error performing PUT {url}: 403 Forbidden"))


def test_a_store_that_is_asked_too_much_is_asked_again(refusing: Refusing) -> None:
    # The claim is put, and cannot be put again.
    refusing.answers = [*[(503, "SlowDown")] * 3, (200, ""), (412, "PreconditionFailed")]
    run(ObjectStore("s3://bucket/run").claim_epoch(1, holder="me", lineage=LINEAGE))
    assert refusing.asked == 5


def publisher(shown: list[str], events: list[str]) -> Publisher:
    return Publisher(
        ObjectStore("s3://bucket/run"),
        membership=SimpleNamespace(),  # type: ignore[arg-type]
        events=SimpleNamespace(note=lambda kind, *, epoch, detail: events.append(detail)),  # type: ignore[arg-type]
        holder="me",
        keep=2,
        show=shown.append,
    )


@pytest.mark.parametrize("answer", [(403, "AccessDenied"), (400, "ExpiredToken"), (404, "NoSuchBucket")])
def test_a_refusal_ends_a_job_that_begins(refusing: Refusing, answer: tuple[int, str]) -> None:
    shown: list[str] = []
    events: list[str] = []
    refusing.answers = [answer] * 100
    with pytest.raises(ObjectStoreRefusedError, match=answer[1]):
        run(publisher(shown, events).refresh(patience_s=60.0, waits_for_fix=False))
    assert refusing.asked == 1
    assert [answer[1] in event for event in events] == [True]
    assert not shown, "the end of the job says it"


@pytest.mark.parametrize(
    ("answers", "waits_for_fix"),
    [
        # Somebody corrects the policy, and the copies of all nodes are lost; or the store is busy when a job begins.
        ([(403, "AccessDenied")], True),
        ([(503, "SlowDown")] * 5, False),
    ],
)
def test_what_may_pass_is_said_at_once_and_asked_again(
    refusing: Refusing, monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, str]], waits_for_fix: bool
) -> None:
    shown: list[str] = []
    events: list[str] = []
    monkeypatch.setattr(publishing, "_RETRY_S", 0.01)
    refusing.answers = list(answers)
    refusing.empty = _NO_OBJECTS
    run(publisher(shown, events).refresh(patience_s=60.0, waits_for_fix=waits_for_fix))
    (said,) = shown
    assert re.fullmatch(
        rf"hetero: object store s3://bucket/run: .*{answers[0][1]}.*; it is asked again for 60 s \(--wait-for-nodes\)",
        said,
    )
    assert len(events) == 1


def test_the_end_says_what_the_store_has_said(refusing: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", 0.05)
    refusing.answers = [(403, "AccessDenied")] * 1000
    with pytest.raises(ObjectStoreRefusedError, match=r"AccessDenied.*these credentials may not do that"):
        run(publisher([], []).refresh(patience_s=0.5))
    assert refusing.asked > 1


def test_a_store_that_stays_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers."""
    monkeypatch.setattr(publishing, "_SILENT_S", 0.05)
    shown: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        with pytest.raises(ObjectStoreError, match=r"no answer within 0\.5 s"):
            run(publisher(shown, []).refresh(patience_s=0.5))
    assert shown == ["hetero: object store s3://bucket/run: no answer; it is asked again for 0.5 s (--wait-for-nodes)"]


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_an_agent_ends_before_its_ranks_begin(
    refusing: Refusing, etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a store that has a run of another model, at one that does not answer, and at one that refuses: three jobs."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ["tests/helpers/fake_program.py", "--hetero-cluster", str(tmp_path / "cluster.yaml")]
    other, away, denied = f"file://{tmp_path}/store", "s3://away/run", "s3://denied/run"
    asyncio.run(_fill(ObjectStore(other), tmp_path))
    refusing.answers = [(403, "AccessDenied")] * 1000
    endpoints = {away: "http://127.0.0.1:9", denied: refusing.endpoint}
    expected = {
        other: ["it holds a run of another model: .*; give this job an --object-store of its own"],
        away: [
            r"(.*127.0.0.1:9.*; check URL, bucket.*|no answer); it is asked again for 8 s \(--wait-for-nodes\)",
            ".*127.0.0.1:9.*; check URL, bucket|no answer within 8 s; is it reachable from here",
        ],
        # At once: within the patience of this test.
        denied: [".*AccessDenied.*; these credentials may not do that"],
    }
    with contextlib.ExitStack() as ended:
        jobs: list[ElasticCluster] = []
        for i, url in enumerate(expected):
            (folder := tmp_path / str(i)).mkdir()
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoints.get(url, ""))
            options = {"object-store": url, "wait-for-nodes": 1000 if url == denied else 8}
            nodes = ElasticCluster(folder, etcd, f"{job}-{i}", types={"a": "box"}, words=words, options=options)
            jobs.append(ended.enter_context(nodes))
            nodes.start()
        for nodes, (url, problems) in zip(jobs, expected.items(), strict=True):
            assert nodes.wait_for_end() == {"a": 2}
            said = [line for line in nodes.output("a").splitlines() if line.startswith("hetero: object store")]
            for line, problem in zip(said, problems, strict=True):
                assert re.match(rf"hetero: object store {url}: ({problem})", line)
            assert SECRET not in nodes.output("a")
            assert not nodes.events("forked", "epoch_made")


async def _fill(store: ObjectStore, folder: Path) -> None:
    await store.claim_epoch(4, holder="another job", lineage=LINEAGE)
    await upload_all(store, folder / "slots", step=100)
