"""An etcd that is full or slow, refuses, went back, or is behind a proxy: what a node sees, and how often it asks."""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
from etcd3gw.exceptions import Etcd3Exception

from hetero.elastic.etcd import EtcdAddress, EtcdConnection, check_watch, put_request
from hetero.elastic.job_store import JobState
from hetero.elastic.membership import Membership
from hetero.elastic.records import Notice
from hetero.elastic.store_health import LeasePace, Pauses, StoreHealth
from hetero.errors import ConfigError, MembershipStoreError, StoreRefusalError
from tests.helpers.etcd import EtcdServer
from tests.helpers.etcd_proxy import EtcdProxy
from tests.helpers.job_records import epoch, node
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

REQUESTS_PER_S = 2.0
"""Of an idle agent, or of one whose etcd is behind a proxy that refuses."""

SECONDS = 4.0
"""For which requests are counted."""


def post(server: EtcdServer, path: str, **request: object) -> requests.Response:
    return requests.post(f"{server.url}/v3/{path}", json=request, timeout=10)


@pytest.fixture
def full_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """One with room for a few megabytes."""
    server = EtcdServer(tmp_path / "data", quota_bytes=8 << 20)
    server.start()
    yield server
    server.stop()


def test_an_etcd_without_room(join: Callable[..., Membership], full_etcd: EtcdServer) -> None:
    """Said with etcd's words; over as soon as there is room, without a write of the agent's."""
    member = join("a", address=full_etcd.address)
    full_etcd.fill()
    with pytest.raises(StoreRefusalError, match=r"database space exceeded.*compact, defragment, and disarm"):
        member.put_notice(Notice(node="a", reason="leave"))
    trouble = member.trouble
    assert trouble is not None
    assert trouble.takes_no_writes
    assert "database space exceeded" in trouble.problem
    # The lease is kept, and reads go on, for longer than the lease.
    time.sleep(2.5)
    assert member.trouble is not None
    assert member.trouble.since_s == trouble.since_s
    assert not member.evicted
    full_etcd.free()
    wait_until(lambda: member.trouble is None)
    member.put_notice(Notice(node="a", reason="leave"))
    wait_until(lambda: "a" in member.state.notices)


def test_writes_that_take_too_long(join: Callable[..., Membership], etcd: EtcdServer) -> None:
    """As on a disk that stands still for seconds."""
    with EtcdProxy(etcd.url) as proxy:
        member = join("a", address=EtcdAddress(urls=(proxy.url,)))
        try:
            proxy.write_delay_s = 6.0
            with pytest.raises(MembershipStoreError, match=r"does not answer .*timed out"):
                member.put_notice(Notice(node="a", reason="leave"))
            wait_until(lambda: member.trouble is not None and member.trouble.takes_no_writes)
            proxy.write_delay_s = 0.0
            wait_until(lambda: member.trouble is None)
        finally:
            member.close()


@pytest.mark.slow
def test_requests_per_second(etcd: EtcdServer) -> None:
    """Idle, then behind a proxy that answers 503 at once, which a node's writes do not change; then it is back."""
    with EtcdProxy(etcd.url) as short, EtcdProxy(etcd.url) as long:
        proxies = {3: short, 10: long}
        members = [
            Membership(EtcdAddress(urls=(proxy.url,)), f"rate-{lease_s}", lease_s=lease_s, on_change=lambda: None)
            for lease_s, proxy in proxies.items()
        ]

        def assert_few_requests(meanwhile: Callable[[], None]) -> None:
            time.sleep(1)
            for proxy in proxies.values():
                proxy.requests.clear()
            end_s = time.monotonic() + SECONDS
            while time.monotonic() < end_s:
                meanwhile()
                time.sleep(0.05)
            for proxy in proxies.values():
                # At the edges of the time there may be one more of each kind.
                assert proxy.requests.total() <= REQUESTS_PER_S * SECONDS + 3, proxies

        def fail_to_write() -> None:
            for member in members:
                with pytest.raises(MembershipStoreError, match=r"does not answer .*Service Unavailable"):
                    member.put_notice(Notice(node="a", reason="leave"))

        try:
            for member in members:
                member.start()
                assert member.join(node("a"))
            assert [member.lease_s for member in members] == [3, 10]
            assert_few_requests(lambda: None)
            for proxy in proxies.values():
                proxy.own_answer = (503, "no server is available")
            wait_until(lambda: all(member.trouble is not None for member in members))
            assert_few_requests(fail_to_write)
            for proxy in proxies.values():
                proxy.own_answer = None
            wait_until(lambda: all(member.trouble is None for member in members))
            for member in members:
                member.put_notice(Notice(node="a", reason="leave"))
            wait_until(lambda: all("a" in member.state.notices for member in members))
        finally:
            for member in members:
                member.close()


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (200, "<html>log in</html>", "what listens there answers in another way than etcd"),
        (200, "", "what listens there answers in another way than etcd"),
        (200, "[]", "what listens there answers in another way than etcd"),
        (302, "", "HTTP 302 Found"),
        (401, "<html>", "HTTP 401 Unauthorized"),
        (502, "<html>", "HTTP 502 Bad Gateway"),
    ],
)
def test_a_proxy_that_answers_by_itself(etcd: EtcdServer, status: int, text: str, words: str) -> None:
    """It is named, and asked once for each request: a redirect to itself is not followed."""
    with EtcdProxy(etcd.url) as proxy, contextlib.closing(EtcdConnection(EtcdAddress(urls=(proxy.url,)))) as connection:
        proxy.own_answer = (status, text)
        with pytest.raises(MembershipStoreError, match=rf"does not answer \({words}\)"):
            connection.read("/job/")
        with pytest.raises(MembershipStoreError, match=rf"does not answer \(({words}|.* ended the watch)\)"):
            next(connection.changes("/job/"))
        assert proxy.requests.total() == 2


def test_a_read_waits_for_a_slow_disk_where_no_other_member_is_left(etcd: EtcdServer) -> None:
    with EtcdProxy(etcd.url) as first, EtcdProxy(etcd.url) as second:
        first.read_delay_s = second.read_delay_s = 2.5
        for urls in ((first.url,), (second.url, first.url)):
            with contextlib.closing(EtcdConnection(EtcdAddress(urls=urls))) as connection:
                assert connection.read("/job/").revision > 0
        assert (first.requests.total(), second.requests.total()) == (2, 1)


def test_a_slow_etcd_gets_signs_of_life_more_often() -> None:
    """The next wait for its disk may take most of the lease; but one that is away is not asked more often."""
    pace = LeasePace()
    pace.note_answer(3, 100, took_s=1.4)
    assert pace.pause_s(3, 100, answers_reads=True) == 0.75
    pace.note_answer(3, 100, took_s=1.6)
    assert pace.pause_s(3, 111, answers_reads=True) == 0.375
    assert pace.pause_s(3, 111, answers_reads=False) == 0.75
    assert pace.pause_s(3, 112, answers_reads=True) == 0.75


@pytest.mark.slow
def test_watches_that_end_at_once_are_made_slowly(join: Callable[..., Membership], etcd: EtcdServer) -> None:
    with EtcdProxy(etcd.url) as proxy:
        proxy.drops_watches = True
        member = join("a", address=EtcdAddress(urls=(proxy.url,)))
        time.sleep(1)
        proxy.requests.clear()
        time.sleep(SECONDS)
        assert proxy.requests["/v3/watch"] <= SECONDS / 2.0 + 2
        member.close()


def test_the_watch_leaves_a_member_that_stands_still(join: Callable[..., Membership], etcd: EtcdServer) -> None:
    """As soon as a read has found another one that answers."""
    with EtcdProxy(etcd.url) as first, EtcdProxy(etcd.url) as second:
        member = join("a", address=EtcdAddress(urls=(first.url, second.url)))
        wait_until(lambda: first.requests["/v3/watch"] == 1)
        first.is_silent = True
        wait_until(lambda: second.requests["/v3/watch"] == 1)
        assert first.requests["/v3/watch"] == 1
        assert (member.trouble, member.failure) == (None, None)
        member.close()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b'{"result": {"canceled": true, "compact_revision": "7"}}', "it has ended the watch"),
        (b'{"result": {"created": true, "canceled": true, "cancel_reason": "permission denied"}}', "permission denied"),
        (b'{"error": {"http_code": 503, "message": "no leader"}}', "no leader"),
        (b"<html>", "answers in another way"),
        (b"[]", "answers in another way"),
    ],
)
def test_a_watch_that_etcd_ends(message: bytes, words: str) -> None:
    check_watch(b'{"result": {"created": true}}')
    check_watch(b'{"result": {"events": [{}]}}')
    with pytest.raises(Etcd3Exception, match=words):
        check_watch(message)


def test_an_etcd_that_was_restored_is_noticed(join: Callable[..., Membership], job: str, tmp_path: Path) -> None:
    """On a copy of its data from before the epoch: by its revision, and by its epoch where the revision has grown."""
    server = EtcdServer(tmp_path / "data")
    server.start()
    try:
        first, second = join("a", address=server.address), join("b", address=server.address)
        assert first.lead()
        assert first.make_epoch(epoch(1), after_revision=0)
        wait_until(lambda: first.state.epoch == epoch(1) == second.state.epoch)
        server.stop()
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        server.start()
        wait_until(lambda: first.trouble is None and second.trouble is None)
        # The same data again after a restart is nothing.
        assert (first.went_back, second.went_back) == (None, None)
        assert first.make_epoch(epoch(2), after_revision=first.state.epoch_revision)
        wait_until(lambda: first.state.epoch == epoch(2) == second.state.epoch)
        server.stop()
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(tmp_path / "copy", tmp_path / "data")
        server.start()
        wait_until(lambda: first.went_back is not None and second.went_back is not None)
        assert "went back to an earlier state" in str(first.went_back)
        # Nothing is changed there any more, and what was known stays.
        assert first.state.epoch == epoch(2)
        with pytest.raises(MembershipStoreError, match="went back"):
            first.put_notice(Notice(node="a", reason="leave"))
    finally:
        for member in (first, second):
            member.close()
        server.stop()


def state(number: int | None, *, token: str = "t", unreadable: str = "", reason: str = "test") -> JobState:
    made = None if number is None else dataclasses.replace(epoch(number), reason=reason)
    return JobState(token=token, epoch=made, unreadable={unreadable: "x"} if unreadable else {})


@pytest.mark.parametrize(
    ("known", "read", "sign"),
    [
        (state(3), state(2), "it has epoch 2, and had epoch 3 before"),
        (state(3), state(None), "it has epoch none, and had epoch 3 before"),
        (state(3), state(3, reason="another"), "it has another epoch 3 than before"),
        (state(3), state(3), ""),
        (state(3), state(4), ""),
        (state(None), state(1), ""),
        # Another job, or none any more: that is known by its token.
        (state(3), state(1, token="other"), ""),
        # It will be written again.
        (state(3), state(None, unreadable="epoch"), ""),
    ],
)
def test_an_epoch_that_went_back(known: JobState, read: JobState, sign: str) -> None:
    health = StoreHealth("etcd at URL")
    health.check_epoch(read, known=known)
    assert (sign in str(health.went_back)) if sign else health.went_back is None


def test_a_revision_counts_against_what_was_known_when_it_was_asked() -> None:
    health = StoreHealth("etcd at URL")
    health.check_revision(5, seen=0)
    # Asked before the 5 had come.
    health.check_revision(4, seen=3)
    assert (health.went_back, health.newest_revision) == (None, 5)
    health.check_revision(4, seen=health.newest_revision)
    said = health.went_back
    assert "its revision is 4, and was 5 before" in str(said)
    health.check_revision(9, seen=health.newest_revision)
    assert health.went_back == said


def test_trouble_lasts_from_its_first_sign_to_a_success_of_its_kind() -> None:
    health = StoreHealth("etcd at URL")

    def fail(kind: str, error: MembershipStoreError) -> None:
        with pytest.raises(MembershipStoreError), getattr(health, kind)():
            raise error

    assert health.trouble is None
    fail("writing", MembershipStoreError("gone"))
    first = health.trouble
    assert first is not None
    assert not first.takes_no_writes, "no read has been tried since"
    fail("reading", MembershipStoreError("gone too"))
    both = health.trouble
    assert both is not None
    assert (both.since_s, both.problem, both.takes_no_writes) == (first.since_s, "gone too", False)
    with pytest.raises(MembershipStoreError, match="gone too"), health.writing(is_try=True):
        pytest.fail("it is asked although reads fail")
    with health.reading():
        pass
    writes = health.trouble
    assert writes is not None
    assert (writes.since_s, writes.takes_no_writes) == (first.since_s, True)
    assert "answers reads, but no write in time" in writes.problem
    with pytest.raises(MembershipStoreError, match="gone"), health.writing():
        pytest.fail("it is asked although writes fail")
    with health.writing(is_try=True):
        pass
    assert health.trouble is None
    fail("writing", StoreRefusalError("full"))
    assert health.trouble is not None
    assert health.trouble.takes_no_writes


def test_a_write_that_has_waited_in_vain_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a slow disk each write may be the one that is done in time; a fast refusal is left to the tries."""
    health, now_s = StoreHealth("etcd at URL"), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def wait_in_vain() -> None:
        nonlocal now_s
        with health.writing():
            now_s += 2.0
            raise MembershipStoreError("timed out")

    with pytest.raises(MembershipStoreError, match="timed out"):
        wait_in_vain()
    with health.writing():
        pass
    assert health.trouble is None


def test_pauses_have_a_limit() -> None:
    pauses, seen = Pauses(), []
    for _ in range(5):
        seen.append(pauses.seconds)
        pauses.grow()
    assert seen == [0.25, 0.5, 1.0, 2.0, 2.0]
    pauses.reset()
    assert pauses.seconds == 0.25


def test_the_end_of_a_thread_is_known(join: Callable[..., Membership], monkeypatch: pytest.MonkeyPatch) -> None:
    member = join("a")
    woken: list[int] = []
    monkeypatch.setattr(member, "_on_change", lambda: woken.append(1))

    def fail() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(member._reader, "read", fail)
    wait_until(lambda: member.failure is not None and bool(woken))
    assert str(member.failure) == "a bug"


def test_what_etcd_refuses_is_told_in_its_words(etcd: EtcdServer, tmp_path: Path) -> None:
    connection = EtcdConnection(etcd.address)
    with pytest.raises(ConfigError, match=r"refuses a request of 2,\d+,\d+ bytes .*too large.*--max-request-bytes"):
        connection.transaction(conditions=[], then=[put_request("/test/large", "x" * 2_000_000)])
    lease = connection.grant(60).number
    connection.revoke(lease)
    # It is over: nothing is left to do.
    connection.revoke(lease)
    assert not connection.keep_alive(lease)
    with pytest.raises(StoreRefusalError, match=r"refuses a request \(etcdserver: requested lease not found\)"):
        connection.transaction(conditions=[], then=[put_request("/test/late", "x", lease=lease)])


def test_a_refusal_is_not_repeated_at_other_members(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "data")
    server.start()
    try:
        with EtcdProxy(server.url) as first, EtcdProxy(server.url) as second:
            connection = EtcdConnection(EtcdAddress(urls=(first.url, second.url)))
            connection.read("/")
            for path, request in (
                ("auth/user/add", {"name": "root", "password": "pw"}),
                ("auth/role/add", {"name": "root"}),
                ("auth/user/grant", {"user": "root", "role": "root"}),
                ("auth/enable", {}),
            ):
                post(server, path, **request)
            with pytest.raises(StoreRefusalError, match=r"user name is empty\); agents give no user.*auth disable"):
                connection.read("/")
            assert (first.requests.total(), second.requests.total()) == (2, 0)
            # A proxy's answer is none of etcd's.
            first.own_answer = (503, "")
            with pytest.raises(StoreRefusalError):
                connection.read("/")
            assert (first.requests.total(), second.requests.total()) == (3, 1)
            second.own_answer = (503, "")
            with pytest.raises(MembershipStoreError, match=r"does not answer .*Service Unavailable"):
                connection.read("/")
            # Both were asked; from now on one at a time is.
            with pytest.raises(MembershipStoreError, match="does not answer"):
                connection.read("/")
            assert first.requests.total() + second.requests.total() == 7
    finally:
        server.stop()


def test_a_lease_is_as_long_as_etcd_grants(tmp_path: Path, job: str) -> None:
    """At least one and a half times its election timeout."""
    server = EtcdServer(tmp_path / "data", election_timeout_ms=5000)
    server.start()
    try:
        member = Membership(server.address, job, lease_s=3, on_change=lambda: None)
        member.start()
        assert member.lease_s == 3
        assert member.join(node("a"))
        assert member.lease_s == 8
        member.close()
    finally:
        server.stop()
