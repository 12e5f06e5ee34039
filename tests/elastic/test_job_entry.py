"""How agents come into their job: one that ended with an error goes on, with the settings of who opens it again."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero.elastic import job_entry
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.ends import End, EndError
from hetero.elastic.etcd import delete_request, put_request
from hetero.elastic.etcd_patience import EtcdPatience
from hetero.elastic.events import EventLog, read_events
from hetero.elastic.job_entry import JobEntry
from hetero.elastic.job_store import JobStore, token_mark
from hetero.elastic.membership import Membership
from hetero.elastic.node_probe import ProbeAnswer
from hetero.elastic.records import JobSettings, Outcome
from hetero.elastic.store_health import Trouble
from hetero.errors import ConfigError, MembershipStoreError
from hetero.serialization import to_json
from tests.helpers.elastic_epochs import epoch_of, node_info
from tests.helpers.etcd import EtcdServer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]

SETTINGS = JobSettings(program="pretrain_gpt.py", flags=("--save", "full"), versions={})
FULL = Outcome(exit_code=1, reason="--save was full")
STOPPED = Outcome(exit_code=0, reason="all nodes leave after step 9 of 40", resumes=True)
MENDED = dataclasses.replace(SETTINGS, flags=("--save", "roomy"))


class Comer:
    """An agent that comes into a job."""

    def __init__(self, etcd: EtcdServer, job: str, folder: Path, name: str, settings: JobSettings) -> None:
        self.node = node_info(name, incarnation=f"of {name}")
        self.shown: list[str] = []
        options = AgentOptions(
            job=job,
            etcd=etcd.address,
            lease_s=1,
            wait_for_etcd_s=5.0,
            name=name,
            node_type="fast",
            host="127.0.0.1",
            port=1,
            failure_domain=name,
            folder=folder / name,
            logs=folder,
            settings=settings,
            leave_within_s=1.0,
        )
        self.membership = Membership(etcd.address, job, lease_s=1, on_change=lambda: None)
        events = EventLog(folder / f"{name}.events.jsonl", node=name, show=self.shown.append)
        patience = EtcdPatience(self.membership, limit_s=5.0, events=events, show=self.shown.append)
        self.entry = JobEntry(options, self.membership, patience, events=events, show=self.shown.append)

    async def enter(self) -> None:
        await self.entry.claim_token()
        await self.entry.enter()

    async def join(self) -> None:
        await self.enter()
        await self.entry.join(self.node)


class EndedJob:
    """A job that ended after its first epoch, by default with an error; ``come`` makes agents that come into it."""

    def __init__(self, etcd: EtcdServer, job: str, folder: Path, outcome: Outcome) -> None:
        self.store = JobStore(etcd.address, job)
        for key, value in (
            ("token", "secret"),
            ("settings", to_json(SETTINGS)),
            ("epoch", to_json(epoch_of([node_info("a")]))),
            ("finished", to_json(outcome)),
        ):
            self.put(key, value)
        self.comers: list[Comer] = []
        self._etcd, self._job, self._folder = etcd, job, folder

    def come(self, name: str, settings: JobSettings = MENDED) -> Comer:
        comer = Comer(self._etcd, self._job, self._folder, name, settings)
        self.comers.append(comer)
        return comer

    def put(self, key: str, value: str) -> None:
        self.store.write([], [put_request(self.store.key(key), value)])

    def delete(self, key: str) -> None:
        self.store.write([], [delete_request(self.store.key(key))])


@asynccontextmanager
async def ended_job(etcd: EtcdServer, job: str, folder: Path, outcome: Outcome = FULL) -> AsyncIterator[EndedJob]:
    ended = EndedJob(etcd, job, folder, outcome)
    try:
        yield ended
    finally:
        for comer in ended.comers:
            await asyncio.to_thread(comer.membership.close)
        ended.store.close()


def test_two_agents_open_a_job_again_at_once(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    """One of them does; its settings replace those of the job, whose token and epoch stay."""

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            comers = [ended.come("a"), ended.come("b")]
            await asyncio.gather(*(comer.enter() for comer in comers))
            state = ended.store.read()
            assert (state.outcome, state.settings, state.token) == (None, MENDED, "secret")
            assert state.epoch is not None
            assert sum("had ended (--save was full); it goes on" in line for c in comers for line in c.shown) == 1

    asyncio.run(story())


def test_the_others_have_to_fit_to_who_opened_it_again(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            await ended.come("a").join()
            await ended.come("b").join()
            with pytest.raises(ConfigError, match=r"flags: here full, in the job roomy"):
                await ended.come("c", SETTINGS).enter()
            assert set(ended.store.read().nodes) == {"a", "b"}

    asyncio.run(story())


def test_settings_that_no_epoch_has_used_give_way(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    """An agent that opened the job again with a mistake in its flags, and ended, does not keep out the next one."""

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            await ended.come("a", dataclasses.replace(MENDED, flags=("--sav", "roomy"))).enter()
            await ended.come("b").join()
            assert ended.store.read().settings == MENDED

    asyncio.run(story())


def test_nodes_of_the_ended_job_see_its_end_first(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            ended.put("nodes/old", to_json(node_info("old")))
            comer = ended.come("a")
            entering = asyncio.create_task(comer.enter())
            await asyncio.sleep(1.0)
            assert not entering.done()
            (line,) = comer.shown
            assert line.endswith("has ended (--save was full); it goes on once its nodes old are gone")
            assert ended.store.read().outcome is not None
            ended.delete("nodes/old")
            await entering
            assert ended.store.read().outcome is None

    asyncio.run(story())


def test_a_node_that_does_not_go_is_named(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_entry, "_OTHERS_END_WITHIN_S", -1.0)

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            ended.put("nodes/old", to_json(node_info("old")))
            with pytest.raises(ConfigError, match=r"has ended \(--save was full\), but its nodes old are still there"):
                await ended.come("a").enter()
            assert ended.store.read().outcome is not None

    asyncio.run(story())


def test_two_agents_begin_a_job_again_that_ended_before_its_last_step(
    etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    """One of them forgets it; both come into the new one. Copies of the old one, on any node, may be deleted."""

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path, STOPPED) as ended:
            ended.put(f"forgotten/{token_mark('older')}", "0")
            ended.put("committed", f"{9:020d}")
            comers = [ended.come(name, SETTINGS) for name in "ab"]
            await asyncio.gather(*(comer.join() for comer in comers))
            state = ended.store.read()
            assert (state.outcome, state.epoch, state.committed, state.settings) == (None, None, 0, SETTINGS)
            assert state.token not in (None, "secret")
            assert set(state.nodes) == {"a", "b"}
            assert state.forgotten == {token_mark("secret"): 1, token_mark("older"): 0}
            assert state.newest_number == 1
            assert sum("begins again, from the newest checkpoint" in line for c in comers for line in c.shown) == 1

    asyncio.run(story())


@pytest.mark.parametrize(
    ("outcome", "settings", "says"),
    [
        (
            STOPPED,
            MENDED,
            r"after step 9 of 40, but not with other settings \(flags: here roomy, in the job full\); give",
        ),
        (dataclasses.replace(STOPPED, resumes=False), SETTINGS, "after step 9 of 40; give another --job"),
        (Outcome(exit_code=0, reason="all ranks have finished"), SETTINGS, "is over already: all ranks have finished"),
    ],
)
def test_a_job_that_ended_with_0_is_not_begun_again_otherwise(
    outcome: Outcome, settings: JobSettings, says: str, etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    async def story() -> None:
        async with ended_job(etcd, job, tmp_path, outcome) as ended:
            with pytest.raises(EndError, match=says) as caught:
                await ended.come("a", settings).enter()
            assert caught.value.kind is End.JOB_IS_OVER
            assert f"hetero elastic forget --etcd {etcd.url} --job {job}" in str(caught.value)
            assert ended.store.read().outcome == outcome

    asyncio.run(story())


@pytest.mark.parametrize("is_stop_for_good", [True, False])
def test_an_agent_that_comes_while_a_job_ends(
    is_stop_for_good: bool, etcd: EtcdServer, job: str, tmp_path: Path
) -> None:
    """It begins the job again if that ended because all others leave, and not where the flags ended the run."""

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path, STOPPED) as ended:
            ended.delete("finished")
            comer = ended.come("a", SETTINGS)
            await comer.entry.claim_token()
            if is_stop_for_good:
                ended.put("stop/1/for_good", "yes")
            ended.put("finished", to_json(STOPPED))
            while comer.membership.state.outcome is None:
                await asyncio.sleep(0.02)
            with pytest.raises(EndError) as caught:
                await comer.entry.enter()
            assert caught.value.kind is (End.JOB_BEGINS_AGAIN if is_stop_for_good else End.JOB_IS_OVER)

    asyncio.run(story())


def test_a_job_begins_again_once_its_nodes_are_gone(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    """An agent that claimed the old token before starts once more."""

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path, STOPPED) as ended:
            ended.delete("finished")
            late = ended.come("b", SETTINGS)
            await late.entry.claim_token()
            ended.put("finished", to_json(STOPPED))
            ended.put("nodes/old", to_json(node_info("old")))
            comer = ended.come("a", SETTINGS)
            joining = asyncio.create_task(comer.join())
            await asyncio.sleep(1.0)
            assert not joining.done()
            assert ended.store.read().token == "secret"
            ended.delete("nodes/old")
            await joining
            while late.membership.state.token in (None, "secret"):
                await asyncio.sleep(0.02)
            with pytest.raises(EndError) as caught:
                await late.entry.enter()
            assert caught.value.kind is End.JOB_BEGINS_AGAIN

    asyncio.run(story())


def test_the_lease_that_etcd_grants_is_said_where_it_is_another(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            comer = ended.come("a")
            await comer.join()
            assert comer.membership.lease_s == 2
            assert any("a silent node for 2 s, not for 1 s (--lease)" in line for line in comer.shown)

    asyncio.run(story())


def test_a_place_that_a_silent_host_keeps_is_not_waited_for_without_end(
    etcd: EtcdServer, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an agent behind a firewall that was given the same name: it keeps its lease."""

    async def silent(_: object) -> ProbeAnswer:
        return ProbeAnswer.SILENT

    monkeypatch.setattr("hetero.elastic.job_entry.probe", silent)
    monkeypatch.setattr("hetero.elastic.job_entry._OTHERS_END_WITHIN_S", 0.0)

    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            ended.delete("finished")
            comer = ended.come("a", SETTINGS)
            await comer.enter()
            ended.put("nodes/a", to_json(dataclasses.replace(node_info("a"), host="10.0.0.1")))
            while "a" not in comer.membership.state.nodes:
                await asyncio.sleep(0.02)
            with pytest.raises(ConfigError, match=r"node a is in job .*, at 10\.0\.0\.1:1, which cannot be reached"):
                await comer.entry.join(comer.node)

    asyncio.run(story())


def test_only_copies_of_a_forgotten_job_may_be_deleted(etcd: EtcdServer, job: str, tmp_path: Path) -> None:
    async def story() -> None:
        async with ended_job(etcd, job, tmp_path) as ended:
            (tmp_path / "a" / "epoch_00000001").mkdir(parents=True)
            (tmp_path / "a" / "job.json").write_text(f'{{"job": "{job} {token_mark("secret")}"}}')
            own = ended.come("a")
            own.entry.check_copies(f"{job} {token_mark(await own.entry.claim_token())}")
            ended.delete("token")
            other = ended.come("a")
            new_token = await other.entry.claim_token()
            with pytest.raises(ConfigError, match="has copies of an earlier job"):
                other.entry.check_copies(f"{job} {token_mark(new_token)}")
            ended.put("token", "secret")
            assert ended.store.forget()
            later = ended.come("a")
            later.entry.check_copies(f"{job} {token_mark(await later.entry.claim_token())}")

    asyncio.run(story())


@pytest.fixture
def patience(tmp_path: Path) -> Callable[[float], tuple[EtcdPatience, SimpleNamespace, list[str]]]:
    """Makes one with this limit in seconds, with its membership and what it shows."""

    def make(limit_s: float) -> tuple[EtcdPatience, SimpleNamespace, list[str]]:
        membership, shown = SimpleNamespace(trouble=None, went_back=None, failure=None), list[str]()
        events = EventLog(tmp_path / "events.jsonl", node="a", show=shown.append)
        return EtcdPatience(membership, limit_s=limit_s, events=events, show=shown.append), membership, shown  # type: ignore[arg-type]

    return make


def test_what_is_wrong_with_etcd_is_said_once_and_that_it_is_over(
    patience: Callable[..., tuple], tmp_path: Path
) -> None:  # type: ignore[type-arg]
    waits, membership, shown = patience(0.0)
    waits.need(False)
    for since_s in (1.0, 1.0, 2.0):
        membership.trouble = Trouble(since_s=since_s, problem="etcd is full", takes_no_writes=True)
        waits.check()
    membership.trouble = None
    for _ in range(2):
        waits.check()
    assert shown == ["hetero: etcd is full; training goes on, but nothing can be changed", "hetero: etcd is back"]
    assert [event.kind for event in read_events(tmp_path / "events.jsonl")] == ["etcd_away", "etcd_back"]


def test_a_request_that_keeps_failing_ends_the_wait_though_others_succeed(
    patience: Callable[..., tuple],  # type: ignore[type-arg]
) -> None:
    """As of an etcd whose disk is too slow: now and then something is done, so that there is no trouble that lasts."""
    waits, _, _ = patience(0.5)

    def fail() -> None:
        raise MembershipStoreError("timed out")

    with pytest.raises(MembershipStoreError, match=r"timed out; waited for 0.5 s \(--wait-for-etcd\)"):
        asyncio.run(waits.insist(fail))


def test_who_trains_waits_for_etcd_without_limit(patience: Callable[..., tuple]) -> None:  # type: ignore[type-arg]
    """The limit counts from the later of two: when the trouble began, and when etcd was needed."""
    waits, membership, shown = patience(0.0)
    membership.trouble = Trouble(since_s=1.0, problem="etcd is away", takes_no_writes=False)
    waits.need(False)
    waits.check()
    assert waits.deadline_s is None
    waits.need(True)
    with pytest.raises(MembershipStoreError, match=r"etcd is away; waited for 0 s \(--wait-for-etcd\)"):
        waits.check()
    assert shown == [
        "hetero: etcd is away; training goes on, but nothing can be changed",
        "hetero: etcd is needed now; it is asked again for 0 s (--wait-for-etcd)",
    ]
    finished, membership, _ = patience(1000.0)
    membership.trouble = Trouble(since_s=1.0, problem="etcd is away", takes_no_writes=False)
    finished.need(True, at_most_s=0.0)
    with pytest.raises(MembershipStoreError, match="waited for 0 s"):
        finished.check()
    patient, membership, shown = patience(1000.0)
    membership.trouble = Trouble(since_s=1.0, problem="etcd is away", takes_no_writes=False)
    patient.check()
    assert shown == ["hetero: etcd is away; it is asked again for 1000 s (--wait-for-etcd)"]
