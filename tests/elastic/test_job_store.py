"""The keys of a job in a real etcd, also where somebody else has written what cannot be read."""

import base64
from collections.abc import Callable

import pytest
import requests

from hetero.elastic.etcd import delete_request
from hetero.elastic.job_store import JobStore
from hetero.elastic.membership import Membership
from hetero.elastic.records import NodeReport, Notice, Outcome, RankReport, RestorePoint
from hetero.errors import ConfigError
from hetero.serialization import to_json
from tests.helpers.etcd import EtcdServer
from tests.helpers.job_records import SETTINGS, epoch, node
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

NO_TEXT = b"\xff\xfe\x00"


@pytest.fixture
def put(etcd: EtcdServer, job: str) -> Callable[[str | bytes, bytes], None]:
    """Writes any bytes under a key of the job."""

    def write(key: str | bytes, value: bytes) -> None:
        name = f"/hetero/{job}/".encode() + (key.encode() if isinstance(key, str) else key)
        request = {"key": base64.b64encode(name).decode(), "value": base64.b64encode(value).decode()}
        requests.post(f"{etcd.url}/v3/kv/put", json=request, timeout=10).raise_for_status()

    return write


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("nodes/zz", NO_TEXT, "no text in UTF-8"),
        ("nodes/zz", b"", "it is empty"),
        ("nodes/zz", b"[1]", "nodes/zz"),
        ("nodes/zz", b"x" * 1_000_000, "nodes/zz"),
        ("nodes/zz", b"[" * 1000, "nodes/zz"),
        ("nodes/zz", to_json(node("a")).encode(), "its value is of node 'a'"),
        ("reports/zz", NO_TEXT, "no text in UTF-8"),
        ("notices/zz", b'{"node": "zz", "version": "9.1"}', "missing key 'reason'; version 9.1 of megatron-hetero"),
        ("notices/zz", b'{"node": "zz", "reason": "\\ud800"}', "notices/zz"),
        ("nodes/" + "z" * 10_000, NO_TEXT, "no text in UTF-8"),
        ("bad/zz", b"bad", "does not end with NODE/EPOCH/STEP/UNIT"),
        ("stored", b'{"epoch": 1}', "missing key 'step'"),
        ("committed", b"many", "no number: 'many'"),
        ("committed", b"9" * 5000, "no number"),
        ("committed", "\u0663".encode(), "no number"),
    ],
)
def test_a_value_that_cannot_be_read_is_named_and_stops_nothing(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None], key: str, value: bytes, problem: str
) -> None:
    member = join("a")
    put(key, value)
    wait_until(lambda: key in member.state.unreadable)
    said = member.state.unreadable[key]
    assert problem in said
    assert key[:50] in said
    assert len(said) < 500
    assert set(member.state.nodes) == {"a"}
    member.put_notice(Notice(node="a", reason="leave"))
    wait_until(lambda: "a" in member.state.notices)
    assert (member.trouble, member.failure) == (None, None)


def test_keys_and_texts_of_any_bytes(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None]
) -> None:
    member = join("a")
    assert member.lead()
    assert member.make_epoch(epoch(1), after_revision=0)
    put(b"note-\xff", NO_TEXT)
    put("broken/1", b"")
    put("stop/1", NO_TEXT)
    wait_until(lambda: member.state.stop is not None)
    assert member.state.broken, "that the key is there is what counts"
    assert not member.state.unreadable, "nobody reads the note"


@pytest.mark.parametrize("value", [NO_TEXT, b"", b"{}"])
def test_what_is_known_stays_when_its_key_cannot_be_read(
    join: Callable[..., Membership],
    put: Callable[[str | bytes, bytes], None],
    etcd: EtcdServer,
    job: str,
    value: bytes,
) -> None:
    """The next epoch writes its key again, and the next committed step its own."""
    member = join("a")
    token = member.claim_token()
    member.agree_on_settings(SETTINGS)
    assert member.lead()
    assert member.make_epoch(epoch(1), after_revision=0)
    member.report_stored(RestorePoint(epoch=1, step=3))
    put("committed", b"7")
    wait_until(lambda: member.state.committed == 7)
    keys = {"epoch", "settings", "stored", "committed"}
    for key in keys:
        put(key, value)
    if value != b"{}":
        put("token", value)
        keys.add("token")
    wait_until(lambda: set(member.state.unreadable) == keys)
    state = member.state
    assert (state.token if "token" in keys else token) == token
    assert (state.settings, state.epoch, state.committed) == (SETTINGS, epoch(1), 7)
    assert state.stored == RestorePoint(epoch=1, step=3)
    assert member.went_back is None
    # Without what was known before, no agent joins.
    with pytest.raises(ConfigError, match=rf"{job}/(token|epoch): .*hetero elastic forget"):
        Membership(etcd.address, job, lease_s=2, on_change=lambda: None).start()
    assert member.make_epoch(epoch(2), after_revision=state.epoch_revision)
    rank = RankReport(epoch=2, rank=0, phase="step", step=10, committed=9)
    member.report(NodeReport(node="a", incarnation="first of a", ended=1, ranks=(rank,)))
    wait_until(lambda: (member.state.epoch, member.state.committed) == (epoch(2), 9))
    assert not {"epoch", "committed"} & set(member.state.unreadable)


def test_something_was_committed_where_nobody_can_read_what(
    put: Callable[[str | bytes, bytes], None], etcd: EtcdServer, job: str
) -> None:
    put("committed", NO_TEXT)
    assert JobStore(etcd.address, job).read().committed == 1


def test_settings_that_cannot_be_read_are_refused_by_name(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None], etcd: EtcdServer, job: str
) -> None:
    join("a")
    put("settings", NO_TEXT)
    late = Membership(etcd.address, job, lease_s=2, on_change=lambda: None)
    try:
        late.start()
        with pytest.raises(ConfigError, match=rf"{job}/settings: no text"):
            late.agree_on_settings(SETTINGS)
    finally:
        late.close()


def test_a_leader_that_is_no_node_gives_way(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None]
) -> None:
    first, second = join("a"), join("b")
    put("leader", NO_TEXT)
    wait_until(lambda: all("leader" in member.state.revisions for member in (first, second)))
    assert (first.state.leader, second.state.leader) == (None, None)
    assert first.lead()
    assert not second.lead(), "the key has changed since it was seen, or its node is seen"
    wait_until(lambda: second.state.leader == "first of a")
    assert not second.lead()


def test_a_place_with_a_value_that_cannot_be_read_is_taken_back(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None]
) -> None:
    member = join("a")
    put("nodes/a", NO_TEXT)
    wait_until(lambda: member.evicted)
    wait_until(lambda: "nodes/a" not in member.state.revisions or member.join(node("a", "second")))
    if member.evicted:
        assert member.join(node("a", "second"))
    wait_until(lambda: member.state.nodes.get("a") == node("a", "second"))


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_report_that_is_lost_is_written_again(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None], job: str, is_deleted: bool
) -> None:
    """Others wait for it, and its node has nothing new to say."""
    member = join("a")
    report = NodeReport(node="a", incarnation="first of a", ended=3, ranks=())
    member.report(report)
    wait_until(lambda: member.state.reports == {"a": report})
    revision = member.state.revisions["reports/a"]
    put("reports/a", NO_TEXT)
    if is_deleted:
        member._writer.write([], [delete_request(f"/hetero/{job}/reports/a")])
    wait_until(lambda: member.state.reports == {"a": report} and member.state.revisions["reports/a"] > revision)


def test_a_notice_of_a_newer_version(
    join: Callable[..., Membership], put: Callable[[str | bytes, bytes], None]
) -> None:
    member = join("a")
    put("notices/zz", b'{"node": "zz", "reason": "r", "seconds": null, "newer": 1, "version": "9.1"}')
    wait_until(lambda: "zz" in member.state.notices)
    assert member.state.notices["zz"] == Notice(node="zz", reason="r", version="9.1")
    assert not member.state.unreadable


def test_a_job_is_reopened_once_and_forgotten_when_nobody_is_in_it(
    join: Callable[..., Membership], etcd: EtcdServer, job: str
) -> None:
    store = JobStore(etcd.address, job)
    member = join("a")
    member.agree_on_settings(SETTINGS)
    assert member.lead()
    member.finish(Outcome(exit_code=1, reason="given up"))
    ended = store.read()
    other = type(SETTINGS)(program="other.py", flags=(), versions={})
    assert not member.reopen(ended.outcome_revision - 1, other)
    assert member.reopen(ended.outcome_revision, other)
    assert not member.reopen(ended.outcome_revision, SETTINGS)
    assert (store.read().outcome, store.read().settings) == (None, other)
    assert not store.forget()
    assert store.read().settings == other
    member.close()
    assert store.forget()
    assert not store.read().revisions, "a job without a token has no copies"
