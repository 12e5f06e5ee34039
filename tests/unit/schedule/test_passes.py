"""Lowering keeps what was ordered, and never deadlocks at a legal depth."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.schedule.actions import COMPUTE, RECEIVE, Action, ActionKind, Row, Schedule, boundaries, parse_row
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.orders import one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early, split_backward
from tests.helpers.strategies import pipelines, split_pipelines


def schedule_of(pipeline: Replica) -> tuple[list[int], Schedule]:
    """Microbatches per stage, and the 1F1B order without communication, with backwards parted as the stages say."""
    num_microbatches = pipeline.microbatch_counts
    in_flight = [stage.in_flight for stage in pipeline.stages]
    whole = one_f_one_b(num_microbatches=num_microbatches, in_flight=in_flight)
    return num_microbatches, split_backward(whole, wgrad_delay=[stage.wgrad_delay for stage in pipeline.stages])


def numbers(row: Row, kind: ActionKind) -> list[int]:
    return [action.number for action in row if action.kind == kind]


@given(split_pipelines())
@settings(max_examples=60, deadline=None)
def test_what_one_stage_sends_its_neighbour_receives_in_the_same_order(pipeline: Replica) -> None:
    """A transport without tags matches the n-th send with the n-th receive."""
    num_microbatches, schedule = schedule_of(pipeline)
    lowered = add_communication(schedule, num_microbatches=num_microbatches)
    for s, edge in enumerate(boundaries(num_microbatches)):
        every_slice = list(range(edge.num_slices))
        assert numbers(lowered[s], ActionKind.SEND_F) == numbers(lowered[s + 1], ActionKind.RECV_F) == every_slice
        assert numbers(lowered[s + 1], ActionKind.SEND_B) == numbers(lowered[s], ActionKind.RECV_B) == every_slice
    assert not numbers(lowered[0], ActionKind.RECV_F) + numbers(lowered[0], ActionKind.SEND_B)
    assert not numbers(lowered[-1], ActionKind.SEND_F) + numbers(lowered[-1], ActionKind.RECV_B)


@given(split_pipelines())
@settings(max_examples=30, deadline=None)
def test_lowering_keeps_the_order_of_compute(pipeline: Replica) -> None:
    num_microbatches, schedule = schedule_of(pipeline)
    lowered = add_communication(schedule, num_microbatches=num_microbatches)
    assert [[action for action in row if action.kind in COMPUTE] for row in lowered] == schedule


@given(split_pipelines(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_receives_posted_early_keep_their_order_and_never_deadlock(pipeline: Replica, computes_ahead: int) -> None:
    num_microbatches, schedule = schedule_of(pipeline)
    lowered = add_communication(schedule, num_microbatches=num_microbatches)
    early = post_receives_early(lowered, computes_ahead=computes_ahead)
    check_no_deadlock(early, num_microbatches=num_microbatches)
    for row, early_row in zip(lowered, early, strict=True):
        for kind in RECEIVE:
            assert numbers(early_row, kind) == numbers(row, kind)
        assert [a for a in early_row if a.kind not in RECEIVE] == [a for a in row if a.kind not in RECEIVE]


@given(pipelines(), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_a_receive_moves_past_that_many_computes_and_no_more(pipeline: Replica, computes_ahead: int) -> None:
    num_microbatches, schedule = schedule_of(pipeline)
    lowered = add_communication(schedule, num_microbatches=num_microbatches)
    early = post_receives_early(lowered, computes_ahead=computes_ahead)

    def computes_before(row: Row) -> dict[tuple[ActionKind, int], int]:
        return {
            (action.kind, action.number): sum(a.kind in COMPUTE for a in row[:i])
            for i, action in enumerate(row)
            if action.kind in RECEIVE
        }

    for row, early_row in zip(lowered, early, strict=True):
        expected = {which: max(0, before - computes_ahead) for which, before in computes_before(row).items()}
        assert computes_before(early_row) == expected


def test_weights_gradients_do_not_count_when_receives_move_up() -> None:
    """The receive of a backward is posted as early beside a W as without it."""
    whole = parse_row("0F0 0RECV_B0 0B0 0RECV_B1 0B1")
    split = parse_row("0F0 0RECV_B0 0B0 0W0 0RECV_B1 0B1 0W1")
    assert post_receives_early([whole], computes_ahead=1) == [parse_row("0RECV_B0 0F0 0RECV_B1 0B0 0B1")]
    assert post_receives_early([split], computes_ahead=1) == [parse_row("0RECV_B0 0F0 0RECV_B1 0B0 0W0 0B1 0W1")]


@given(split_pipelines())
@settings(max_examples=60, deadline=None)
def test_weights_gradients_follow_the_backward_of_so_many_microbatches_later(pipeline: Replica) -> None:
    num_microbatches, schedule = schedule_of(pipeline)
    for s, (stage, row) in enumerate(zip(pipeline.stages, schedule, strict=True)):
        delay, last = stage.wgrad_delay, num_microbatches[s] - 1
        every = list(range(last + 1))
        assert numbers(row, ActionKind.I) == numbers(row, ActionKind.W) == ([] if delay is None else every)
        assert numbers(row, ActionKind.B) == (every if delay is None else [])
        if delay is None:
            continue
        for m in range(last + 1):
            at = row.index(Action(s, ActionKind.W, m))
            assert at > row.index(Action(s, ActionKind.I, min(m + delay, last)))
            if m + delay < last:
                assert at < row.index(Action(s, ActionKind.I, m + delay + 1))


def test_stages_on_the_same_ranks_count_their_own_delays() -> None:
    whole = parse_row("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
    expected = parse_row("0F0 0F1 1F0 1F1 1I0 1I1 1W0 0I0 0W0 0I1 0W1 1W1")
    assert split_backward([whole], wgrad_delay=[0, 1]) == [expected]


@pytest.mark.parametrize(
    ("delays", "message"),
    [
        ([0, 1], "1 stages, but wgrad_delay has 2 entries"),
        ([-1], "wgrad_delay is -1, must be at least 0: weights' gradients come after the backward"),
    ],
)
def test_delays_that_make_no_schedule(delays: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        split_backward([parse_row("0F0 0B0")], wgrad_delay=delays)


def test_no_compute_ahead_changes_nothing() -> None:
    lowered = add_communication(one_f_one_b(num_microbatches=[4, 2], in_flight=[4, 2]), num_microbatches=[4, 2])
    assert post_receives_early(lowered, computes_ahead=0) == lowered


def test_receives_are_not_posted_late() -> None:
    with pytest.raises(ScheduleError, match="computes_ahead is -1, must be at least 0"):
        post_receives_early([parse_row("0F0 0B0")], computes_ahead=-1)
