"""Uploads of two nodes, whose folders are filled as their ranks would fill them."""

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import obstore
import pytest

from hetero.checkpoint.folder import published_steps
from hetero.elastic import held_uploads
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.copy_folder import copy_path, shard_path, slot_folder, write_copy, write_placement
from hetero.elastic.etcd import EtcdAddress
from hetero.elastic.events import EventKind, EventLog, read_events
from hetero.elastic.held_uploads import HeldUploads, holds_any, upload_folder
from hetero.elastic.job_store import JobState
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.publishing import Publisher, counting_steps, whole_upload
from hetero.elastic.records import (
    CopyPlacement,
    Epoch,
    EpochNode,
    HeldStep,
    JobSettings,
    NodeInfo,
    NodeReport,
    RankAssignment,
    RestorePoint,
    Unit,
    UploadedUnits,
    UploadSchedule,
)
from hetero.elastic.recovery import BadCopy
from hetero.elastic.slot_files import reused_file
from hetero.elastic.uploads import Uploads, upload_schedule
from hetero.errors import ConfigError, ObjectStoreError
from hetero.file_systems import PARTIAL_SUFFIX
from tests.elastic.test_object_store import UNITS, Shortening, copies
from tests.helpers.checkpoints import plan_of, state_of
from tests.helpers.faulty_proxy import Fault, FaultyProxy
from tests.helpers.refusing_file_system import refuse_links
from tests.helpers.s3_server import S3Server

EPOCH = 4
NODES = "ab"


class StoredPoints:
    """Stands for the membership of a leader."""

    def __init__(self) -> None:
        self.points: list[RestorePoint] = []

    def report_stored(self, stored: RestorePoint) -> None:
        self.points.append(stored)


class TwoNodes:
    """Rank 0 on node a, rank 1 with the two other units on node b; and their leader."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        every: str = "100",
        epoch: int = EPOCH,
        holder: str = "job",
        forgotten: Collection[str] = (),
    ) -> None:
        self._folder = folder
        self._forgotten = dict.fromkeys(forgotten, EPOCH)
        self.holder = holder
        self.store = ObjectStore(url)
        units = [
            Unit(name=name, owner=int(name[5:10]), keeper=None, held=False, blocks=(), num_bytes=0) for name in UNITS
        ]
        start = RestorePoint(epoch=0, step=0)
        self.epoch = Epoch(
            number=epoch,
            plan=plan_of(world_size=2),
            nodes=tuple(EpochNode(node=_node(name), ranks=(rank,)) for rank, name in enumerate(NODES)),
            start=start,
            ids={epoch: f"id{epoch}"},
            lineage={EPOCH: start, epoch: start},
            sources={},
            rendezvous_host="",
            rendezvous_port=0,
            reason="",
        )
        self.uploads: dict[str, Uploads] = {}
        self.ranks: dict[str, HeldUploads] = {}
        self.shown: list[str] = []
        self.membership = StoredPoints()
        self._logs = {}
        self._slot = 0
        self._schedule = upload_schedule(every)
        for name in NODES:
            write_placement(self.folder(name), epoch, CopyPlacement(units=tuple(units)), epoch_id=f"id{epoch}")
            options = _options(name, self.folder(name), url, self._schedule)
            self._logs[name] = EventLog(folder / f"{name}.jsonl", node=name, show=lambda line: None)
            self.uploads[name] = Uploads(
                options, holder=holder, events=self._logs[name], show=self.shown.append, on_news=self._news
            )
        self.publisher = Publisher(
            self.store,
            membership=self.membership,
            events=self._logs["a"],
            holder=holder,
            keep=2,
            show=self.shown.append,
        )

    def folder(self, name: str) -> Path:
        path = self._folder / name
        path.mkdir(exist_ok=True)
        return path

    async def begin(self) -> None:
        for rank, name in enumerate(NODES):
            schedule = await self.uploads[name].begin(self.epoch, stored=None)
            assignment = RankAssignment(
                job="job",
                epoch=self.epoch,
                node=name,
                token="",
                folder=str(self.folder(name)),
                reports="",
                uploads=schedule,
            )
            own = [unit for unit in UNITS if int(unit[5:10]) == rank]
            self.ranks[name] = HeldUploads(assignment, units=own, world_size=2)
        self._news()

    def commit(self, step: int, *, harm: Callable[[bytes], bytes] | None = None) -> bool:
        """What ranks do after a step and in the next; whether the step is held for its upload."""
        self._slot = 1 - self._slot
        number = self.epoch.number
        slots = {name: slot_folder(self.folder(name), number, self._slot) for name in NODES}
        for unit, (copy, path) in copies(self._folder / "made", step=step, epoch=number).items():
            slot = slots[NODES[int(unit[5:10])]]
            copy_path(slot, unit).unlink(missing_ok=True)
            target = shard_path(slot, unit)
            self.ranks[NODES[int(unit[5:10])]].leave_to_upload(target)
            content = path.read_bytes()
            with reused_file(target, len(content)) as descriptor:
                os.write(descriptor, harm(content) if harm is not None and unit == UNITS[1] else content)
            write_copy(slot, copy)
        votes = sum(rank.vote(step) for rank in self.ranks.values())
        for name, rank in self.ranks.items():
            rank.decide(votes, step=step, slot=slots[name])
        return votes == 2

    def events(self, kind: EventKind) -> list[tuple[str, int, str]]:
        found = [event for name in NODES for event in read_events(self._folder / f"{name}.jsonl")]
        return [(event.node, event.step, event.detail) for event in found if event.kind == kind]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def until_published(self, *steps: int) -> None:
        await self.until(lambda: [step for _, step, _ in self.events("published")] == list(steps))
        await self.until(self.is_free)

    def is_free(self) -> bool:
        return not any(holds_any(self.folder(name), self.epoch.number) for name in NODES)

    def _news(self) -> None:
        reports = {
            name: NodeReport(node=name, incarnation=name, ended=0, ranks=(), uploaded=uploads.uploaded)
            for name, uploads in self.uploads.items()
        }
        self.publisher.follow(JobState(epoch=self.epoch, reports=reports, forgotten=self._forgotten))

    async def end(self) -> None:
        self.publisher.close()
        for uploads in self.uploads.values():
            await uploads.end()
        for log in self._logs.values():
            log.close()


@contextlib.asynccontextmanager
async def two_nodes(folder: Path, url: str, **options: Any) -> AsyncIterator[TwoNodes]:
    nodes = TwoNodes(folder, url, **options)
    await nodes.begin()
    try:
        async with asyncio.timeout(20):
            yield nodes
    finally:
        await nodes.end()


def _node(name: str) -> NodeInfo:
    return NodeInfo(
        name=name,
        incarnation=name,
        node_type="cpu",
        num_ranks=1,
        host="",
        port=0,
        failure_domain=name,
        settings="",
    )


def _options(name: str, folder: Path, url: str, schedule: UploadSchedule) -> AgentOptions:
    return AgentOptions(
        job="job",
        etcd=EtcdAddress(urls=("http://127.0.0.1:1",)),
        lease_s=1,
        wait_for_etcd_s=0.0,
        name=name,
        node_type="cpu",
        host="",
        port=0,
        failure_domain=name,
        folder=folder,
        logs=folder,
        settings=JobSettings(program="", flags=(), versions={}),
        leave_within_s=0,
        object_store=url,
        uploads=schedule,
    )


def run(story: Awaitable[None]) -> None:
    async def awaited() -> None:
        await story

    asyncio.run(awaited())


@pytest.fixture(autouse=True)
def _is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.uploads._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr("hetero.elastic.publishing._RETRY_S", 0.02)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def test_the_first_committed_step_of_every_hundred_is_published_and_two_stay(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            done = []
            for step in (98, 105, 112, 207, 310, 399, 400):
                is_due = step in (105, 207, 310, 400)
                assert nodes.commit(step) == is_due
                if is_due:
                    done.append(step)
                    await nodes.until_published(*done)
            await nodes.until(lambda: published_steps(tmp_path / "store") == [310, 400])
            assert nodes.membership.points == [RestorePoint(epoch=EPOCH, step=step) for step in done]
            assert (await nodes.store.history()).lineage == nodes.epoch.lineage
            assert nodes.store.step(310).state == state_of(plan_of(world_size=2), step=310)
            assert nodes.shown == ["hetero: every 100 steps a committed step goes to " + url + " (--upload-every)"] * 2

    run(story())


def test_by_time_the_ranks_that_are_slowest_to_say_so_decide(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        async with two_nodes(tmp_path, url, every="1h") as nodes:
            assert not nodes.commit(1)
            nodes.ranks["a"]._due_s = 0.0
            assert not nodes.commit(2), "one of them finds that it is not time yet"
            nodes.ranks["b"]._due_s = 0.0
            assert nodes.commit(3)
            await nodes.until_published(3)
            assert not nodes.commit(4)

    run(story())


def test_a_node_that_is_slow_lets_the_others_wait_and_its_slots_may_be_written(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        may_go_on = asyncio.Event()
        put = obstore.put_async

        async def slow(store: Any, key: str, file: Any, **options: Any) -> Any:
            if "rank_00001" in key:
                await may_go_on.wait()
            return await put(store, key, file, **options)

        monkeypatch.setattr(obstore, "put_async", slow)
        async with two_nodes(tmp_path, url) as nodes:
            assert nodes.commit(100)
            await nodes.until(lambda: [node for node, *_ in nodes.events("uploaded")] == ["a"])
            for step in (200, 300, 400):
                assert not nodes.commit(step), "node b is not done with the one before"
            may_go_on.set()
            await nodes.until_published(100)
            assert nodes.store.step(100).state.step == 100
            assert nodes.commit(401)
            await nodes.until_published(100, 401)

    run(story())


class SlowCopies:
    """Copies of ``copy_whole`` that begin once they may; until then they have written the first half."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        copy_whole = held_uploads.copy_whole

        def slowly(source: Any, target: Path) -> None:
            partial = target.with_name(f"{target.name}{PARTIAL_SUFFIX}")
            partial.write_bytes(source.read(os.fstat(source.fileno()).st_size // 2))
            source.seek(0)
            self.may_go_on.wait()
            copy_whole(source, target)

        monkeypatch.setattr(held_uploads, "copy_whole", slowly)


def test_without_hard_links_a_step_is_whole_whose_slots_are_written_while_it_is_copied(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit waits for the copies, no later step is held meanwhile, and the agents wait as long as it takes."""
    monkeypatch.setattr("hetero.elastic.uploads._HELD_WITHIN_S", 0.2)
    refuse_links(monkeypatch)
    copies = SlowCopies(monkeypatch)

    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            try:
                assert nodes.commit(100)
                for step in (200, 300, 400):
                    assert not nodes.commit(step), "the one before is still being copied"
                await asyncio.sleep(0.5)
                assert not nodes.events("upload_failed")
            finally:
                copies.may_go_on.set()
            await nodes.until_published(100)
            assert nodes.store.step(100).state.step == 100
            await nodes.until(lambda: nodes.commit(401))
            await nodes.until_published(100, 401)
            assert not nodes.events("upload_failed"), "every byte was what its checksum says"

    run(story())


def test_without_hard_links_a_copy_that_has_no_room_is_told_with_the_room_that_it_needs(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hetero.elastic.uploads._HELD_WITHIN_S", 0.2)
    refuse_links(monkeypatch)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            with monkeypatch.context() as patched:
                patched.setattr("hetero.file_systems.os.copy_file_range", full)
                patched.setattr("hetero.file_systems.shutil.copyfileobj", full)
                assert nodes.commit(100)
                await nodes.until(lambda: capsys_has(2))
            await nodes.until(nodes.is_free)
            await nodes.until(lambda: nodes.commit(200))
            await nodes.until_published(200)

    said: list[str] = []

    def capsys_has(count: int) -> bool:
        said.append(capsys.readouterr().err)
        return "".join(said).count("step 100 is not held for its upload") == count

    run(story())
    assert "No space left on device (without hard links an upload needs " in "".join(said)
    assert " bytes there, beside those of both slots); a later one will be" in "".join(said)


def test_a_damaged_copy_is_never_published_and_a_later_one_is(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            assert nodes.commit(100, harm=lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
            await nodes.until(lambda: bool(nodes.events("upload_failed")))
            ((node, step, detail),) = nodes.events("upload_failed")
            assert (node, step) == ("b", 100)
            assert "the checksum of" in detail
            await nodes.until(nodes.is_free)
            assert nodes.commit(200)
            await nodes.until_published(200)
            # What was left of the one that failed is gone.
            await nodes.until(lambda: not (tmp_path / "store" / "step_00000100").exists())

    run(story())


def test_a_store_that_cuts_objects_short(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.object_store.random.uniform", lambda *_: 0.0)

    async def story() -> None:
        shortening = Shortening(1000)
        async with two_nodes(tmp_path, url) as nodes:
            monkeypatch.setattr(obstore, "put_async", shortening)
            assert nodes.commit(100)
            await nodes.until(lambda: len(nodes.events("upload_failed")) == 2)
            assert all("the store cuts objects short" in detail for *_, detail in nodes.events("upload_failed"))
            assert any("training goes on and a later one will be tried" in line for line in nodes.shown)
            shortening.left = 0
            await nodes.until(nodes.is_free)
            assert nodes.commit(200)
            await nodes.until_published(200)

    run(story())


@pytest.mark.slow
@pytest.mark.rotates("networks")
@pytest.mark.parametrize("fault", ["refuse", "cut", "silent"])
def test_a_store_behind_a_bad_network(
    tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr("hetero.elastic.store_connection.RETRIES", {"max_retries": 0})
    monkeypatch.setattr("hetero.elastic.store_connection._CLIENT", {"connect_timeout": "1s", "timeout": "1s"})
    port = urlparse(s3_server.endpoint).port
    assert port is not None

    async def story(proxy: FaultyProxy) -> None:
        async with two_nodes(tmp_path, f"s3://bucket/{tmp_path.name}") as nodes:
            assert nodes.commit(100)
            await nodes.until_published(100)
            proxy.fault = fault
            assert nodes.commit(200)
            await nodes.until(lambda: {node for node, *_ in nodes.events("upload_failed")} == {"a", "b"})
            await nodes.until(nodes.is_free)
            assert not nodes.commit(201), "the next one that is due is tried"
            proxy.fault = ""
            assert nodes.commit(300)
            await nodes.until_published(100, 300)
            history = await nodes.store.history()
            assert [held.step for held in history.steps] == [100, 300]

    with FaultyProxy(port) as proxy:
        for name, value in s3_server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        run(story(proxy))


def test_a_leader_that_was_evicted_publishes_no_more(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            assert nodes.commit(100)
            await nodes.until_published(100)
            await ObjectStore(url).claim_epoch(EPOCH + 1, holder="job", lineage={})
            assert nodes.commit(200)
            await nodes.until(lambda: bool(nodes.events("upload_failed")))
            assert "the leader of epoch 4 publishes no more" in nodes.events("upload_failed")[0][2]
            assert published_steps(tmp_path / "store") == [100]

    run(story())


def test_two_runs_do_not_mix(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run came later and has gone on from this one's epoch 4; nothing of epoch 6 is put into its store."""
    monkeypatch.setattr("hetero.elastic.uploads._CLAIMED_WITHIN_S", 0.1)

    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            assert nodes.commit(100)
            await nodes.until_published(100)
        await ObjectStore(url).claim_epoch(5, holder="another", lineage={})
        async with two_nodes(tmp_path, url, epoch=6) as nodes:
            assert nodes.commit(200)
            await nodes.until(lambda: len(nodes.events("upload_failed")) == 3)
            said = " ".join(detail for *_, detail in nodes.events("upload_failed"))
            assert "another run has claimed epoch 5 there while this one was at work" in said
            assert "epoch 6 is not claimed for this job" in said
            assert not (tmp_path / "store" / "step_00000200").exists()

    run(story())


def test_what_this_job_has_put_there_of_a_history_that_was_given_up_is_deleted(tmp_path: Path, url: str) -> None:
    """So that its steps are not in the way of those of the same number; what is somebody else's stays."""

    async def story() -> None:
        async with two_nodes(tmp_path, url, epoch=7) as nodes:
            assert nodes.commit(300)
            await nodes.until_published(300)
        (tmp_path / "a.jsonl").unlink()
        async with two_nodes(tmp_path, url, epoch=8) as nodes:
            assert 7 not in nodes.epoch.lineage
            await nodes.until(lambda: published_steps(tmp_path / "store") == [])
            assert nodes.commit(300)
            await nodes.until_published(300)
        (tmp_path / "a.jsonl").unlink()
        async with two_nodes(tmp_path, url, epoch=9, holder="another") as nodes:
            assert nodes.commit(400)
            await nodes.until_published(400)
            assert published_steps(tmp_path / "store") == [300, 400]

    run(story())


def test_steps_of_a_forgotten_job_stay_until_the_next_one_has_its_own(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        for epoch, mark, step in ((7, "forgotten", 300), (8, "unknown", 350)):
            async with two_nodes(tmp_path, url, epoch=epoch, holder=f"job {mark}") as nodes:
                assert nodes.commit(step)
                await nodes.until_published(step)
            (tmp_path / "a.jsonl").unlink()
        async with two_nodes(tmp_path, url, epoch=9, holder="job new", forgotten=["forgotten"]) as nodes:
            await nodes.until(lambda: nodes.publisher.history.newest_claim == 9)
            assert published_steps(tmp_path / "store") == [300, 350]
            assert nodes.commit(400)
            await nodes.until_published(400)
            await nodes.until(lambda: published_steps(tmp_path / "store") == [350, 400])

    run(story())


def test_a_rank_that_cannot_hold_its_part(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.uploads._HELD_WITHIN_S", 0.1)

    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            nodes.ranks["b"]._units = [UNITS[1], "rank_00009"]
            assert nodes.commit(100)
            await nodes.until(lambda: bool(nodes.events("upload_failed")))
            assert "a rank of this node could not hold its part" in nodes.events("upload_failed")[0][2]
            nodes.ranks["b"]._units = UNITS[1:]
            await nodes.until(nodes.is_free)
            assert nodes.commit(200)
            await nodes.until_published(200)

    run(story())


def test_a_folder_of_copies_that_is_read_only_ends_no_agent(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is uploaded cannot be let go: it is said, and not uploaded again and again; the next epoch begins."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def story() -> None:
        async with two_nodes(tmp_path, url) as nodes:
            monkeypatch.setattr("hetero.elastic.uploads.release", refuse)
            assert nodes.commit(100)
            await nodes.until(lambda: len(nodes.events("upload_failed")) == 2)
            assert all("Read-only file system" in detail for *_, detail in nodes.events("upload_failed"))
            assert len(nodes.events("uploaded")) == 2
            await nodes.begin()

    run(story())


def test_what_an_earlier_epoch_held_is_let_go(tmp_path: Path, url: str) -> None:
    async def story() -> None:
        nodes = TwoNodes(tmp_path, url)
        held = upload_folder(nodes.folder("a"), EPOCH - 1)
        held.mkdir(parents=True)
        (held / "rank_00000.safetensors").touch()
        await nodes.begin()
        assert list(held.iterdir()) == []
        await nodes.end()

    run(story())


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("500", UploadSchedule(every_steps=500)),
        ("90s", UploadSchedule(every_s=90.0)),
        ("10m", UploadSchedule(every_s=600.0)),
        ("2h", UploadSchedule(every_s=7200.0)),
    ],
)
def test_schedules(text: str, schedule: UploadSchedule) -> None:
    assert upload_schedule(text) == schedule


@pytest.mark.parametrize("text", ["", "0", "-1", "m", "0s", "1.5h", "10 m", "often"])
def test_schedules_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--upload-every .*give a number of steps, as 500, or a time, as 90s"):
        upload_schedule(text)


def test_a_step_is_whole_when_all_of_its_units_are_there() -> None:
    def report(step: int, *units: str, epoch: int = 4) -> NodeReport:
        uploaded = UploadedUnits(epoch=epoch, step=step, units=frozenset(units), num_units=3)
        return NodeReport(node="", incarnation="", ended=0, ranks=(), uploaded=uploaded)

    idle = NodeReport(node="", incarnation="", ended=0, ranks=())
    assert whole_upload([report(1, "x", "y"), report(2, "z"), idle], epoch=4) is None
    assert whole_upload([report(1, "x", "y"), report(1, "z", epoch=3)], epoch=4) is None
    whole = whole_upload([report(1, "x", "y"), idle, report(1, "z")], epoch=4)
    assert whole == HeldStep(epoch=4, step=1, units=frozenset("xyz"))


def test_steps_count_within_the_lineage_and_if_none_of_their_objects_is_bad() -> None:
    steps = [HeldStep(epoch=e, step=s, units=frozenset("x")) for e, s in ((1, 10), (1, 20), (2, 25), (3, 30), (4, 35))]
    lineage = {1: RestorePoint(epoch=0, step=0), 3: RestorePoint(epoch=1, step=15), 4: RestorePoint(epoch=3, step=33)}
    bad = {BadCopy(node="object-store", epoch=1, step=10, unit="x"), BadCopy(node="a", epoch=3, step=30, unit="x")}
    assert counting_steps(steps, lineage=lineage, bad=frozenset()) == [10, 30, 35]
    assert counting_steps(steps, lineage=lineage, bad=bad) == [30, 35]


def test_a_store_that_does_not_answer_is_asked_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        nodes = TwoNodes(tmp_path, url)
        history, asked = nodes.store.history, []

        async def fails_twice() -> Any:
            asked.append(1)
            if len(asked) < 3:
                raise ObjectStoreError("away")
            return await history()

        monkeypatch.setattr(nodes.publisher._store, "history", fails_twice)
        with pytest.raises(ObjectStoreError, match="away"):
            await nodes.publisher.refresh(patience_s=0.0)
        await nodes.publisher.refresh(patience_s=5.0)
        assert len(asked) == 3
        await nodes.end()

    run(story())
