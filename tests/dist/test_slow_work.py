"""A save waits for a rank for as long as that gets on, and names it when it does not."""

import datetime
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from hetero.checkpoint import writer as writer_module
from hetero.checkpoint.folder import published_steps
from hetero.checkpoint.slow_work import Advance, StalledError, work_together
from hetero.checkpoint.writer import CheckpointWriter
from hetero.errors import MembershipError
from tests.helpers.checkpoints import make_slices, plan_of, state_of
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(90)]

LIMIT_S = 3.0
"""How long ranks wait for one another."""

WORK_S = 2.5 * LIMIT_S
STEP_S = 0.1


def impatient_group() -> dist.ProcessGroup:
    limit = datetime.timedelta(seconds=LIMIT_S)
    return dist.new_group([0, 1], backend="gloo", timeout=limit)  # noqa: TID251  (shorter than the test may take)


def takes_steps(advance: Advance, path: Path) -> str:
    deadline = time.monotonic() + WORK_S
    while time.monotonic() < deadline:
        time.sleep(STEP_S)
        advance()
    return "done"


def writes_bytes(advance: Advance, path: Path) -> str:
    """As a library writes, of which nothing is heard before the end."""
    deadline = time.monotonic() + WORK_S
    with path.open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            time.sleep(STEP_S)
            file.write(bytes(512))
    return "done"


def hangs(advance: Advance, path: Path) -> str:
    threading.Event().wait()
    return "never"


def is_quick(advance: Advance, path: Path) -> str:
    return "done"


def meet(rank: int, work_of_rank_1: object, folder: Path) -> tuple[str, float]:
    """What rank 0, which is soon done, and rank 1 get, and after how long."""
    works = {"steps": takes_steps, "bytes": writes_bytes, "hangs": hangs}
    work = works[str(work_of_rank_1)] if rank == 1 else is_quick
    group, began_s = impatient_group(), time.monotonic()
    try:
        result = work_together(lambda advance: work(advance, folder / "file"), group=group, limit_s=LIMIT_S)
    except StalledError:
        result = "stalled"
    return result, time.monotonic() - began_s


@pytest.mark.parametrize("moves", ["steps", "bytes"])
def test_ranks_wait_for_one_that_gets_on(moves: str, tmp_path: Path) -> None:
    """For longer than a collective may last."""
    for result, took_s in run_ranks(meet, 2, moves, tmp_path):
        assert result == "done"
        assert took_s >= WORK_S


def test_work_that_does_not_move_has_stalled_after_the_limit(tmp_path: Path) -> None:
    (quick, _), (stalled, took_s) = run_ranks(meet, 2, "hangs", tmp_path)
    assert (quick, stalled) == ("done", "stalled")
    assert took_s >= LIMIT_S


def save_where_rank_1_hangs(rank: int, folder: Path, asynchronous: bool) -> str:
    with mock.patch.object(writer_module, "create_group", return_value=impatient_group()):
        writer = CheckpointWriter(
            folder, world=dist.group.WORLD, start_step=0, keep_last=None, asynchronous=asynchronous
        )
    never, original = threading.Event(), writer_module.write_shard

    def write_shard(*args: object, **options: object) -> object:
        return never.wait() if rank == 1 else original(*args, **options)

    def save() -> None:
        slices = make_slices(step=1, rank=rank, num_ranks=2, cut=2)
        writer.save(step=1, slices=slices, state=state_of(plan_of(world_size=2), step=1))
        writer.wait()

    with mock.patch.object(writer_module, "write_shard", write_shard), pytest.raises(MembershipError) as caught:
        save()
    return str(caught.value)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_rank_names_the_one_whose_file_system_hangs(tmp_path: Path, asynchronous: bool) -> None:
    said = run_ranks(save_where_rank_1_hangs, 2, tmp_path / "saved", asynchronous)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 (on ")
    assert f"stood still: saving step 1, it has not written to {tmp_path / 'saved'} for 3 s; " in said[0]
    assert published_steps(tmp_path / "saved") == []
