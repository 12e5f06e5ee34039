"""A node's place in a job, in a real etcd."""

import dataclasses
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.job_store import JobState, JobStore
from hetero.elastic.leader import Leader
from hetero.elastic.leadership import LeaderSettings
from hetero.elastic.membership import Membership
from hetero.elastic.records import (
    JobSettings,
    NodeReport,
    Notice,
    Outcome,
    RankReport,
)
from hetero.elastic.stragglers import StragglerSettings
from hetero.errors import ConfigError, MembershipStoreError
from tests.helpers.etcd import EtcdServer
from tests.helpers.job_records import SETTINGS, epoch, node
from tests.helpers.ports import free_ports
from tests.helpers.waiting import wait_until


def test_members_see_what_others_say(join: Callable[..., Membership]) -> None:
    first, second = join("a"), join("b")
    wait_until(lambda: set(first.state.nodes) == {"a", "b"} == set(second.state.nodes))
    first.report(NodeReport(node="a", incarnation="first of a", ended=0, ranks=()))
    leave = Notice(node="b", reason="leave", seconds=120.0)
    second.put_notice(leave)
    wait_until(lambda: "a" in second.state.reports and first.state.notices == {"b": leave})
    second.withdraw_notice("b")
    second.close()
    wait_until(lambda: set(first.state.nodes) == {"a"} and not first.state.notices)


def test_one_leader_makes_one_epoch(join: Callable[..., Membership]) -> None:
    first, second = join("a"), join("b")
    assert first.lead()
    assert not second.lead()
    assert not second.make_epoch(epoch(1), after_revision=0)
    assert first.make_epoch(epoch(1), after_revision=0)
    assert not first.make_epoch(epoch(2), after_revision=0), "it does not know the epoch that there is"
    wait_until(lambda: second.state.epoch == epoch(1))
    second.break_epoch(1, "b lost a rank")
    second.break_epoch(1, "another reason")
    first.request_stop(1, "b joins")
    second.request_stop(1, "who does not lead asks for nothing")
    wait_until(lambda: (first.state.broken, first.state.stop) == ("b lost a rank", "b joins"))
    assert not first.state.is_stop_for_good
    first.request_stop(1, "all nodes leave", is_for_good=True)
    wait_until(lambda: first.state.is_stop_for_good and first.state.stop == "all nodes leave")
    assert first.make_epoch(epoch(2), after_revision=first.state.epoch_revision)
    wait_until(lambda: second.state.epoch == epoch(2))
    assert (second.state.broken, second.state.stop, second.state.is_stop_for_good) == (None, None, False)
    first.close()
    wait_until(lambda: second.state.leader is None)
    assert second.lead()
    second.finish(Outcome(exit_code=0, reason="done"))
    wait_until(lambda: second.state.outcome == Outcome(exit_code=0, reason="done"))


def test_what_was_committed_is_known_when_all_who_said_so_are_gone(
    join: Callable[..., Membership], etcd: EtcdServer, job: str
) -> None:
    def said(name: str, committed: int) -> NodeReport:
        rank = RankReport(epoch=1, rank=0, phase="step", step=committed + 1, committed=committed)
        return NodeReport(node=name, incarnation=f"first of {name}", ended=0, ranks=(rank,))

    first, second = join("a"), join("b")
    assert first.state.committed == 0
    first.report(said("a", 0))
    assert JobStore(etcd.address, job).read().committed == 0
    first.report(said("a", 9))
    # It has not seen the other's yet, or has: less it does not become.
    second.report(said("b", 7))
    assert JobStore(etcd.address, job).read().committed == 9
    first.report(said("a", 10))
    assert JobStore(etcd.address, job).read().committed == 9, "so soon again it is not noted"
    for member in (first, second):
        member.close()
    state = join("c").state
    assert (dict(state.reports), state.committed) == ({}, 9)


def test_a_new_leader_does_not_begin_anew_what_was_committed() -> None:
    """The nodes that had copies are gone, in the first epoch: the run has been lost, and has not just begun."""
    tools = types.SimpleNamespace(
        settings=LeaderSettings(), publisher=None, problem=None, stragglers=StragglerSettings(), forget="", show=print
    )
    leader = Leader(node("c"), tools)  # type: ignore[arg-type]
    for committed, begins in ((0, True), (9, False)):
        restore = leader._search.history(JobState(epoch=epoch(1), committed=committed)).restore
        assert (restore is not None and restore.start.step == 0) == begins


def test_a_node_that_is_evicted_notices_and_comes_back(join: Callable[..., Membership]) -> None:
    first, second = join("a"), join("b")
    assert first.lead()
    first.evict(dataclasses.replace(node("b"), incarnation="another"))
    first.evict(node("b"))
    wait_until(lambda: second.evicted and "b" not in first.state.nodes)
    wait_until(lambda: "b" not in second.state.nodes)
    assert second.join(node("b", "second"))
    wait_until(lambda: first.state.nodes.get("b") == node("b", "second"))
    assert not second.evicted


@pytest.mark.slow
def test_a_lease_that_nobody_keeps_ends(join: Callable[..., Membership], etcd: EtcdServer, job: str) -> None:
    first, second = join("a"), join("b")
    # As if the process stood still.
    second._stay = None  # type: ignore[method-assign]
    second._lease = None
    wait_until(lambda: set(first.state.nodes) == {"a"})
    wait_until(lambda: second.evicted)


def test_a_place_is_taken_by_one(join: Callable[..., Membership], etcd: EtcdServer, job: str) -> None:
    join("a")
    late = Membership(etcd.address, job, lease_s=2, on_change=lambda: None)
    try:
        # It has read nothing yet, so it takes the place for free.
        assert not late.join(node("a", "second"))
        assert late.state.nodes["a"] == node("a")
        # Whoever knows who was there may follow it: an agent that was started again.
        assert late.join(node("a", "second"))
        assert JobStore(etcd.address, job).read().nodes["a"] == node("a", "second")
    finally:
        late.close()


def test_one_token_and_one_set_of_settings(join: Callable[..., Membership]) -> None:
    first, second = join("a"), join("b")
    assert first.claim_token() == second.claim_token()
    assert len(first.claim_token()) == 64
    first.agree_on_settings(SETTINGS)
    second.agree_on_settings(SETTINGS)
    other = JobSettings(program="other.py", flags=("--lr", "0.2"), versions={"torch": "2.13.0", "numpy": "2"})
    with pytest.raises(ConfigError) as caught:
        second.agree_on_settings(other)
    for words in (
        "program is other.py here and pretrain_gpt.py in the job",
        "flags: here 0.2, in the job 0.1",
        "numpy is 2 here and missing in the job",
    ):
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match="in another order"):
        second.agree_on_settings(dataclasses.replace(SETTINGS, flags=("0.1", "--lr")))


def test_settings_of_a_job_that_never_began_give_way(etcd: EtcdServer, job: str) -> None:
    member = Membership(etcd.address, job, lease_s=2, on_change=lambda: None)
    member.start()
    try:
        member.agree_on_settings(SETTINGS)
        changed = dataclasses.replace(SETTINGS, program="other.py")
        member.agree_on_settings(changed)
        assert JobStore(etcd.address, job).read().settings == changed
    finally:
        member.close()


def test_etcd_that_is_not_there(job: str) -> None:
    address = EtcdAddress(urls=(f"http://127.0.0.1:{free_ports(1)[0]}",))
    with pytest.raises(MembershipStoreError, match=r"etcd at http://\S+ does not answer .*hetero elastic store"):
        Membership(address, job, lease_s=2, on_change=lambda: None).start()


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_etcd_goes_away_and_comes_back(join: Callable[..., Membership], tmp_path: Path) -> None:
    """Places are as they were: a lease begins anew with etcd. A member of etcd that never was is passed over."""
    server = EtcdServer(tmp_path / "data")
    server.start()
    try:
        address = EtcdAddress(urls=(f"http://127.0.0.1:{free_ports(1)[0]}", server.url))
        first, second = join("a", address=address), join("b", address=address)
        wait_until(lambda: set(first.state.nodes) == {"a", "b"})
        server.stop()
        wait_until(lambda: first.trouble is not None and second.trouble is not None)
        assert first.trouble is not None
        assert "does not answer" in first.trouble.problem
        # Longer than the lease.
        time.sleep(2.5)
        assert set(first.state.nodes) == {"a", "b"}
        server.start()
        wait_until(lambda: first.trouble is None and second.trouble is None)
        second.put_notice(Notice(node="b", reason="leave"))
        wait_until(lambda: "b" in first.state.notices)
        assert set(first.state.nodes) == {"a", "b"}
        assert not first.evicted
        assert not second.evicted
    finally:
        first.close()
        second.close()
        server.stop()


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ({"urls": ()}, "give --etcd"),
        ({"urls": ("127.0.0.1:2379",)}, "is no address"),
        ({"urls": ("http://127.0.0.1:etcd",)}, "is no address"),
        ({"urls": ("http://127.0.0.1:2379/v3",)}, "is no address"),
        ({"urls": ("http://me:word@127.0.0.1:2379",)}, r"--etcd http://\*\*\*@127\.0\.0\.1:2379: .*--etcd-cert"),
        ({"urls": ("http://a",), "key": "k"}, "--etcd-cert and --etcd-key"),
    ],
)
def test_addresses_that_are_none(words: dict[str, object], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        EtcdAddress(**words)  # type: ignore[arg-type]


def test_names_of_jobs(etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="letters, digits"):
        JobStore(etcd.address, "a/b")
