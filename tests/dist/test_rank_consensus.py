"""Either all ranks go on, or all raise the same error, which says whose it is."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from hetero.distributed.rank_consensus import ConsensusError, check_same_everywhere, is_wrong_input, on_all_ranks
from hetero.errors import CheckpointError, ConfigError, PlanError
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(60)]

WORLD_SIZE = 4

Step = Callable[[int], object]
"""What a rank does at start-up, by its number."""


def outcome(rank: int, step: Step) -> object:
    """What a rank got: the value, or the error and its message. Then all meet, so nobody hangs or is left behind."""
    try:
        got: object = on_all_ranks(lambda: step(rank))
    except ConfigError as error:
        got = type(error), str(error), is_wrong_input(error)
    dist.barrier()
    return got


def outcome_of_check(rank: int, texts: list[str]) -> str | None:
    try:
        check_same_everywhere("plan", texts[rank], fix="give every host the same file")
    except ConfigError as error:
        return str(error)
    finally:
        dist.barrier()
    return None


def succeed(rank: int) -> int:
    return 10 * rank


def return_none(rank: int) -> None:
    return None


def fail_on_rank_2(rank: int) -> int:
    if rank == 2:
        raise PlanError("plan.json: no such file")
    return rank


def fail_everywhere(rank: int) -> int:
    raise ConfigError("plan.json: not JSON")


def fail_differently(rank: int) -> int:
    if rank == 3:
        return rank
    raise ConfigError("disk is full" if rank == 1 else "no such file")


def fail_by_type(rank: int) -> int:
    if rank == 0:
        raise CheckpointError("damaged")
    raise ConfigError("not JSON")


def fail_without_message(rank: int) -> int:
    if rank == 0:
        raise ConfigError
    return rank


def test_every_rank_gets_its_own_value() -> None:
    assert run_ranks(outcome, WORLD_SIZE, succeed) == [0, 10, 20, 30]


def test_none_is_a_value() -> None:
    assert run_ranks(outcome, WORLD_SIZE, return_none) == [None] * WORLD_SIZE


@pytest.mark.parametrize(
    ("step", "message", "is_of_input"),
    [
        (fail_on_rank_2, "on rank 2: plan.json: no such file", False),
        (fail_everywhere, "plan.json: not JSON", True),
        (fail_differently, "on ranks 0,2: no such file; on rank 1: disk is full", True),
        (fail_by_type, "on rank 0: damaged; on ranks 1-3: not JSON", False),
        (fail_without_message, "on rank 0: ConfigError", True),
    ],
    ids=["one-rank", "all-ranks", "different-errors", "different-types", "no-message"],
)
def test_an_error_on_some_rank_is_an_error_on_all(step: Step, message: str, is_of_input: bool) -> None:
    """The message is said once where all say the same, and names the ranks where not."""
    assert run_ranks(outcome, WORLD_SIZE, step) == [(ConsensusError, message, is_of_input)] * WORLD_SIZE


def let_a_bug_through(rank: int) -> str:
    """What is no error of the input keeps its type and its traceback, on the rank that has it."""
    try:
        on_all_ranks(lambda: [][rank])
    except IndexError:
        return "IndexError"
    return "nothing"


def test_a_bug_is_not_taken_for_wrong_input() -> None:
    assert run_ranks(let_a_bug_through, 1) == ["IndexError"]


@pytest.mark.parametrize(
    ("texts", "ranks"),
    [
        (["a", "a", "a", "a"], None),
        (["a", "b", "a", "a"], "1"),
        (["b", "a", "a", "a"], "1-3"),
        (["a", "b", "a", "c"], "1,3"),
        (["", "", "", " "], "3"),
    ],
)
def test_texts_must_be_the_same_on_all_ranks(texts: list[str], ranks: str | None) -> None:
    message = ranks and f"plan: ranks {ranks} have another one than rank 0; give every host the same file"
    assert run_ranks(outcome_of_check, WORLD_SIZE, texts) == [message] * WORLD_SIZE
