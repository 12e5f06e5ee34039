"""Uniform interleaved plans run in the order of megatron-core's own interleaved schedule, asked of its functions.

As ``forward_backward_pipelining_with_interleaving`` puts it: the schedule table forwards, with the model chunks
reversed backwards, and so many forwards to warm up.
"""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.plan.lowering import step_rows
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.schedule.actions import COMPUTE, Action, ActionKind, Row, Schedule
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.passes import add_communication
from tests.helpers.models import llama_model


def megatrons_row(*, pp: int, rank: int, chunks: int, num_microbatches: int) -> Row:
    table = get_schedule_table(num_microbatches, chunks, pp)
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    _, _, warm_up, remaining = get_pp_rank_microbatches(num_microbatches, chunks, pp, p2p_communicator=communicator)
    forwards = [Action(chunk * pp + rank, ActionKind.F, m) for m, chunk in table]
    backwards = [Action((chunks - 1 - chunk) * pp + rank, ActionKind.B, m) for m, chunk in table]
    row = forwards[:warm_up]
    for i in range(remaining):
        row += [forwards[warm_up + i], backwards[i]]
    return row + backwards[remaining:]


def uniform_replica(*, pp: int, chunks: int, num_microbatches: int) -> Replica:
    plan = uniform_plan(
        UniformLayout(
            model=llama_model(num_layers=pp * chunks),
            world_size=pp,
            pp=pp,
            stages_per_rank=chunks,
            micro_batch_size=1,
            global_batch_size=num_microbatches,
            seq_length=16,
            device="cpu",
        )
    )
    validate(plan)
    return plan.replicas[0]


def computes(replica: Replica) -> Schedule:
    return [[action for action in row if action.kind in COMPUTE] for row in step_rows(replica)]


def megatrons_order(*, pp: int, chunks: int, num_microbatches: int) -> Schedule:
    return [megatrons_row(pp=pp, rank=rank, chunks=chunks, num_microbatches=num_microbatches) for rank in range(pp)]


def ends(order: Schedule, num_microbatches: list[int]) -> bool:
    try:
        check_no_deadlock(
            add_communication(order, num_microbatches=num_microbatches), num_microbatches=num_microbatches
        )
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_the_order_is_megatrons(pp: int, chunks: int) -> None:
    for num_microbatches in (pp, 2 * pp, 3 * pp, 5 * pp):
        uniform = uniform_replica(pp=pp, chunks=chunks, num_microbatches=num_microbatches)
        assert computes(uniform) == megatrons_order(pp=pp, chunks=chunks, num_microbatches=num_microbatches)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_a_last_round_that_is_not_full_is_megatrons_where_that_ends_and_deeper_where_it_does_not(
    pp: int, chunks: int
) -> None:
    """Megatron-LM refuses such counts: its tables give an order for them, of which some deadlock."""
    for num_microbatches in (n for n in range(1, 4 * pp) if n % pp):
        uniform = uniform_replica(pp=pp, chunks=chunks, num_microbatches=num_microbatches)
        theirs = megatrons_order(pp=pp, chunks=chunks, num_microbatches=num_microbatches)
        if ends(theirs, [num_microbatches] * (pp * chunks)):
            assert computes(uniform) == theirs
        else:
            pairs = list(zip(map(first_backward, computes(uniform)), map(first_backward, theirs), strict=True))
            assert all(mine >= other for mine, other in pairs)
            assert any(mine > other for mine, other in pairs)


def test_there_are_such_that_deadlock() -> None:
    assert not ends(megatrons_order(pp=4, chunks=4, num_microbatches=5), [5] * 16)


def first_backward(row: Row) -> int:
    return next(i for i, action in enumerate(row) if action.kind == ActionKind.B)
