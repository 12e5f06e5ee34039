"""The text form of a schedule, and how microbatches of unequal size meet at a boundary."""

import pytest

from hetero.errors import ScheduleError
from hetero.schedule.actions import (
    COMPUTE,
    MOST_KEPT,
    NO_STAGE,
    OF_BUCKETS,
    OF_MICROBATCHES,
    RECEIVE,
    SEND,
    UPDATE,
    Action,
    ActionKind,
    StageBoundary,
    action_of,
    actions_of,
    boundaries,
    format_schedule,
    parse_row,
    parse_schedule,
)


@pytest.mark.parametrize(
    "text",
    [
        "2F0",
        "0B13",
        "2W0",
        "1SEND_B3",
        "0RECV_B7",
        "10RECV_F0",
        "3SEND_F12",
        "1I4",
        "0R3",
        "REDUCE12",
        "GATHER0",
        "UPDATE",
    ],
)
def test_an_action_prints_as_it_parses(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_an_action_says_stage_kind_and_number() -> None:
    assert Action.parse("1SEND_B3") == Action(stage=1, kind=ActionKind.SEND_B, number=3)


@pytest.mark.parametrize(
    "text", ["", "F0", "0F", "0f0", "0X1", "0F0 0B0", "0RECV_F-1", "x0F0", "0REDUCE1", "REDUCE", "0UPDATE"]
)
def test_other_words_are_no_actions(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"not an action: '.*', expected e\.g\. 2F0 or 1SEND_B3"):
        Action.parse(text)


@pytest.mark.parametrize("kind", ActionKind)
def test_every_kind_parses(kind: ActionKind) -> None:
    action = UPDATE if kind == ActionKind.UPDATE else Action(NO_STAGE if kind in OF_BUCKETS else 3, kind, 7)
    assert Action.parse(str(action)) == action


def test_every_kind_is_of_one_sort() -> None:
    sorts = [COMPUTE, SEND, RECEIVE, OF_BUCKETS, OF_MICROBATCHES, {ActionKind.UPDATE}]
    assert sorted(kind for sort in sorts for kind in sort) == sorted(ActionKind)


def test_a_schedule_is_a_row_per_stage() -> None:
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    schedule = parse_schedule(text)
    assert schedule == [parse_row("0F0 0F1 0B0 0B1"), parse_row("1F0 1B0 1F1 1B1")]
    assert format_schedule(schedule) == text
    assert parse_schedule(f"\n{text}\n\n") == schedule


@pytest.mark.parametrize(
    ("before", "after", "slices_before", "slices_after"),
    [
        (3, 3, [[0], [1], [2]], [[0], [1], [2]]),
        (2, 6, [[0, 1, 2], [3, 4, 5]], [[0], [1], [2], [3], [4], [5]]),
        (4, 2, [[0], [1], [2], [3]], [[0, 1], [2, 3]]),
    ],
)
def test_the_coarser_microbatch_is_several_slices(
    before: int, after: int, slices_before: list[list[int]], slices_after: list[list[int]]
) -> None:
    boundary = StageBoundary.between(before, after)
    assert [list(boundary.slices_before(m)) for m in range(before)] == slices_before
    assert [list(boundary.slices_after(m)) for m in range(after)] == slices_after


def test_counts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ScheduleError, match="count 4 and 6 microbatches; one must be a multiple"):
        StageBoundary.between(4, 6)


def test_boundaries_lie_between_stages() -> None:
    assert boundaries([4, 2, 8]) == [StageBoundary(4, 4, 2), StageBoundary(8, 2, 8)]
    assert boundaries([4]) == []


@pytest.mark.parametrize("numbers", [range(0), range(1), range(3, 9), range(4, 8), range(MOST_KEPT - 1, MOST_KEPT + 2)])
def test_actions_by_their_numbers(numbers: range) -> None:
    made = actions_of(2, ActionKind.F, numbers)
    assert list(made) == [Action(2, ActionKind.F, n) for n in numbers]
    assert [action_of(2, ActionKind.F, n) for n in numbers] == list(made)


def test_actions_with_small_numbers_are_the_same_objects_in_all_rows() -> None:
    assert actions_of(1, ActionKind.B, range(2, 4))[0] is actions_of(1, ActionKind.B, range(4))[2]
