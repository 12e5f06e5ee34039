"""Ranks hold a committed step, it is uploaded, and nodes of which none was in the run before go on from there."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hetero.checkpoint.folder import latest_step
from hetero.elastic import held_uploads
from hetero.elastic.copy_folder import read_placement, remove_copy
from hetero.elastic.held_uploads import held_units, holds_any
from hetero.elastic.object_store import ObjectStore
from hetero.elastic.records import Epoch
from hetero.elastic.recovery import BadCopy
from hetero.plan.ir import Plan
from tests.dist.test_elastic_restore import (
    DP2_PP2,
    END,
    FOUR,
    TWO_RANKS,
    argv,
    assert_as_one_process,
    assert_same_bits,
    epoch,
)
from tests.helpers.elastic import Run, elastic_session, nodes
from tests.helpers.ranks import run_ranks
from tests.helpers.refusing_file_system import refuse_links
from tests.helpers.sessions import Session, session

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

HELD = 2
NEW = {"c": (0, 1), "d": (2, 3)}


def upload_held(run: Run, number: int) -> None:
    """What agents and leader do with the step that the ranks hold; it is the first one that was due."""
    assert run.object_store is not None
    store = ObjectStore(run.object_store)

    async def upload() -> None:
        await store.claim_epoch(number, holder="job", lineage=run.lineage)
        units: set[str] = set()
        for name, ranks in FOUR.items():
            folder = run.nodes.folder(name)
            placement = read_placement(folder, number)
            assert placement is not None
            held = held_units(folder, number, [unit.name for unit in placement.units if unit.owner in ranks])
            assert held is not None
            assert {copy.step for copy, _ in held.values()} == {HELD}, "later ones wait until this one is uploaded"
            for copy, path in held.values():
                await store.upload(copy, path)
            units |= held.keys()
        assert await store.publish(epoch=number, step=HELD, units=units)

    asyncio.run(upload())


def run_on(run: Run, made: Plan, ranks_of: Mapping[str, tuple[int, ...]], **flags: Any) -> tuple[Epoch, list[Session]]:
    """An epoch of a job that finds ``run.object_store`` as another has left it."""
    assert run.object_store is not None
    history = asyncio.run(ObjectStore(run.object_store).history())
    run.stored, run.lineage = history.steps, run.lineage or dict(history.lineage)
    begun = run.next_epoch(made, ranks_of)
    arguments = (run.assignments(begun), argv(made, sharded=made.distributed_optimizer, **flags), END)
    return begun, run_ranks(elastic_session_with, made.world_size, dict(os.environ), *arguments)


def elastic_session_with(rank: int, environment: Mapping[str, str], *arguments: Any) -> Session:
    """On every rank: credentials come from the environment."""
    given = {name: value for name, value in environment.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))}
    os.environ.update(given)
    try:
        return elastic_session(rank, *arguments)
    finally:
        for name in given:
            del os.environ[name]


@pytest.fixture(params=["file", "s3", "az"])
def url(request: pytest.FixtureRequest, store_url: Callable[[str], str]) -> str:
    return store_url(request.param)


@pytest.mark.slow
@pytest.mark.rotates("restores")
def test_all_nodes_are_lost_and_the_bits_are_the_same(url: str, tmp_path: Path) -> None:
    """Also the second half of it under ``--load``, where the store is a folder; and under another plan, to 1e-9."""
    sharded = dataclasses.replace(DP2_PP2, distributed_optimizer=True)
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made, object_store=url, upload_every=HELD)
        epoch(run, DP2_PP2, FOUR, sharded=True, end_step=5, dies=True)
        upload_held(run, 1)
        for name in "ab":
            made.lose(name)
        for name in "cd":
            made.add(name)
        again = Run(made, object_store=url)
        begun, ours = run_on(again, sharded, NEW)
        assert begun.start.step == HELD
        assert not any(begun.sources.values()), "none of them has anything"
        assert [each.start_step for each in ours] == [HELD] * 4
        assert {report.phase for report in made.reports()}.isdisjoint({"bad_copy", "failed"})

        _, others = run_on(Run(made, object_store=url), TWO_RANKS, {"c": (0, 1)})
    alone = run_ranks(session, 4, sharded, argv(sharded, sharded=True), END)
    assert_same_bits(ours, alone)
    assert_as_one_process(DP2_PP2, ours)
    assert_as_one_process(TWO_RANKS, others)
    if url.startswith("file"):
        folder = url.removeprefix("file://")
        assert latest_step(Path(folder)) == HELD
        loaded = run_ranks(session, 4, sharded, argv(sharded, sharded=True, load=folder), END)
        assert [each.start_step for each in loaded] == [HELD] * 4
        assert_same_bits(loaded, alone)


@pytest.mark.slow
def test_some_units_come_from_a_node_and_some_from_the_store(tmp_path: Path) -> None:
    """A node that is left has what its own ranks owned, and has lost what it kept for the other."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made, object_store=f"file://{tmp_path}/store", upload_every=HELD)
        epoch(run, DP2_PP2, FOUR, sharded=True, end_step=HELD + 1, dies=True)
        upload_held(run, 1)
        placement = read_placement(made.folder("b"), 1)
        assert placement is not None
        made.lose("a")
        made.add("c")
        for unit in placement.units:
            for step in (HELD - 1, HELD, HELD + 1):
                if unit.owner in FOUR["a"] or step != HELD:
                    remove_copy(made.folder("b"), epoch=1, step=step, unit=unit.name)
        sharded = dataclasses.replace(DP2_PP2, distributed_optimizer=True)
        begun, ours = run_on(run, sharded, {"b": (2, 3), "c": (0, 1)})
        assert begun.start.step == HELD
        assert set(begun.sources.values()) == {("b",), ()}
    assert_as_one_process(DP2_PP2, ours)


@pytest.mark.slow
@pytest.mark.rotates("objects")
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "manifest"])
def test_bad_objects_are_reported_and_the_next_epoch_takes_none(harm: str, tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made, object_store=f"file://{tmp_path}/store", upload_every=HELD)
        epoch(run, DP2_PP2, FOUR, sharded=False, end_step=HELD + 1, dies=True)
        upload_held(run, 1)
        folder = tmp_path / "store" / f"step_{HELD:08d}"
        largest = max(folder.glob("*.safetensors"), key=lambda each: each.stat().st_size)
        path = folder / "manifest.json" if harm == "manifest" else largest
        content = bytearray(path.read_bytes())
        if harm == "remove":
            path.unlink()
        else:
            content[len(content) // 2] ^= 1
            path.write_bytes(content[:-100] if harm == "cut" else content)
        made.lose("a")
        made.lose("b")
        made.add("c")
        again = Run(made, object_store=run.object_store, committed=HELD)
        made.reports()
        with pytest.raises(AssertionError, match=r"step_00000002/.*(damaged|checksum)"):
            run_on(again, TWO_RANKS, {"c": (0, 1)})
        reported = {report.detail for report in made.reports() if report.phase == "bad_copy"}
        assert reported
        unit = "rank_00000" if harm == "manifest" else largest.stem.partition(".")[2]
        assert reported <= {f"object-store/1/{HELD}/{unit}"}
        with pytest.raises(AssertionError, match="no step is whole"):
            again.next_epoch(TWO_RANKS, {"c": (0, 1)}, bad=frozenset(map(BadCopy.parse, reported)))


def session_without_links(rank: int, *arguments: Any) -> Session:
    """On every rank: its file system refuses hard links, and copies for the upload end after the last step."""
    goes_on, threads = threading.Event(), list[threading.Thread]()
    copy_whole = held_uploads.copy_whole

    def late(source: Any, target: Path) -> None:
        threads.append(threading.current_thread())
        goes_on.wait()
        copy_whole(source, target)

    with pytest.MonkeyPatch.context() as patched:
        refuse_links(patched)
        patched.setattr(held_uploads, "copy_whole", late)
        seen = elastic_session(rank, *arguments)
        goes_on.set()
        for thread in threads:
            thread.join()
    assert threads, "each rank has copied what it owns"
    return seen


@pytest.mark.slow
def test_without_hard_links_an_upload_holds_the_step_that_was_committed(tmp_path: Path) -> None:
    """Both slots are written again by real ranks before it is copied, which no step waits for."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made, object_store=f"file://{tmp_path}/store", upload_every=HELD)
        begun = run.next_epoch(DP2_PP2, FOUR)
        ranks = run.assignments(begun), argv(DP2_PP2, sharded=False), END, True
        run_ranks(session_without_links, DP2_PP2.world_size, *ranks)
        upload_held(run, 1)
        for name in "ab":
            made.lose(name)
        for name in "cd":
            made.add(name)
        again, ours = run_on(Run(made, object_store=run.object_store), DP2_PP2, NEW)
        assert again.start.step == HELD
    assert_same_bits(ours, run_ranks(session, 4, DP2_PP2, argv(DP2_PP2, sharded=False), END))


def test_a_step_is_held_until_it_is_uploaded(tmp_path: Path) -> None:
    """Links of slots that are written again meanwhile; without a schedule nothing is held."""
    with nodes(tmp_path, "a", "b") as made:
        run = Run(made)
        epoch(run, DP2_PP2, FOUR, sharded=False, end_step=3, dies=True)
        assert not any(holds_any(made.folder(name), 1) for name in "ab")
