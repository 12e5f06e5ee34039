"""Object stores that refuse: with the errors of S3, or as they hold another run; nothing trains from or beside them."""

import asyncio
import contextlib
import datetime
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hetero.elastic.object_store import ObjectStore
from hetero.elastic.store_connection import RETRIES
from hetero.errors import CheckpointError, ObjectStoreError
from tests.elastic.test_agent import CLUSTER
from tests.elastic.test_object_store import LINEAGE, run, upload_all
from tests.helpers.elastic_cluster import ElasticCluster
from tests.helpers.etcd import EtcdServer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

KEY_ID, SECRET = "a-key-id", "the-secret-of-this-test"


class Refusing:
    """An S3 that answers every request alike, as long as ``answers`` says; and then that all is well."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = []
        self.asked = 0
        refusing = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                refusing.asked += 1
                status, code = refusing.answers.pop(0) if refusing.answers else (200, "")
                body = f"<Error><Code>{code}</Code><Message>it says</Message></Error>".encode() if code else b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"tag"')
                self.end_headers()
                self.wfile.write(body if self.command != "HEAD" else b"")

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                """Tests look at what clients say."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

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


def test_a_store_that_is_asked_too_much_is_asked_again(refusing: Refusing) -> None:
    # The claim is put, and cannot be put again.
    refusing.answers = [*[(503, "SlowDown")] * 3, (200, ""), (412, "PreconditionFailed")]
    run(ObjectStore("s3://bucket/run").claim_epoch(1, holder="me", lineage=LINEAGE))
    assert refusing.asked == 5


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_an_agent_ends_before_its_ranks_begin(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a store that has a run of another model, and at one that does not answer: two jobs beside one another."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = ["tests/helpers/fake_program.py", "--hetero-cluster", str(tmp_path / "cluster.yaml")]
    other = f"file://{tmp_path}/store"
    asyncio.run(_fill(ObjectStore(other), tmp_path))
    expected = {
        other: "it holds a run of another model: .*; give this job an --object-store of its own",
        "s3://bucket/run": ".*127.0.0.1:9.*; check URL, bucket|no answer within 8 s; is it reachable from here",
    }
    with contextlib.ExitStack() as ended:
        jobs: list[ElasticCluster] = []
        for i, url in enumerate(expected):
            (folder := tmp_path / str(i)).mkdir()
            options = {"object-store": url, "wait-for-nodes": 8}
            nodes = ElasticCluster(folder, etcd, f"{job}-{i}", types={"a": "box"}, words=words, options=options)
            jobs.append(ended.enter_context(nodes))
            nodes.start()
        for nodes, (url, problem) in zip(jobs, expected.items(), strict=True):
            assert nodes.wait_for_end() == {"a": 2}
            (said,) = [line for line in nodes.output("a").splitlines() if line.startswith("hetero: object store")]
            assert re.match(rf"hetero: object store {url}: ({problem})", said)
            assert SECRET not in nodes.output("a")
            assert not nodes.events("forked", "epoch_made")


async def _fill(store: ObjectStore, folder: Path) -> None:
    await store.claim_epoch(4, holder="another job", lineage=LINEAGE)
    await upload_all(store, folder / "slots", step=100)
