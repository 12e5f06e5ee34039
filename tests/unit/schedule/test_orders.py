"""Orders of compute. The schedules under tests/golden are the specification; read them before the code."""

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.schedule.actions import Action, ActionKind, Schedule, format_schedule, parse_schedule
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.orders import ORDERS, gpipe, one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early, split_backward
from tests.helpers.strategies import interleaved_pipelines, orders, pipelines

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.txt"))


def read_golden(path: Path) -> tuple[dict[str, str], Schedule]:
    """What a golden file gives (``key: value`` lines under its comment), and the rows that it expects."""
    head, _, rows = path.read_text(encoding="utf-8").partition("\n\n")
    given = dict(line.split(": ") for line in head.splitlines() if not line.startswith("#"))
    return given, parse_schedule(rows)


def counts(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def groups_of(stages: list[int]) -> list[list[int]]:
    """The stages of each device group, from the group of each stage."""
    return [[s for s, of in enumerate(stages) if of == group] for group in dict.fromkeys(stages)]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    given, expected = read_golden(path)
    num_microbatches = [int(given["num_samples"]) // size for size in counts(given["samples_per_microbatch"])]
    groups = groups_of(counts(given["groups"])) if "groups" in given else None
    in_flight = counts(given["in_flight"]) if "in_flight" in given else num_microbatches
    schedule = ORDERS[given["order"]](num_microbatches=num_microbatches, in_flight=in_flight, groups=groups)
    if "wgrad_delay" in given:
        delays = [None if word == "-" else int(word) for word in given["wgrad_delay"].split()]
        schedule = split_backward(schedule, wgrad_delay=delays)
    lowered = add_communication(schedule, num_microbatches=num_microbatches)
    check_no_deadlock(lowered, num_microbatches=num_microbatches)
    if "communication" in given:
        schedule = lowered
    if "computes_ahead" in given:
        schedule = post_receives_early(schedule, computes_ahead=int(given["computes_ahead"]))
    assert format_schedule(schedule) == format_schedule(expected)


def test_there_are_golden_schedules() -> None:
    assert {path.stem for path in GOLDEN} >= {
        "gpipe",
        "1f1b_equal_stages",
        "1f1b_microbatches_4_1",
        "1f1b_microbatches_1_4",
        "1f1b_microbatches_2_4_1",
        "lowered_equal_stages",
        "lowered_microbatches_4_1",
        "lowered_microbatches_1_4",
        "lowered_microbatches_2_4_1",
        "split_backward_equal_stages",
        "split_backward_lowered",
        "interleaved_figure_4",
        "interleaved_microbatches_2_1",
        "interleaved_there_and_back",
        "interleaved_last_round_short",
    }


def order_of(pipeline: Replica) -> Schedule:
    return ORDERS[pipeline.schedule](
        num_microbatches=pipeline.microbatch_counts,
        in_flight=[stage.in_flight for stage in pipeline.stages],
        groups=pipeline.device_groups,
    )


@given(st.one_of(pipelines(), interleaved_pipelines()), orders())
@settings(max_examples=100, deadline=None)
def test_every_order_runs_everything_once_and_each_stage_in_order(pipeline: Replica, order: str) -> None:
    rows = order_of(dataclasses.replace(pipeline, schedule=order))
    for stages, row in zip(pipeline.device_groups, rows, strict=True):
        assert {action.stage for action in row} == set(stages)
        for s, kind in itertools.product(stages, (ActionKind.F, ActionKind.B)):
            expected = [Action(s, kind, m) for m in range(pipeline.num_microbatches(s))]
            assert [a for a in row if (a.stage, a.kind) == (s, kind)] == expected


@given(st.one_of(pipelines(), interleaved_pipelines()))
@settings(max_examples=100, deadline=None)
def test_1f1b_holds_no_more_than_it_may(pipeline: Replica) -> None:
    for stages, row in zip(pipeline.device_groups, order_of(pipeline), strict=True):
        held = list(itertools.accumulate(1 if action.kind == ActionKind.F else -1 for action in row))
        depth = sum(pipeline.stages[s].in_flight for s in stages)
        assert max(held) == min(depth, len(row) // 2), "the depths of a group are used, not only respected"
        assert min(held) >= 0


@given(interleaved_pipelines())
@settings(max_examples=100, deadline=None)
def test_stages_of_a_group_take_turns_after_as_many_samples_as_all_groups_can_hold(pipeline: Replica) -> None:
    """One of the largest microbatches per group, in a round."""
    largest = max(stage.samples_per_microbatch for stage in pipeline.stages)
    in_round = len(pipeline.device_groups) * largest
    for stages, row in zip(pipeline.device_groups, order_of(pipeline), strict=True):
        size = pipeline.stages[stages[0]].samples_per_microbatch
        for kind, turns in ((ActionKind.F, stages), (ActionKind.B, stages[::-1])):
            order = [action for action in row if action.kind == kind]
            assert order == sorted(order, key=lambda a: (a.number * size // in_round, turns.index(a.stage), a.number))


def test_microbatches_of_a_group_are_counted_alike() -> None:
    with pytest.raises(ScheduleError, match=r"stages \[0, 2\] of one device group count \[2, 4\] microbatches"):
        one_f_one_b(num_microbatches=[4, 4, 2], in_flight=[1, 1, 1], groups=[[0, 2], [1]])


def test_gpipe_is_1f1b_at_full_depth() -> None:
    assert gpipe(num_microbatches=[4, 2]) == one_f_one_b(num_microbatches=[4, 2], in_flight=[4, 2])


@pytest.mark.parametrize(
    ("num_microbatches", "in_flight", "message"),
    [
        ([4, 4], [1], "2 stages, but in_flight has 1 entries"),
        ([4, 0], [1, 1], r"num_microbatches must be at least 1 at every stage, got \[4, 0\]"),
        ([4, 4], [0, 1], r"in_flight must be at least 1 at every stage, got \[0, 1\]"),
    ],
)
def test_counts_that_make_no_schedule(num_microbatches: list[int], in_flight: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        one_f_one_b(num_microbatches=num_microbatches, in_flight=in_flight)
