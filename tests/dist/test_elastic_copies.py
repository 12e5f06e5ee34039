"""Copies beside steps: into which files, what is committed when, and what happens where they cannot be made."""

import dataclasses
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from hetero.checkpoint.shard_files import LocalShardFile, check_whole
from hetero.distributed.rank_consensus import ConsensusError
from hetero.elastic import copies as copies_module
from hetero.elastic import slot_files
from hetero.elastic.copy_folder import epochs_in, inventory, read_copy, shard_path, slot_folder
from hetero.elastic.records import Copy, HeldStep, RankAssignment
from hetero.elastic.recovery import INITIAL_WEIGHTS, Restore
from megatron.pretrain.elastic import ElasticRank
from tests.dist.test_elastic_restore import TWO_STAGES, argv
from tests.helpers.elastic import Run, elastic_session, nodes, wait_for_copy
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import Session

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

PLACES = {"a": (0,), "b": (1,)}
UNITS = frozenset({"rank_00000", "rank_00000.held_00001", "rank_00001", "rank_00001.held_00000"})
"""The tied embedding is on both nodes, and each owns a half of it."""

END = 6


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Two nodes of one rank each."""
    with nodes(tmp_path, "a", "b") as made:
        yield Run(made)


def train(run: Run, *arguments: object) -> list[Session]:
    epoch = run.next_epoch(TWO_STAGES, PLACES)
    return run_ranks(elastic_session, 2, run.assignments(epoch), argv(TWO_STAGES, sharded=False), *arguments)


def committed_by_step(run: Run) -> dict[int, int]:
    return {each.step: each.committed for each in run.nodes.reports() if each.phase == "step" and each.rank == 0}


@pytest.mark.slow
def test_two_slots_take_turns_and_a_step_commits_the_one_before(run: Run) -> None:
    train(run, END)
    assert committed_by_step(run) == {step: step - 1 for step in range(1, END + 1)}
    for name in PLACES:
        folder = run.nodes.folder(name)
        newest = {HeldStep(epoch=1, step=step, units=UNITS) for step in (END - 1, END)}
        assert set(inventory(folder, node=name).steps) == newest
        for slot in (slot_folder(folder, 1, number) for number in (0, 1)):
            for unit in UNITS:
                copy = read_copy(slot, unit)
                assert copy is not None
                check_whole(LocalShardFile(shard_path(slot, unit)), copy.shard)
        assert not [path for path in folder.rglob("*") if path.name.endswith(".partial")]


@pytest.mark.slow
def test_ranks_tell_how_long_they_compute(run: Run) -> None:
    """In each step, and no longer than the step: on CPU the host computes."""
    train(run, END)
    steps = [each for each in run.nodes.reports() if each.phase == "step"]
    assert {each.rank for each in steps} == {0, 1}
    assert all(0.0 < each.compute_s < each.step_s for each in steps)


def link_and_look(rank: int, step: int, elastic: ElasticRank) -> None:
    """Slots are used again in place; a file that an upload holds is left to it."""
    wait_for_copy(rank, step, elastic)
    copies = elastic._copies
    assert copies is not None
    own = f"rank_{rank:05d}"
    files = [shard_path(slot_folder(copies._folder, 1, slot), own) for slot in (0, 1)]
    links = [path.with_suffix(".held") for path in files]
    if step == 4:
        assert sorted(path.stat().st_ino for path in files) == link_and_look.inodes  # type: ignore[attr-defined]
        for path, link in zip(files, links, strict=True):
            os.link(path, link)
        link_and_look.content = [link.read_bytes() for link in links]  # type: ignore[attr-defined]
    if step == 3:
        link_and_look.inodes = sorted(path.stat().st_ino for path in files)  # type: ignore[attr-defined]
    if step == END:
        assert [link.read_bytes() for link in links] == link_and_look.content  # type: ignore[attr-defined]
        assert all(path.stat().st_ino != link.stat().st_ino for path, link in zip(files, links, strict=True))
        for link in links:
            link.unlink()
        del link_and_look.inodes, link_and_look.content  # type: ignore[attr-defined]


@pytest.mark.slow
def test_files_are_written_in_place_unless_an_upload_holds_them(run: Run) -> None:
    train(run, END, False, link_and_look)


def fill_the_disk(rank: int, step: int, elastic: ElasticRank) -> None:
    """While the copy of step 2 is made, rank 1 has no room; the copy of step 1 was whole."""
    if rank == 1 or step != 3:
        wait_for_copy(rank, step, elastic)
    if rank == 1 and step == 2:
        slot_files.os = SimpleNamespace(**{**vars(os), "posix_fallocate": _no_room})  # type: ignore[assignment]
    if step == 3:
        slot_files.os = os  # type: ignore[assignment]
        assert elastic._copies is not None
        said = elastic._copies._said
        assert (said == {" [Errno 28] No space left on device"}) == (rank == 1), said


def _no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_a_copy_that_finds_no_room_is_given_up_and_the_next_is_made(run: Run) -> None:
    seen = train(run, END, False, fill_the_disk)
    assert [len(each.results) for each in seen] == [END, END]
    assert committed_by_step(run) == {1: 0, 2: 1, 3: 1, 4: 3, 5: 4, 6: 5}


def claim_a_huge_unit(rank: int, step: int, elastic: ElasticRank) -> None:
    """Of step 2 node a says that what rank 0 owns has a TiB; node b takes no memory for it, and says why."""
    wait_for_copy(rank, step, elastic)
    if step == 1:
        claim_a_huge_unit.before = copies_module.write_copy, slot_files.os  # type: ignore[attr-defined]
        claim_a_huge_unit.reserved = reserved = []  # type: ignore[attr-defined]
        fallocate, write = os.posix_fallocate, copies_module.write_copy

        def note(descriptor: int, start: int, size: int) -> None:
            reserved.append(size)
            fallocate(descriptor, start, min(size, 2**20))

        def claim(slot: Path, copy: Copy) -> None:
            is_claimed = (rank, copy.unit, copy.step) == (0, "rank_00000", 2)
            shard = dataclasses.replace(copy.shard, size_bytes=2**40) if is_claimed else copy.shard
            write(slot, dataclasses.replace(copy, shard=shard))

        slot_files.os = SimpleNamespace(**{**vars(os), "posix_fallocate": note})  # type: ignore[assignment]
        copies_module.write_copy = claim
    if step == 3:
        copies_module.write_copy, slot_files.os = claim_a_huge_unit.before  # type: ignore[attr-defined]
        assert elastic._copies is not None
        said = "".join(elastic._copies._said)
        assert ("its rank_00000 has 1,099,511,627,776 bytes, as it says" in said) == (rank == 1), said
        assert max(claim_a_huge_unit.reserved) < 2**20  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_size_that_a_node_claims_is_checked_before_memory_is_taken(run: Run) -> None:
    seen = train(run, END, False, claim_a_huge_unit)
    assert [len(each.results) for each in seen] == [END, END]
    assert committed_by_step(run) == {1: 0, 2: 1, 3: 1, 4: 3, 5: 4, 6: 5}


def dont_wait(rank: int, step: int, elastic: ElasticRank) -> None:
    """For copies that nobody will have."""


@pytest.mark.slow
def test_without_the_other_node_nothing_is_committed_and_training_goes_on(run: Run) -> None:
    run.nodes.stop_serving("b")
    epoch = run.epoch_from(Restore(start=INITIAL_WEIGHTS, sources={}), TWO_STAGES, PLACES)
    seen = run_ranks(elastic_session, 2, run.assignments(epoch), argv(TWO_STAGES, sharded=False), END, True, dont_wait)
    assert [len(each.results) for each in seen] == [END, END]
    assert set(committed_by_step(run).values()) == {0}


def refused(rank: int, assignments: list[RankAssignment], free_bytes: int) -> str:
    """What a rank says where node a has so much room."""

    def statvfs(folder: object) -> object:
        return SimpleNamespace(f_bavail=free_bytes if str(folder).endswith("a") else 2**40, f_frsize=1)

    with mock.patch("hetero.elastic.placing.os.statvfs", statvfs):
        try:
            elastic_session(rank, assignments, argv(TWO_STAGES, sharded=False), 1)
        except ConsensusError as error:
            return str(error)
    return ""


def test_too_little_room_is_said_before_training_on_every_rank(run: Run) -> None:
    epoch = run.next_epoch(TWO_STAGES, PLACES)
    messages = run_ranks(refused, 2, run.assignments(epoch), 1000)
    for message in messages:
        assert "on rank 0: " in message
        assert re.search(r"/a on node a: copies of two steps take \d MiB there, and 0 MiB are free", message)
        assert "give the agent a larger folder" in message


@pytest.mark.slow
def test_the_first_commit_deletes_what_the_epoch_went_on_from(run: Run) -> None:
    train(run, 2)
    assert epochs_in(run.nodes.folder("a")) == [1]
    train(run, END)
    for name in PLACES:
        assert epochs_in(run.nodes.folder(name)) == [2]
        assert {held.step for held in inventory(run.nodes.folder(name), node=name).steps} == {END - 1, END}
