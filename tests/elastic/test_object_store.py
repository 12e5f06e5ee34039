"""The object store as a folder, in memory, as real S3 and Azure servers on loopback, and as a double of Google's."""

import asyncio
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import obstore
import pytest
import torch

from hetero.checkpoint.folder import SUMS, UPLOADING, latest_step, published_steps
from hetero.checkpoint.reader import load_checkpoint
from hetero.checkpoint.shards import tensor_infos, write_shard
from hetero.elastic.object_store import ObjectStore, StoredHistory
from hetero.elastic.records import Copy, HeldStep, RestorePoint
from hetero.errors import CheckpointError, ConfigError, ObjectStoreError
from hetero.units import MIB
from tests.helpers.checkpoints import expected, make_slices, plan_of, state_of

T = TypeVar("T")
LINEAGE = {3: RestorePoint(epoch=0, step=0)}
UNITS = ("rank_00000", "rank_00001", "rank_00001.held_00000")


@pytest.fixture(params=["memory", "file", "s3", "gs", "az"])
def url(request: pytest.FixtureRequest, store_url: Callable[[str], str]) -> str:
    return store_url(request.param)


def run(operation: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await operation

    return asyncio.run(awaited())


def copies(folder: Path, *, step: int, epoch: int = 4) -> dict[str, tuple[Copy, Path]]:
    """The units of a step, as they lie in the memory of nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for i, unit in enumerate(UNITS):
        path = folder / f"{unit}.{step}.{epoch}.safetensors"
        slices = make_slices(step=step, rank=i, num_ranks=len(UNITS), cut=1)
        generator = {"generator": torch.arange(4, dtype=torch.uint8)} if "held" not in unit else {}
        shard = write_shard(path, slices, rank=int(unit[5:10]), rank_state=generator)
        state = state_of(plan_of(world_size=2), step=step)
        found[unit] = (
            Copy(epoch=epoch, step=step, unit=unit, shard=shard, tensors=tensor_infos(slices), state=state),
            path,
        )
    return found


async def upload_all(store: ObjectStore, folder: Path, *, step: int, epoch: int = 4, publish: bool = True) -> None:
    for copy, path in copies(folder, step=step, epoch=epoch).values():
        await store.upload(copy, path)
    if publish:
        assert await store.publish(epoch=epoch, step=step, units=UNITS)


@pytest.mark.slow
def test_a_step_counts_when_all_of_its_units_are_there_and_it_is_published(url: str, tmp_path: Path) -> None:
    async def whole_life(store: ObjectStore) -> None:
        units = copies(tmp_path / "slots", step=100)
        for unit in UNITS[:2]:
            await store.upload(*units[unit])
        assert await store.uploaded(epoch=4, step=100) == frozenset(UNITS[:2])
        assert await store.uploaded(epoch=3, step=100) == frozenset()
        with pytest.raises(CheckpointError, match=r"rank_00001.held_00000.json: the unit has not been uploaded"):
            await store.publish(epoch=4, step=100, units=UNITS)
        assert (await store.history()).steps == ()
        await store.upload(*units[UNITS[2]])
        assert await store.publish(epoch=4, step=100, units=UNITS)
        assert (await store.history()).steps == (HeldStep(epoch=4, step=100, units=frozenset(UNITS)),)
        # By whom it was published first, that stays.
        assert not await store.publish(epoch=4, step=100, units=UNITS)

    run(whole_life(ObjectStore(url)))


def test_what_is_read_by_ranges_is_what_was_copied(url: str, tmp_path: Path) -> None:
    store = ObjectStore(url)
    run(upload_all(store, tmp_path / "slots", step=100))
    stored = store.step(100)
    assert stored.state == state_of(plan_of(world_size=2), step=100)
    assert len(stored.manifest.shards) == len(UNITS)
    assert stored.copy(UNITS[0], epoch=3) is None
    for unit in UNITS:
        copy = stored.copy(unit, epoch=4)
        assert copy is not None
        shard = copy.shard
        file = stored.file(copy)
        assert file.size_bytes() == shard.size_bytes
        content = (tmp_path / "slots" / f"{unit}.100.4.safetensors").read_bytes()
        buffer = bytearray(1000)
        file.read_into(memoryview(buffer), start=20)
        assert buffer == content[20:1020]
        file.read_into(memoryview(buffer)[:0], start=20)
        with pytest.raises(CheckpointError, match=rf"{shard.file}: (it ends at|cannot be read)"):
            file.read_into(memoryview(buffer), start=len(content) - 10)
        with pytest.raises(CheckpointError, match=rf"{shard.file}: cannot be read"):
            file.read_into(memoryview(buffer), start=len(content) + 10)


def test_a_large_unit_is_sent_in_parts(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.object_store._PART_BYTES", 5 * MIB)
    copy, path = copies(tmp_path / "slots", step=100)[UNITS[0]]
    content = path.read_bytes() + bytes(range(256)) * (11 * MIB // 256)
    path.write_bytes(content)
    store = ObjectStore(url)
    run(store.upload(dataclasses.replace(copy, shard=dataclasses.replace(copy.shard, size_bytes=len(content))), path))
    stored = obstore.get(store._store, f"step_00000100/epoch_00000004.{UNITS[0]}.safetensors").bytes()
    assert bytes(stored) == content


def test_a_folder_is_loaded_like_any_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = ObjectStore(f"file://{folder}")
    run(upload_all(store, tmp_path / "slots", step=100))
    run(upload_all(store, tmp_path / "slots", step=200, publish=False))
    # What is not whole yet is not taken for a damaged checkpoint.
    assert (folder / "step_00000200" / UPLOADING).exists()
    assert (published_steps(folder), latest_step(folder)) == ([100], 100)
    slices = make_slices(step=None)
    plan = plan_of(world_size=2)
    loaded = load_checkpoint(folder, step=None, slices=slices, plan=plan, rank=1)
    assert loaded.state.step == 100
    assert all(torch.equal(box.tensor, expected(box, step=100)) for box in slices)
    assert loaded.rank_state is not None
    checked = subprocess.run(["sha256sum", "--check", SUMS], cwd=loaded.path, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout.count(": OK")) == (0, 3)


def test_a_store_that_puts_over_what_it_may_only_create_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As servers do that do not know ``If-None-Match``: each of two leaders would find that the claim is its own."""
    put = obstore.put_async

    async def heedless(store: Any, key: str, content: Any, **_: Any) -> Any:
        return await put(store, key, content)

    monkeypatch.setattr(obstore, "put_async", heedless)
    store = ObjectStore("memory:///")
    with pytest.raises(ConfigError, match=r"epoch_00000003.json: .*take a store that has create-only puts"):
        run(store.claim_epoch(3, holder="one job", lineage=LINEAGE))
    # Nodes upload nothing for an epoch that is not claimed.
    assert run(store.holder_of(3)) is None


def test_an_epoch_is_claimed_once(url: str) -> None:
    store, other = ObjectStore(url), ObjectStore(url)
    if url.startswith("memory"):
        other = store

    async def claims() -> None:
        assert await store.newest_claim() == 0
        assert await store.history() == StoredHistory()
        await store.claim_epoch(3, holder="one job", lineage=LINEAGE)
        await store.claim_epoch(3, holder="one job", lineage=LINEAGE)
        with pytest.raises(ConfigError, match=r"epoch_00000003.json: epoch 3 was claimed by another job"):
            await other.claim_epoch(3, holder="another job", lineage=LINEAGE)
        later = {**LINEAGE, 12: RestorePoint(epoch=3, step=70)}
        await other.claim_epoch(12, holder="another job", lineage=later)
        assert await store.newest_claim() == 12
        assert await store.history() == StoredHistory(newest_claim=12, lineage=later)

    run(claims())


def test_a_leader_that_was_evicted_publishes_no_more(url: str, tmp_path: Path) -> None:
    async def evicted(store: ObjectStore) -> None:
        await store.claim_epoch(4, holder="job", lineage=LINEAGE)
        await upload_all(store, tmp_path / "slots", step=100, publish=False)
        await store.claim_epoch(5, holder="job", lineage=LINEAGE)
        with pytest.raises(ConfigError, match=r"epoch 5 has been claimed, the leader of epoch 4 publishes no more"):
            await store.publish(epoch=4, step=100, units=UNITS)
        # The same step again, by the epoch that counts: nothing of the first upload is in its way.
        await upload_all(store, tmp_path / "slots", step=100, epoch=5)
        assert [each.epoch for each in (await store.history()).steps] == [5]

    run(evicted(ObjectStore(url)))


@pytest.mark.slow
@pytest.mark.parametrize("stands_still_at", ["state.json", "manifest.json", "held.json", SUMS])
def test_a_leader_that_stood_still_spoils_nothing(url: str, tmp_path: Path, stands_still_at: str) -> None:
    """Its claim was the newest when it began to publish; the next leader publishes the same step meanwhile."""

    async def story() -> None:
        first, second = ObjectStore(url), ObjectStore(url)
        # Two stores in memory would be two memories.
        second._store = first._store
        stands_still, goes_on = asyncio.Event(), asyncio.Event()
        create = first._create

        async def slowly(key: str, content: bytes) -> bool:
            if key.endswith(stands_still_at):
                stands_still.set()
                await goes_on.wait()
            return await create(key, content)

        await first.claim_epoch(4, holder="job", lineage=LINEAGE)
        await upload_all(first, tmp_path / "first", step=100, publish=False)
        first._create = slowly  # type: ignore[method-assign]
        late = asyncio.create_task(first.publish(epoch=4, step=100, units=UNITS))
        await stands_still.wait()
        await second.claim_epoch(5, holder="job", lineage=LINEAGE)
        await upload_all(second, tmp_path / "second", step=100, epoch=5, publish=False)
        publishes = second.publish(epoch=5, step=100, units=UNITS)
        # Who has put the manifest, which has the names of the epoch's units, is alone at this step.
        if has_begun := stands_still_at != "manifest.json":
            with pytest.raises(CheckpointError, match=r"manifest.json: another leader has begun to publish this step"):
                await publishes
        else:
            assert await publishes
        goes_on.set()
        assert await late == has_begun
        history = await second.history()
        assert history.steps == (HeldStep(epoch=4 if has_begun else 5, step=100, units=frozenset(UNITS)),)
        # Opening a step verifies all index files against their sums.
        stored = await asyncio.to_thread(second.step, 100)
        assert all(stored.copy(unit, epoch=history.steps[0].epoch) for unit in UNITS)

    run(story())


@pytest.mark.slow
def test_what_a_leader_left_that_was_ended_while_it_published_is_left_alone(url: str, tmp_path: Path) -> None:
    async def story(store: ObjectStore) -> None:
        create = store._create

        async def ended(key: str, content: bytes) -> bool:
            if key.endswith(SUMS):
                raise ConnectionAbortedError
            return await create(key, content)

        await upload_all(store, tmp_path / "slots", step=100, publish=False)
        store._create = ended  # type: ignore[method-assign]
        with pytest.raises(ConnectionAbortedError):
            await store.publish(epoch=4, step=100, units=UNITS)
        store._create = create  # type: ignore[method-assign]
        # The same epoch's units make the same index: it goes on where it was ended.
        assert await store.publish(epoch=4, step=100, units=UNITS)
        await upload_all(store, tmp_path / "slots", step=200, publish=False)
        store._create = ended  # type: ignore[method-assign]
        with pytest.raises(ConnectionAbortedError):
            await store.publish(epoch=4, step=200, units=UNITS)
        store._create = create  # type: ignore[method-assign]
        await upload_all(store, tmp_path / "slots", step=200, epoch=5, publish=False)
        with pytest.raises(CheckpointError, match=r"step_00000200/manifest.json: another leader has begun"):
            await store.publish(epoch=5, step=200, units=UNITS)
        await upload_all(store, tmp_path / "slots", step=300, epoch=5)
        # Nobody can tell it from one that stands still, and may publish the step yet.
        assert await store.delete_leftovers(before_step=300, epoch=5) == []
        assert await store.publish(epoch=4, step=200, units=UNITS)
        assert [each.step for each in (await store.history()).steps] == [100, 200, 300]

    run(story(ObjectStore(url)))


@pytest.mark.slow
def test_steps_and_leftovers_are_deleted(url: str, tmp_path: Path) -> None:
    async def deletes(store: ObjectStore) -> None:
        for step in (100, 200, 300, 400):
            await upload_all(store, tmp_path / "slots", step=step)
        await upload_all(store, tmp_path / "slots", step=250, publish=False)
        await store.delete([200])
        assert [each.step for each in (await store.history()).steps] == [100, 300, 400]
        assert await store.delete_leftovers(before_step=250, epoch=4) == []
        assert await store.delete_leftovers(before_step=300, epoch=3) == [], "of a later epoch than the leader's"
        assert await store.delete_leftovers(before_step=300, epoch=4) == [250]
        assert await store.uploaded(epoch=4, step=250) == frozenset()

    run(deletes(ObjectStore(url)))
    if url.startswith("file"):
        assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
            "step_00000100",
            "step_00000300",
            "step_00000400",
        ]


def test_what_another_leader_has_deleted_holds_up_no_deletion(url: str, tmp_path: Path) -> None:
    """All stores but S3 stop a deletion of many at the first that is gone."""
    names = [f"name_{i:02}" for i in range(40)]

    async def deletes(store: ObjectStore) -> None:
        for name in (*names, "other"):
            await store._put(f"epochs/{name}", b"")
        await store._delete("epochs", names[::3])
        await store._delete("epochs", names)
        assert await store._names("epochs") == ["other"]
        await store._delete("epochs", names)

    run(deletes(ObjectStore(url)))


def test_a_step_whose_units_were_taken_for_leftovers_is_not_published(url: str, tmp_path: Path) -> None:
    """The next leader deletes them between this one's look at them and the put of its manifest."""

    async def story() -> None:
        first, second = ObjectStore(url), ObjectStore(url)
        second._store = first._store
        create = first._create

        async def slowly(key: str, content: bytes) -> bool:
            if key.endswith("manifest.json"):
                assert await second.delete_leftovers(before_step=200, epoch=5) == [100]
            return await create(key, content)

        await upload_all(first, tmp_path / "first", step=100, publish=False)
        first._create = slowly  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match="deleted by a later leader"):
            await first.publish(epoch=4, step=100, units=UNITS)
        assert (await second.history()).steps == ()

    run(story())


def test_a_step_that_may_be_published_is_not_published_again(tmp_path: Path) -> None:
    """The next leader may have deleted it since, and the sums would stand alone."""

    async def story(store: ObjectStore) -> None:
        create = store._create

        async def lost(key: str, content: bytes) -> bool:
            created = await create(key, content)
            if key.endswith(SUMS):
                raise ObjectStoreError("the answer is lost")
            return created

        store._create = lost  # type: ignore[method-assign]
        await upload_all(store, tmp_path / "slots", step=100, publish=False)
        with pytest.raises(CheckpointError, match="whether step 100 was published is not known"):
            await store.publish(epoch=4, step=100, units=UNITS)
        assert [each.step for each in (await store.history()).steps] == [100]

    run(story(ObjectStore("memory:///")))


def test_units_of_two_runs_make_no_checkpoint(tmp_path: Path) -> None:
    async def mixed(store: ObjectStore) -> None:
        units = copies(tmp_path / "slots", step=100)
        for unit, (copy, path) in units.items():
            state = dataclasses.replace(copy.state, seed=7) if unit == UNITS[1] else copy.state
            await store.upload(dataclasses.replace(copy, state=state), path)
        with pytest.raises(CheckpointError, match="rank_00000 and rank_00001 of step 100 say different things of it"):
            await store.publish(epoch=4, step=100, units=UNITS)
        with pytest.raises(CheckpointError, match="the model has shape"):
            await store.publish(epoch=4, step=100, units=UNITS[:1])

    run(mixed(ObjectStore("memory:///")))


@pytest.mark.parametrize("name", ["state.json", "manifest.json", "held.json"])
def test_damage_is_noticed(tmp_path: Path, name: str) -> None:
    store = ObjectStore(f"file://{tmp_path}/store")
    run(upload_all(store, tmp_path / "slots", step=100))
    path = tmp_path / "store" / "step_00000100" / name
    path.write_bytes(path.read_bytes().replace(b"100", b"101"))
    if name == "state.json":
        with pytest.raises(CheckpointError, match=r"state.json: its checksum is not the one in SHA256SUMS"):
            store.step(100)
    elif name == "manifest.json":
        path.write_bytes(path.read_bytes()[:-1] + b" ")
        with pytest.raises(CheckpointError, match=r"manifest.json: its checksum is not the one in SHA256SUMS"):
            store.step(100)
    else:
        assert run(store.history()) == StoredHistory(damaged=(100,))


class Shortening:
    """A store's ``put_async`` that loses the end of the first shards it is given."""

    def __init__(self, times: int) -> None:
        self.left = times
        self._put = obstore.put_async

    async def __call__(self, store: Any, key: str, file: Any, **options: Any) -> Any:
        if isinstance(file, Path) and self.left:
            self.left -= 1
            file = file.read_bytes()[:-7]
        return await self._put(store, key, file, **options)


def test_an_upload_that_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.elastic.object_store.asyncio.sleep", _no_sleep)
    store = ObjectStore("memory:///")
    copy, path = copies(tmp_path / "slots", step=100)[UNITS[0]]
    monkeypatch.setattr(obstore, "put_async", Shortening(2))
    run(store.upload(copy, path))
    assert run(store.uploaded(epoch=4, step=100)) == {UNITS[0]}
    monkeypatch.setattr(obstore, "put_async", Shortening(100))
    with pytest.raises(ObjectStoreError, match=rf"{copy.shard.size_bytes - 7} bytes after 3 uploads of .*cuts objects"):
        run(store.upload(dataclasses.replace(copy, step=101), path))
    assert run(store.uploaded(epoch=4, step=101)) == frozenset()


async def _no_sleep(seconds: float) -> None:
    """Nobody waits in a test."""


def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(*args: Any, **options: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(obstore, "put_async", forever)
    with pytest.raises(ObjectStoreError, match=r"epoch_00000001.json: no answer within 0.01 s; is it reachable"):
        run(ObjectStore("memory:///", limit_s=0.01).claim_epoch(1, holder="me", lineage={}))


FORBIDDEN, UNREACHED = "; these credentials may not do that", "; check URL, bucket, endpoint"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("s3", {"AWS_SECRET_ACCESS_KEY": "wrong"}, rf"403.*{FORBIDDEN}"),
        ("s3", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, rf"127.0.0.1:9.*{UNREACHED}"),
        ("az", {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="}, rf"403.*{FORBIDDEN}"),
        ("az", {"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:9/tests"}, rf"127.0.0.1:9.*{UNREACHED}"),
    ],
)
def test_errors_name_url_key_and_fix(
    store_url: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    change: dict[str, str],
    message: str,
) -> None:
    url = store_url(kind)
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ObjectStoreError, match=rf"{url}: epochs/epoch_00000001.json: .*{message}") as error:
        run(ObjectStore(url).claim_epoch(1, holder="me", lineage={}))
    assert "Debug source" not in str(error.value)


@pytest.mark.parametrize("kind", ["s3", "gs", "az"])
def test_a_bucket_that_is_not_there_is_named(store_url: Callable[[str], str], kind: str) -> None:
    url = store_url(kind).replace("bucket", "nowhere")
    with pytest.raises(ObjectStoreError, match=rf"object store {url}: epochs: .*404.*{UNREACHED}"):
        run(ObjectStore(url).history())


@pytest.mark.parametrize(
    ("url", "change", "message"),
    [
        (
            "az://bucket/x",
            {},
            "Account must be specified; set AZURE_STORAGE_ACCOUNT_NAME, and",
        ),
        (
            "gs://bucket/x",
            {"GOOGLE_SERVICE_ACCOUNT": "/nowhere.json"},
            "nowhere.json: .*; set GOOGLE_APPLICATION_C",
        ),
        ("file:///proc/nowhere", {}, "give a folder that can be made here"),
    ],
)
def test_an_environment_that_says_too_little_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str, change: dict[str, str], message: str
) -> None:
    for name in [each for each in os.environ if each.startswith(("AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"object store {url}: .*{message}"):
        ObjectStore(url)


@pytest.mark.parametrize("url", ["ftp://host/x", "http://host/x", "bucket", "az:///x", "file://relative"])
def test_a_url_of_no_store_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"object store {url}: .*give s3://BUCKET/RUN"):
        ObjectStore(url)


@pytest.mark.parametrize(
    ("url", "shown", "fix"),
    [
        ("s3://name:a-secret@bucket/run", r"s3://\*{3}@bucket/run", "set AWS_ACCESS_KEY_ID"),
        ("az://container/run?sig=a-secret", r"az://container/run\?sig=\*{3}", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("http://name:a-secret@host/run", r"http://\*{3}@host/run", "give none"),
    ],
)
def test_credentials_in_a_url_are_refused(url: str, shown: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"object store {shown}: .*; take it out of the URL, and {fix}") as refused:
        ObjectStore(url)
    assert "a-secret" not in str(refused.value)


ENDS_AMID = """
import asyncio, sys
from hetero.elastic.object_store import ObjectStore

async def ask():
    asking = asyncio.create_task(ObjectStore("s3://bucket/x").newest_claim())
    await asyncio.sleep(0.2)
    asking.cancel()

asyncio.run(ask())
sys.exit(7)
"""


@pytest.mark.slow
def test_a_process_that_ends_amid_an_operation_ends_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of obstore would abort it, or show a panic; each of these would do so more often than not."""
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        words = [sys.executable, "-c", ENDS_AMID]
        made = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        ends = [(process.communicate()[1], process.returncode) for process in made]
    assert ends == [("", 7)] * 3
