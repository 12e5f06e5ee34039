"""A run that is killed while it saves leaves a checkpoint that loads, wherever it was killed."""

import itertools
import multiprocessing
import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hetero.checkpoint.folder import latest_step, published_steps
from hetero.checkpoint.reader import load_checkpoint
from hetero.checkpoint.writer import CheckpointWriter
from tests.helpers.checkpoints import assert_filled, make_slices, plan_of, save_alone, state_of
from tests.helpers.rank_pool import fork_server

pytestmark = [pytest.mark.dist, pytest.mark.slow]

KEEP_LAST = 2
NUM_KILLS = 100
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.chmod", "os.remove", "os.rmdir"}
"""What Python tells its audit hooks of. A save with its clean-up is some 25 of them."""


@pytest.mark.rotates(every=3, turn=2)
def test_the_last_published_checkpoint_always_loads(tmp_path: Path) -> None:
    context = fork_server()
    receive, send = context.Pipe(duplex=False)
    nursery = context.Process(target=kill_again_and_again, args=(tmp_path, send))
    nursery.start()
    send.close()
    try:
        num_kills, num_caught_saving, num_published = receive.recv()
    finally:
        nursery.join(timeout=10)
    assert num_kills == NUM_KILLS
    # Otherwise the kills came before or after the saves and have shown nothing.
    assert num_caught_saving > NUM_KILLS / 4
    assert num_published > NUM_KILLS / 4


def kill_again_and_again(folder: Path, report: Connection) -> None:
    """Runs that are forked from here need no imports. Half of them die at a file system operation, half at a moment."""
    save_alone(folder / "warm up", [make_slices(step=0)], state_of(plan_of(), step=0))
    check_newest(folder / "warm up")
    saves = folder / "saves"
    draw = random.Random(0)
    newest, num_caught_saving = 0, 0
    for kill in range(NUM_KILLS):
        run_and_kill(saves, newest, last_event=draw.randrange(1, 60) if kill % 2 else None, draw=draw)
        step = check_newest(saves)
        assert step >= newest, "a published checkpoint was lost"
        newest = step
        if saves.is_dir():
            num_caught_saving += any(path.name.startswith(".") for path in saves.iterdir())
    save_in_peace(saves, start_step=newest)
    # Checkpoints that a killed run was about to delete go with the next save.
    assert published_steps(saves) == [newest, newest + 1]
    report.send((NUM_KILLS, num_caught_saving, newest))


def save_in_peace(folder: Path, *, start_step: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    writer = CheckpointWriter(
        folder, world=dist.group.WORLD, start_step=start_step, keep_last=KEEP_LAST, asynchronous=False
    )
    step = start_step + 1
    writer.save(step=step, slices=make_slices(step=step), state=state_of(plan_of(), step=step))
    dist.destroy_process_group()


def run_and_kill(folder: Path, start_step: int, *, last_event: int | None, draw: random.Random) -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=save_until_killed, args=(folder, start_step, send, last_event))
    process.start()
    send.close()
    receive.recv()
    if last_event is None:
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
    process.join(timeout=20)
    assert process.exitcode == -signal.SIGKILL


def save_until_killed(folder: Path, start_step: int, started: Connection, last_event: int | None) -> None:
    """Save one checkpoint after the other, up to the file system operation of that number."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if last_event is not None:
        kill_at(last_event, folder)
    started.send(None)
    writer = CheckpointWriter(
        folder, world=dist.group.WORLD, start_step=start_step, keep_last=KEEP_LAST, asynchronous=True
    )
    for step in itertools.count(start_step + 1):
        writer.save(step=step, slices=make_slices(step=step), state=state_of(plan_of(), step=step))


def kill_at(event_number: int, folder: Path) -> None:
    events = itertools.count(1)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and str(folder) in str(args[0]) and next(events) == event_number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)


def check_newest(folder: Path) -> int:
    """The newest step, 0 if there is none; it must load and hold what was saved."""
    step = latest_step(folder)
    if step is None:
        return 0
    slices = make_slices(step=None, cut=7)
    load_checkpoint(folder, step=None, slices=slices, plan=plan_of(), rank=0)
    assert_filled(slices, step=step)
    return step
