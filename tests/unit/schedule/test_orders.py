"""Orders of compute. The schedules under tests/golden are the specification; read them before the code."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings

from hetero.errors import ScheduleError
from hetero.plan.ir import Replica
from hetero.schedule.actions import Action, Kind, Schedule, format_schedule, parse_schedule
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.orders import gpipe, one_f_one_b
from hetero.schedule.passes import add_communication, post_receives_early, split_backward
from tests.helpers.strategies import pipelines

GOLDEN = sorted((Path(__file__).parents[2] / "golden").glob("*.txt"))


def read_golden(path: Path) -> tuple[dict[str, str], Schedule]:
    """What a golden file gives (``key: value`` lines under its comment), and the rows that it expects."""
    head, _, rows = path.read_text(encoding="utf-8").partition("\n\n")
    given = dict(line.split(": ") for line in head.splitlines() if not line.startswith("#"))
    return given, parse_schedule(rows)


def counts(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    given, expected = read_golden(path)
    num_microbatches = [int(given["num_samples"]) // size for size in counts(given["samples_per_microbatch"])]
    if given["order"] == "gpipe":
        schedule = gpipe(num_microbatches=num_microbatches)
    else:
        schedule = one_f_one_b(num_microbatches=num_microbatches, in_flight=counts(given["in_flight"]))
    if "weight_lag" in given:
        lags = [None if word == "-" else int(word) for word in given["weight_lag"].split()]
        schedule = split_backward(schedule, weight_lag=lags)
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
    }


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_1f1b_runs_everything_once_in_order_and_holds_no_more_than_it_may(pipeline: Replica) -> None:
    num_microbatches = [pipeline.num_microbatches(s) for s in range(len(pipeline.stages))]
    in_flight = [stage.in_flight for stage in pipeline.stages]
    schedule = one_f_one_b(num_microbatches=num_microbatches, in_flight=in_flight)
    for s, row in enumerate(schedule):
        for kind in (Kind.F, Kind.B):
            assert [a for a in row if a.kind == kind] == [Action(s, kind, m) for m in range(num_microbatches[s])]
        held = list(itertools.accumulate(1 if action.kind == Kind.F else -1 for action in row))
        assert max(held) == min(in_flight[s], num_microbatches[s]), "the depth is used, not only respected"
        assert min(held) >= 0


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
