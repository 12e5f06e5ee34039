"""Either all ranks go on, or all raise the same error, which says whose it is."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from hetero.distributed.rank_consensus import ConsensusError, check_devices, check_same_everywhere, on_all_ranks
from hetero.errors import ConfigError, PlanError
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
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
        got = type(error), str(error)
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


def fail_without_message(rank: int) -> int:
    if rank == 0:
        raise ConfigError
    return rank


def test_every_rank_gets_its_own_value() -> None:
    assert run_ranks(outcome, WORLD_SIZE, succeed) == [0, 10, 20, 30]


def test_none_is_a_value() -> None:
    assert run_ranks(outcome, WORLD_SIZE, return_none) == [None] * WORLD_SIZE


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (fail_on_rank_2, "on ranks 2: plan.json: no such file"),
        (fail_everywhere, "plan.json: not JSON"),
        (fail_differently, "on ranks 0,2: no such file; on ranks 1: disk is full"),
        (fail_without_message, "on ranks 0: ConfigError"),
    ],
    ids=["one-rank", "all-ranks", "different-errors", "no-message"],
)
def test_an_error_on_some_rank_is_an_error_on_all(step: Step, message: str) -> None:
    """The message is said once where all say the same, and names the ranks where not."""
    assert run_ranks(outcome, WORLD_SIZE, step) == [(ConsensusError, message)] * WORLD_SIZE


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


TWO_KINDS = plan(
    gpt2_model(),
    [
        replica(
            stage(layers=(0, 2), ranks=(1, 2), dp=2, device="A100-40"),
            stage(layers=(2, 6), ranks=(0,), device="V100-16"),
        )
    ],
    idle_ranks=(3,),
)


def test_every_working_rank_sits_on_its_stages_device() -> None:
    """What an idle rank sits on does not matter."""
    check_devices(TWO_KINDS, ["V100-16", "A100-40", "A100-40", "cpu"])


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            ["A100-40", "A100-40", "V100-16", "V100-16"],
            "replica 0 stage 0: it is planned for A100-40, but ranks 2 sit on V100-16; "
            "reorder the hosts or make a plan for these devices",
        ),
        (
            ["cpu"] * 4,
            "replica 0 stage 0: it is planned for A100-40, but ranks 1-2 sit on cpu; "
            "reorder the hosts or make a plan for these devices",
        ),
        (
            ["NVIDIA X1", "A100-40", "A100-40", "cpu"],
            "replica 0 stage 1: it is planned for V100-16, but ranks 0 sit on NVIDIA X1; "
            "reorder the hosts or make a plan for these devices",
        ),
    ],
    ids=["swapped", "no-gpu", "unknown-gpu"],
)
def test_a_stage_on_other_devices_is_refused(devices: list[str], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        check_devices(TWO_KINDS, devices)
    assert str(raised.value) == message
