"""When a rank dies, stops or fails, all others end soon, and say which one it was, where it worked, and why.

Ranks train a small plan under the failure detector; one of them fails in the middle of a backward, while others wait
for it. The store is the launcher's, as under torchrun, where nothing else is said.

That nobody waits for a time-out is shown by giving the time-out ten minutes, which the test does not wait for; how many
beats a silence has to last is counted in tests/unit/distributed/test_failure_detector.py.
"""

import contextlib
import dataclasses
import datetime
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.failure_detector import FailureDetector, FailureDetectorOptions
from hetero.distributed.process_exit import EXIT_CODE, bounded_exit
from hetero.distributed.process_groups import create_groups
from hetero.distributed.rank_consensus import ConsensusError
from hetero.distributed.shutdown import leave_world
from hetero.errors import MembershipError
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import Ended, end_of_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, microbatches

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(90)]

OPTIONS = FailureDetectorOptions(beat_s=0.2, lost_after_s=3.0, roll_call_s=2.0)
WHATEVER_THE_SILENCE = dataclasses.replace(OPTIONS, lost_after_s=600.0)
"""Who waited for a rank to be silent for so long would still wait when the test ends all ranks."""

WHATEVER_THE_ROLL_CALL = dataclasses.replace(WHATEVER_THE_SILENCE, roll_call_s=600.0)
"""And who waited for the answer of a rank that has told why it left."""

IDLE = 3
LAST = 4
PLACES = {
    0: "rank 0 (replica 0 stage 0)",
    1: "rank 1 (replica 0 stage 1)",
    2: "rank 2 (replica 0 stage 1)",
    IDLE: "rank 3 (idle)",
    LAST: "rank 4 (replica 1 stage 0)",
}


def small_plan() -> Plan:
    first = replica(stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=(1, 2), tp=2), num_samples=2)
    second = replica(stage(layers=(0, 2), ranks=(LAST,)), num_samples=2)
    return plan(gpt2_model(num_layers=2), [first, second], idle_ranks=(IDLE,))


Failure = Callable[[], None]
"""What happens to a rank."""


def train_until_failure(
    rank: int, store: dist.Store, victim: int, failure: Failure, happened: Path, options: FailureDetectorOptions
) -> None:
    """As ``pretrain_gpt.py`` does it: many steps under a failure detector; a lost rank is an exit code of its own."""
    made = small_plan()

    def fail(*_: object) -> None:
        happened.touch()
        failure()

    try:
        with FailureDetector(store, rank=rank, world_size=made.world_size, options=options) as detector:
            detector.wait_for_all()
            detector.describe, detector.doing = PLACES.__getitem__, "training"
            context = create_groups(made, device=torch.device("cpu"))
            trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS)
            # Always the same batch.
            data = itertools.repeat(microbatches(made, rank, step=0)) if reads_data(context) else None
            session = TrainingSession(context, trainer, data=data)
            for step in range(1000):
                if rank == victim and step == 2:
                    if rank == IDLE:
                        fail()
                    else:
                        next(iter(trainer.parameters.values()))[1].register_hook(fail)
                session.step()
    except MembershipError as error:
        sys.stderr.write(f"hetero: rank {rank}: {error}\n")
        sys.exit(EXIT_CODE)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stand_still() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def run_until_failure(
    victim: int,
    failure: Failure,
    folder: Path,
    *,
    options: FailureDetectorOptions = OPTIONS,
    store_host: Literal["launcher", "rank 0"] = "launcher",
) -> list[Ended]:
    """How the ranks ended: all others by themselves."""
    happened = folder / "happened"
    lasting = (victim,) if failure is stand_still else ()
    ranks = end_of_ranks(
        train_until_failure, len(PLACES), victim, failure, happened, options, store_host=store_host, lasting=lasting
    )
    assert happened.exists(), ranks
    hanging = [rank for rank, ended in enumerate(ranks) if rank != victim and ended.at_s is None]
    assert hanging == [], ranks
    return ranks


def said_by(rank: int, ended: Ended) -> str:
    """The one line that a rank prints about the others' end."""
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith(f"hetero: rank {rank}: ")]
    return line


def assert_others_said(message: str, ranks: list[Ended], victim: int) -> None:
    for rank, ended in enumerate(ranks):
        if rank != victim:
            assert ended.exit_code == EXIT_CODE, ended.stderr
            assert said_by(rank, ended).endswith(message)


@pytest.mark.rotates("ranks")
@pytest.mark.parametrize("victim", [0, 1, IDLE, LAST])
def test_a_rank_is_killed(victim: int, tmp_path: Path) -> None:
    """The connection that breaks tells its neighbours at once, and the store tells the rest."""
    ranks = run_until_failure(victim, die, tmp_path, options=WHATEVER_THE_SILENCE)
    assert ranks[victim].exit_code == -signal.SIGKILL
    message = (
        f"{PLACES[victim]}, last heard of while training, did not answer and must have died; "
        "start again without what was lost"
    )
    assert_others_said(f"{message}. Training stopped on all ranks.", ranks, victim)


def test_a_rank_stands_still(tmp_path: Path) -> None:
    """Its connections stay open, so only its silence in the store tells."""
    ranks = run_until_failure(1, stand_still, tmp_path)
    assert_others_said(
        f"{PLACES[1]}, last heard of while training, did not answer and must have died; "
        "start again without what was lost. Training stopped on all ranks.",
        ranks,
        victim=1,
    )


def raise_with_message() -> None:
    raise ValueError("layer 3 is odd\nand even")


def raise_without_message() -> None:
    raise AssertionError


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.rotates("ways")
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (raise_with_message, "ValueError: layer 3 is odd and even"),
        (raise_without_message, "AssertionError"),
        (interrupt, "KeyboardInterrupt"),
    ],
)
def test_a_rank_fails(failure: Failure, cause: str, tmp_path: Path) -> None:
    """It shows its own traceback; the others name it and its reason, and do not wait for the whole roll call."""
    ranks = run_until_failure(2, failure, tmp_path, options=WHATEVER_THE_ROLL_CALL)
    assert ranks[2].exit_code == 1
    assert cause.partition(":")[0] in ranks[2].stderr
    assert "hetero:" not in ranks[2].stderr
    assert_others_said(f"{PLACES[2]} failed with {cause}. Training stopped on all ranks.", ranks, victim=2)


@pytest.mark.rotates("ways")
@pytest.mark.parametrize(
    ("failure", "options", "why"),
    [(die, WHATEVER_THE_SILENCE, ""), (stand_still, OPTIONS, "no answer for 3 s")],
    ids=["die", "stand_still"],
)
def test_rank_0_takes_the_store_with_it(
    failure: Failure, options: FailureDetectorOptions, why: str, tmp_path: Path
) -> None:
    """Without torchrun the store is rank 0's: nobody can tell who is gone, but nobody waits either."""
    ranks = run_until_failure(0, failure, tmp_path, options=options, store_host="rank 0")
    for rank, ended in enumerate(ranks[1:], start=1):
        assert ended.exit_code == EXIT_CODE, ended.stderr
        assert f"lost the rendezvous store, and with it the other ranks: {why}" in said_by(rank, ended)
        assert said_by(rank, ended).endswith("Is the host of rank 0 still there?")


def leave_in_turn(rank: int, store: dist.Store, options: FailureDetectorOptions) -> None:
    with FailureDetector(store, rank=rank, world_size=3, options=options):
        time.sleep(2.0 * rank)


@pytest.mark.rotates(every=2, turn=1)
def test_ranks_that_finish_at_different_times_raise_no_alarm() -> None:
    """Even much later than a silent rank is taken for dead."""
    options = FailureDetectorOptions(beat_s=0.1, lost_after_s=1.0, roll_call_s=1.0)
    assert [(ended.exit_code, ended.stderr) for ended in end_of_ranks(leave_in_turn, 3, options)] == [(0, "")] * 3


def finish_during_the_roll_call(rank: int, store: dist.Store) -> None:
    """Rank 1 stands still, rank 2 fails, and while the roll is called for rank 1, rank 0 comes to its end."""
    options = FailureDetectorOptions(beat_s=0.1, lost_after_s=30.0, roll_call_s=3.0)
    with FailureDetector(store, rank=rank, world_size=3, options=options) as detector:
        detector.wait_for_all()
        if rank == 1:
            stand_still()
        if rank == 2:
            raise ValueError("odd")
        time.sleep(1.0)


@pytest.mark.rotates(every=2, turn=0)
def test_a_rank_that_is_done_is_left_alone() -> None:
    finished, _, failed = end_of_ranks(finish_during_the_roll_call, 3, lasting=(1,))
    assert (finished.exit_code, finished.stderr) == (0, "")
    assert failed.exit_code == 1
    assert "ValueError: odd" in failed.stderr


def wait_too_long(rank: int, store: dist.Store, is_wrapped: bool) -> None:
    """Rank 1 computes for longer than rank 0's patience with a collective."""
    impatient = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))  # noqa: TID251
    with FailureDetector(store, rank=rank, world_size=2, options=OPTIONS) as detector:
        detector.wait_for_all()
        detector.describe = PLACES.__getitem__
        if rank == 1:
            time.sleep(20)
        try:
            dist.all_reduce(torch.zeros(1), group=impatient)
        except RuntimeError as error:
            if not is_wrapped:
                raise
            # As megatron-core does where it builds datasets.
            raise Exception("failed to build") from error


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_timeout_names_the_rank_that_stood_still(is_wrapped: bool) -> None:
    """Which lives and answers; it shows where it is, and all end with one message."""
    waiting, still = end_of_ranks(wait_too_long, 2, is_wrapped)
    assert f"{PLACES[1]} stood still: joining for " in waiting.stderr
    assert still.exit_code == EXIT_CODE
    line = said_by(1, still)
    assert line.startswith(f"hetero: rank 1: {PLACES[1]} stood still: joining for ")
    assert " in wait_too_long, and it waits for no other rank; " in line
    assert f"{PLACES[0]} failed with RuntimeError: " in line
    assert "imed out" in line
    assert "rank 1 stood still here:" in still.stderr
    assert "time.sleep(20)" in still.stderr


def wait_in_a_circle(rank: int, store: dist.Store) -> None:
    """Each rank waits for a message of the other one."""
    limit = datetime.timedelta(seconds=2)
    impatient = dist.new_group([0, 1], timeout=limit)  # noqa: TID251
    with FailureDetector(store, rank=rank, world_size=2, options=OPTIONS) as detector:
        detector.wait_for_all()
        detector.describe = PLACES.__getitem__
        dist.recv(torch.zeros(1), src=1 - rank, group=impatient)


def test_a_timeout_of_ranks_that_wait_for_one_another_accuses_none() -> None:
    for ended in end_of_ranks(wait_in_a_circle, 2):
        assert "every rank still answers and waits for others: look at the network between them" in ended.stderr
        assert "stood still" not in ended.stderr


def wait_for_a_device_that_waits(rank: int, store: dist.Store) -> None:
    """Every rank stands still in its device, as over NCCL, and rank 1's watchdog has seen why."""
    seen_at_s = time.monotonic() + 1.0
    with FailureDetector(store, rank=rank, world_size=2, options=WHATEVER_THE_SILENCE) as detector:
        detector.wait_for_all()
        detector.describe = PLACES.__getitem__
        if rank == 1:
            detector.transport_error = lambda: "a transfer did not end" if time.monotonic() > seen_at_s else ""
        time.sleep(60)


def test_what_a_library_has_seen_ends_all_although_no_rank_is_silent() -> None:
    """Long before its watchdog would end the process, a minute later and without a word to the others."""
    for rank, ended in enumerate(end_of_ranks(wait_for_a_device_that_waits, 2, timeout_s=40)):
        assert ended.exit_code == EXIT_CODE, ended.stderr
        assert said_by(rank, ended).endswith(
            f"{PLACES[1]} failed with a transfer did not end; every rank still answers. Training stopped on all ranks."
        )


def leave_with_receives_pending(rank: int, store: dist.Store) -> None:
    """Rank 0 fails while it waits for two messages that nobody sends; rank 1 is in the middle of another collective."""
    pair = dist.new_group([0, 1])  # noqa: TID251
    if rank == 0:
        pending = [dist.irecv(torch.zeros(1), src=1, group=pair), dist.irecv(torch.zeros(1), src=1)]
        assert all(each is not None for each in pending)
        time.sleep(0.5)
    else:
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.zeros(1), group=pair)
    leave_world(failed=True)
    # Nobody can begin a collective any more.
    os._exit(0 if not dist.is_initialized() else 1)


def test_a_rank_leaves_with_receives_pending() -> None:
    """Over gloo: connections close, and who is in a collective hears of it."""
    assert [ended.exit_code for ended in end_of_ranks(leave_with_receives_pending, 2, timeout_s=30)] == [0, 0]


def one_stays_away(rank: int, store: dist.Store, dies: bool) -> None:
    """Rank 2 never comes; rank 1 may die while it waits for it."""
    options = FailureDetectorOptions(
        beat_s=0.1, lost_after_s=2.0, roll_call_s=1.0, arrive_within_s=30.0 if dies else 3.0
    )
    if rank == 2:
        return
    try:
        with FailureDetector(store, rank=rank, world_size=3, options=options) as detector:
            if dies and rank == 1:
                threading.Timer(1.0, die).start()
            detector.wait_for_all()
    except MembershipError as error:
        sys.stderr.write(f"hetero: rank {rank}: {error}\n")
        sys.exit(EXIT_CODE)


def test_a_rank_that_never_arrives_is_named() -> None:
    waiting = end_of_ranks(one_stays_away, 3, False)[:2]
    for rank, ended in enumerate(waiting):
        assert ended.exit_code == EXIT_CODE
        assert "of 3 ranks, 2 did not arrive within 3 s; look at what they printed last" in said_by(rank, ended)


def test_a_rank_that_dies_while_others_are_awaited_is_noticed_at_once() -> None:
    """Long before the limit for those that have not come."""
    waiting, *_ = end_of_ranks(one_stays_away, 3, True)
    assert waiting.exit_code == EXIT_CODE
    said = said_by(0, waiting)
    assert f"rank 1 (on {socket.gethostname()}), last heard of while joining, did not answer" in said
    assert "ranks 2 had not arrived yet. Training stopped on all ranks." in said


def stand_still_among_the_last(rank: int, store: dist.Store) -> None:
    """Rank 1 has left when rank 2, whom it watched, stands still; rank 0 waits for rank 2."""
    options = FailureDetectorOptions(beat_s=0.1, lost_after_s=3.0, roll_call_s=1.0)
    with FailureDetector(store, rank=rank, world_size=3, options=options) as detector:
        detector.wait_for_all()
        detector.describe = PLACES.__getitem__
        if rank == 1:
            return
        time.sleep(2.0)
        if rank == 2:
            stand_still()
        time.sleep(60)


@pytest.mark.rotates(every=2, turn=0)
def test_who_is_left_watches_over_those_that_are_left() -> None:
    waiting, gone, _ = end_of_ranks(stand_still_among_the_last, 3, lasting=(2,), timeout_s=30)
    assert gone.exit_code == 0
    assert waiting.exit_code == EXIT_CODE
    assert f"{PLACES[2]}, last heard of while joining, did not answer and must have died" in said_by(0, waiting)


def leave_the_store_behind(rank: int, store: dist.Store) -> None:
    options = FailureDetectorOptions(beat_s=0.1, lost_after_s=10.0, roll_call_s=1.0)
    with FailureDetector(store, rank=rank, world_size=2, options=options, hosts_store=rank == 0) as detector:
        detector.wait_for_all()
        dist.barrier()
        time.sleep(3.0 * rank)
    if rank == 0:
        os._exit(0)


@pytest.mark.rotates(every=2, turn=0)
def test_rank_0_takes_the_store_along_only_when_nobody_needs_it() -> None:
    """Who comes to its end later would believe that rank 0 was lost."""
    ends = end_of_ranks(leave_the_store_behind, 2, store_host="rank 0")
    assert [(ended.exit_code, ended.stderr) for ended in ends] == [(0, "")] * 2


def agree_slowly(rank: int, store: dist.Store) -> None:
    options = FailureDetectorOptions(beat_s=0.1, lost_after_s=10.0, roll_call_s=1.0)
    with FailureDetector(store, rank=rank, world_size=2, options=options) as detector:
        detector.wait_for_all()
        time.sleep(3.0 * rank)
        raise ConsensusError("the plan is wrong")


@pytest.mark.rotates(every=2, turn=1)
def test_what_all_ranks_raise_alarms_none() -> None:
    for ended in end_of_ranks(agree_slowly, 2):
        assert ended.exit_code == 1
        assert "ConsensusError: the plan is wrong" in ended.stderr
        assert "Training stopped on all ranks" not in ended.stderr


def never_end() -> None:
    with bounded_exit(within_s=1.0):
        threading.Thread(target=time.sleep, args=(1000,)).start()


def test_a_thread_that_waits_for_ever_does_not_keep_the_process() -> None:
    process = multiprocessing.get_context("fork").Process(target=never_end)
    process.start()
    process.join(timeout=10)
    assert process.exitcode == -signal.SIGALRM


def alone(rank: int, store: dist.Store) -> None:
    with FailureDetector(dist.HashStore(), rank=0, world_size=1, options=OPTIONS):
        time.sleep(4 * OPTIONS.beat_s)


def test_one_process_has_nobody_to_watch() -> None:
    """And no TCP store either."""
    (ended,) = end_of_ranks(alone, 1)
    assert (ended.exit_code, ended.stderr) == (0, "")
