"""What a device group holds at its worst moments."""

import dataclasses

import pytest
from hypothesis import given, settings

from hetero.plan.ir import Replica
from hetero.plan.lowering import step_rows
from hetero.schedule.actions import Action, parse_row
from hetero.schedule.activation_residency import HeldMicrobatches, Residency, worst_moments
from tests.helpers.strategies import split_pipelines


@pytest.mark.parametrize(
    ("row", "moments"),
    [
        ("0F0 0F1 0F2 0B0 0B1 0B2", [{0: HeldMicrobatches(3)}]),
        ("0F0 0F1 0B0 0F2 0B1 0B2", [{0: HeldMicrobatches(2)}]),
        ("0RECV_F0 0F0 0SEND_F0 0B0", [{0: HeldMicrobatches(1)}]),
        # The last I finds one in flight and one deferred, and leaves two deferred.
        (
            "0F0 0I0 0F1 0I1 0W0 0W1",
            [{0: HeldMicrobatches(in_flight=1, deferred=1)}, {0: HeldMicrobatches(deferred=2)}],
        ),
        # One microbatch of either stage, then two of the first, and never three.
        (
            "0F0 2F0 2B0 0F1 0B0 2F1 2B1 0B1",
            [{0: HeldMicrobatches(1), 2: HeldMicrobatches(1)}, {0: HeldMicrobatches(2), 2: HeldMicrobatches(0)}],
        ),
        ("0F0 0F1 0R1 0B1 0R0 0B0", [{0: HeldMicrobatches(in_flight=1, inputs=1)}]),
        ("0F0 0F1 0B0 0R1 0B1", [{0: HeldMicrobatches(in_flight=1, inputs=1)}]),
        ("0F0 0F1", [{0: HeldMicrobatches(2)}]),
    ],
)
def test_worst_moments(row: str, moments: list[dict[int, HeldMicrobatches]]) -> None:
    found = worst_moments(parse_row(row))
    assert sorted(map(str, found)) == sorted(map(str, moments))


@given(split_pipelines())
@settings(max_examples=80, deadline=None)
def test_a_stage_alone_holds_at_most_what_its_depth_and_its_delay_say(pipeline: Replica) -> None:
    """The two sides of the peak's closed form: before an I or B, and between an I and its W."""
    for s, (stage, row) in enumerate(zip(pipeline.stages, step_rows(pipeline), strict=True)):
        count, delay = pipeline.num_microbatches(s), stage.wgrad_delay
        depth = min(stage.in_flight, count)
        found = [moment[s] for moment in worst_moments(row)]
        assert max(held.in_flight for held in found) == depth
        assert max(held.deferred for held in found) == (0 if delay is None else min(delay + 1, count))
        assert max(held.in_flight + held.deferred for held in found) == min(depth + (delay or 0), count)


def test_everything_is_let_go_of_by_the_end() -> None:
    row = parse_row("0F0 0F1 2F0 0R1 2I0 0B1 2W0 0R0 0B0")
    residency = Residency.of_row(row)
    for action in row:
        residency.begin(action)
        residency.end(action)
    assert residency.held == {0: HeldMicrobatches(), 2: HeldMicrobatches()}


def test_a_forward_counts_from_its_beginning_and_a_backward_to_its_end() -> None:
    residency = Residency()
    residency.begin(Action.parse("0F0"))
    assert residency.held[0] == HeldMicrobatches(1)
    residency.end(Action.parse("0F0"))
    residency.begin(Action.parse("0I0"))
    assert residency.held[0] == HeldMicrobatches(1)
    residency.end(Action.parse("0I0"))
    assert residency.held[0] == HeldMicrobatches(deferred=1)


@given(split_pipelines())
@settings(max_examples=40, deadline=None)
def test_none_of_the_moments_is_worse_than_another(pipeline: Replica) -> None:
    deep = dataclasses.replace(pipeline, schedule="gpipe")
    for replica in (pipeline, deep):
        for row in step_rows(replica):
            found = worst_moments(row)
            pairs = [(a, b) for a in found for b in found if a is not b]
            assert not any(all(x >= y for s in a for x, y in zip(a[s], b[s], strict=True)) for a, b in pairs)
