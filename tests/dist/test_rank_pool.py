"""The ranks that all other tests run on: they are used again, and no case sees what another has left in them."""

import builtins
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero.runtime.stage import StageModel
from hetero.schedule import orders
from tests.helpers import ranks
from tests.helpers.layouts import layout
from tests.helpers.rank_pool import RankPool
from tests.helpers.training import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

NOTE = "a note that a case leaves in its process"
NOTES: set[str] = set()


@pytest.fixture
def pool() -> Iterator[RankPool]:
    made = RankPool()
    yield made
    made.close()


def process_of(rank: int) -> int:
    return os.getpid()


def neighbours(rank: int) -> tuple[int, list[int]]:
    """The processes of all ranks, as a collective of theirs tells."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, os.getpid())
    return rank, every


@pytest.mark.slow
def test_ranks_are_used_again_in_groups_of_any_size(pool: RankPool) -> None:
    four = pool.run(process_of, 4, (), 30)
    assert len(set(four)) == 4
    for world_size in (1, 3, 4):
        seen = pool.run(neighbours, world_size, (), 30)
        assert [rank for rank, _ in seen] == list(range(world_size))
        assert all(every == seen[0][1] for _, every in seen)
        assert set(seen[0][1]) <= set(four)
    assert pool.replaced == []


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 is odd")
    dist.barrier()


def die_on_rank_1(rank: int) -> None:
    """A barrier on rank 0 would fail, too, and may be the first to tell."""
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def hang_on_rank_1(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.rotates("ways")
@pytest.mark.parametrize(
    ("case", "said", "timeout_s"),
    [
        (fail_on_rank_1, r"rank 1 failed:\n(.*\n)*ValueError: rank 1 is odd", 30),
        (die_on_rank_1, r"ranks ended without a result; exit codes \{1: 7\}", 30),
        (hang_on_rank_1, r"ranks \[(0, )?1\] hung\n(.*\n)*.*in hang_on_rank_1", 3),
    ],
)
def test_a_rank_that_fails_costs_its_own_case_alone(
    case: Callable[[int], None], said: str, timeout_s: float, pool: RankPool
) -> None:
    """Its two processes are gone, the third of the pool works on, and fresh ones join it."""
    before = pool.run(process_of, 3, (), 30)
    spared = before[2]
    with pytest.raises(AssertionError, match=said):
        pool.run(case, 2, (), timeout_s)
    after = pool.run(process_of, 3, (), 30)
    assert spared in after
    assert set(before) & set(after) == {spared}


@pytest.mark.slow
def test_a_rank_that_hangs_shows_its_stack(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[0\] hung\n(.*\n)*.*in sleep_alone"):
        pool.run(sleep_alone, 1, (), 2)


def sleep_alone(rank: int) -> None:
    time.sleep(60)


def nothing_is_returned(rank: int) -> Callable[[], None]:
    return lambda: None


def test_what_cannot_be_sent_back_is_a_failure(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed:\n(.*\n)*.*[Pp]ickl"):
        pool.run(nothing_is_returned, 1, (), 30)


def moment(rank: int, number: int) -> float:
    return time.monotonic()


def test_what_one_process_answers_is_kept_for_all_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would ask, which remembers nothing itself."""
    monkeypatch.setattr(ranks.ANSWERS, "folder", tmp_path)
    ask = ranks.run_alone.__wrapped__
    assert ask(moment, 1) == ask(moment, 1)
    assert ask(moment, 1) != ask(moment, 2)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(ranks.ANSWERS, "folder", None)
    assert ask(moment, 1) != ask(moment, 1)


# ---- what a case leaves behind


def a_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)


def threads_of_torch() -> None:
    torch.set_num_threads(2)


def random_numbers() -> None:
    torch.manual_seed(123), np.random.seed(123), random.seed(123)


def no_gradients() -> None:
    torch.set_grad_enabled(False)


def the_environment() -> None:
    os.environ["LEFT_BEHIND"] = "1"


def the_folder() -> None:
    os.chdir("/")


def a_function_of_torch() -> None:
    dist.all_reduce = lambda *_, **__: None


def a_method() -> None:
    StageModel.forward = lambda *_: None  # type: ignore[method-assign]


def a_new_method() -> None:
    StageModel.backward_twice = lambda *_: None  # type: ignore[attr-defined]


def an_entry_of_a_table() -> None:
    orders.ORDERS["left behind"] = orders.ORDERS["gpipe"]  # type: ignore[index]


def an_element_of_a_set() -> None:
    NOTES.add(NOTE)


def a_thread() -> None:
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()


def a_signal_handler() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: None)


def open_files() -> None:
    builtins.open_files = [os.dup(2) for _ in range(400)]  # type: ignore[attr-defined]


def groups_of_megatron() -> None:
    from megatron.core import parallel_state  # noqa: PLC0415, TID251

    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = NOTE


LEAVERS = [
    a_default_dtype,
    threads_of_torch,
    random_numbers,
    no_gradients,
    the_environment,
    the_folder,
    a_function_of_torch,
    a_method,
    a_new_method,
    an_entry_of_a_table,
    an_element_of_a_set,
    a_thread,
    a_signal_handler,
    open_files,
    groups_of_megatron,
]


def leave(rank: int, leaver: Callable[[], None]) -> None:
    leaver()


def what_a_test_could_see(rank: int) -> dict[str, object]:
    from megatron.core import parallel_state  # noqa: PLC0415, TID251

    return {
        "dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "random numbers": (torch.rand(1).item(), np.random.rand(), random.random()),
        "gradients": torch.is_grad_enabled(),
        "environment": sorted(os.environ.items()),
        "folder": str(Path.cwd()),
        "all_reduce": dist.all_reduce.__qualname__,
        "methods": sorted((name, str(getattr(part, "__qualname__", ""))) for name, part in vars(StageModel).items()),
        "orders": sorted(orders.ORDERS),
        "notes": sorted(NOTES),
        "python threads": threading.active_count(),
        "handler": str(signal.getsignal(signal.SIGUSR1)),
        "many files": len(list(Path("/proc/self/fd").iterdir())) > 200,
        "groups": parallel_state._TENSOR_MODEL_PARALLEL_GROUP is None,
    }


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_no_case_sees_what_another_left(pool: RankPool) -> None:
    """It is put back, or the process is replaced."""
    (clean,) = pool.run(what_a_test_could_see, 1, (), 30)
    for leaver in LEAVERS:
        pool.run(leave, 1, (leaver,), 30)
        (seen,) = pool.run(what_a_test_could_see, 1, (), 30)
        assert seen == clean, leaver.__name__


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
@pytest.mark.parametrize("leaver", LEAVERS, ids=lambda leaver: leaver.__name__)
def test_what_is_left_would_be_seen(leaver: Callable[[], None], pool: RankPool) -> None:
    """Otherwise the test above could not fail."""
    (clean,) = pool.run(what_a_test_could_see, 1, (), 30)
    (seen,) = pool.run(leave_and_look, 1, (leaver,), 30)
    assert seen != clean


def leave_and_look(rank: int, leaver: Callable[[], None]) -> dict[str, object]:
    leaver()
    return what_a_test_could_see(rank)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_training_gives_the_same_bits_in_a_used_process(pool: RankPool) -> None:
    """After experts, half layers and other groups, what a first training gave; and no process had to be replaced."""
    plan = layout("tp-2|1", "llama-gqa")
    others = [layout("half-cuts", "moe"), layout("interleaved-delays", "llama-gqa")]
    first = pool.run(train, 3, (plan, 2), 60)
    for other in others:
        pool.run(train, other.world_size, (other, 1), 60)
    again = pool.run(train, 3, (plan, 2), 60)
    assert pool.replaced == []
    for before, after in zip(first, again, strict=True):
        assert before.losses == after.losses
        for name, weight in before.weights[-1].items():
            np.testing.assert_array_equal(weight, after.weights[-1][name], name)
