"""Which ranks run alike, and what it costs where they do not: by hand."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings

from hetero.cost.network import TransferCost
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.engine import LaneStart, Pipeline, Replay
from hetero.cost.simulation.lanes import lanes_of, messages_by_lanes
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.plan.ir import Plan, Replica
from hetero.plan.reshard import num_phases
from hetero.schedule.actions import ActionKind, parse_schedule
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import legal_plans
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
A100 = "A100-40"


def pipeline(*shapes: tuple[int, int], num_samples: int) -> Replica:
    """Stages of one layer each, by (dp, micro_batch_size)."""
    first, stages = 0, []
    for s, (dp, mbs) in enumerate(shapes):
        stages.append(stage(layers=(s, s + 1), ranks=range(first, first + dp), dp=dp, mbs=mbs, depth=1))
        first += dp
    return Replica(num_samples=num_samples, stages=tuple(stages))


@pytest.mark.parametrize(
    ("shapes", "lanes"),
    [
        ([(4, 1), (4, 1)], ["0000", "0000"]),  # one to one
        ([(4, 1), (2, 2)], ["0000", "00"]),  # the same samples in a microbatch: every rank is in every slice
        ([(1, 1), (2, 1)], ["0", "01"]),  # one sample after the other reaches one rank after the other
        ([(1, 1), (2, 2)], ["0", "01"]),
        ([(4, 1), (2, 1)], ["0011", "00"]),  # two and two of the ranks send in turn, to both
        ([(2, 2), (4, 1), (2, 1)], ["01", "0011", "00"]),  # each of the first sends to ranks of one lane alone
        ([(4, 1), (4, 1), (2, 1), (2, 1)], ["0011", "0011", "00", "00"]),
        ([(4, 1), (2, 1), (1, 1)], ["0123", "01", "0"]),  # split by whom they send to, and again by when
    ],
)
def test_ranks_are_told_apart_by_slices_and_by_whom_they_meet(shapes: list[tuple[int, int]], lanes: list[str]) -> None:
    found = lanes_of(pipeline(*shapes, num_samples=16))
    assert ["".join(map(str, row)) for row in found] == lanes


def test_stages_on_the_same_ranks_share_their_lanes() -> None:
    """The finer stages behind both split the group's two ranks, whichever of its stages sends there."""
    group, one = {"ranks": (0, 1), "dp": 2, "depth": 2}, {"ranks": (2,), "depth": 4}
    turns = Replica(
        num_samples=8,
        stages=(
            stage(layers=(0, 1), **group),
            stage(layers=(1, 2), **one),
            stage(layers=(2, 3), **group),
            stage(layers=(3, 4), **one),
        ),
    )
    assert lanes_of(turns) == ((0, 1), (0,))


@given(legal_plans())
@settings(max_examples=60, deadline=None)
def test_ranks_of_a_lane_meet_the_same_lanes_in_every_slice(legal: Plan) -> None:
    for each in legal.replicas:
        of_groups = lanes_of(each)
        group_of = {s: g for g, group in enumerate(each.device_groups) for s in group}
        lanes = [of_groups[group_of[s]] for s in range(len(each.stages))]
        for (here, lanes_here), (after, lanes_after) in pairwise(zip(each.stages, lanes, strict=True)):
            for phase in range(num_phases(here, after)):
                alone = list(range(here.dp)), list(range(after.dp))
                met = messages_by_lanes(here, after, alone, seq_length=legal.seq_length, phase=phase)
                for own, other, turn in ((lanes_here, lanes_after, 1), (lanes_after, lanes_here, -1)):
                    pairs = {pair[::turn] for pair in met}
                    seen = [{other[b] for a, b in pairs if a == rank} for rank in range(len(own))]
                    assert len({(lane, frozenset(lanes)) for lane, lanes in zip(own, seen, strict=True)}) == len(
                        set(own)
                    )


def run(described: Plan, **runtime: object) -> Simulation:
    costs = cost_model(
        described.model,
        [profile(described.model, block_s=(1.0, 2.0))],
        runtime=dataclasses.replace(HETERO, **runtime),
    )
    return simulate(described, nodes(described.world_size, gb_per_s=1e9), costs)


def test_one_sample_before_two_ranks_reaches_the_first_of_them_first() -> None:
    """3 layers each. Rank 1 has its sample at 3 s, rank 2 at 6 s; rank 1's gradient is back when rank 2 is at its
    backward:

        rank 0    F0 0-3    F1 3-6    .         .         B0 12-18    B1 18-24
        rank 1    .         F0 3-6    B0 6-12
        rank 2    .         .         F0 6-9    B0 9-15
    """
    described = plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 3), ranks=(0,), device=A100, depth=2),
                stage(layers=(3, 6), ranks=(1, 2), device=A100, dp=2, depth=1),
                num_samples=2,
            )
        ],
    )
    result = run(described)
    ends = {(span.stage, span.lane, f"{span.kind}{span.number}"): span.end_s for span in result.spans}
    assert ends[1, 0, "F0"] == pytest.approx(6, abs=1e-3)
    assert ends[1, 0, "B0"] == pytest.approx(12, abs=1e-3)
    assert ends[1, 1, "F0"] == pytest.approx(9, abs=1e-3)
    assert ends[1, 1, "B0"] == pytest.approx(15, abs=1e-3)
    assert ends[0, 0, "B0"] == pytest.approx(18, abs=1e-3)
    assert result.compute_end_s == pytest.approx(24, abs=1e-3)
    times = result.stages[0, 1]
    assert (times.busy_s, times.bubble_s) == pytest.approx((9, (3 + 6) / 2), abs=1e-3), "a mean over the two ranks"
    assert times.busy_s + times.bubble_s + times.sync_s == pytest.approx(result.step_s)
    shown = [span for span in result.spans_of(0) if span.kind == ActionKind.F and span.stage == 1]
    assert [(span.lane, span.number) for span in shown] == [(0, 0)], "the computes of the first rank"


def test_gradients_are_summed_when_the_last_rank_has_them() -> None:
    """As above; the sum of stage 1's gradients follows the backward of its later rank."""
    described = plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 3), ranks=(0,), device=A100, depth=2),
                stage(layers=(3, 6), ranks=(1, 2), device=A100, dp=2, depth=1),
                num_samples=2,
            )
        ],
    )
    (sync,) = run(described, overlaps_gradient_sync=False).syncs
    assert sync.bucket.ranks == (1, 2)
    assert sync.start_s == pytest.approx(15, abs=1e-3)


def cost(seconds: float) -> TransferCost:
    return TransferCost(seconds=seconds, ports=(), num_bytes=0)


def test_a_device_sends_to_one_lane_after_the_other() -> None:
    """Rank 0's only microbatch goes to two lanes, 2 s each."""
    spans = Replay(
        [
            Pipeline(
                rows=parse_schedule("0F0 0SEND_F0\n1RECV_F0 1F0"),
                num_microbatches=(1, 1),
                forward_s=(1.0, 1.0),
                backward_s=(1.0, 1.0),
                forward=(({(0, 0): cost(2.0), (0, 1): cost(2.0)},),),
                backward=(({(0, 0): cost(2.0), (1, 0): cost(2.0)},),),
                lanes=((LaneStart(),), (LaneStart(),) * 2),
            )
        ],
    ).spans()
    assert [(s.start_s, s.end_s) for s in spans if s.kind == ActionKind.SEND_F] == [(1.0, 3.0), (3.0, 5.0)]
    assert [(s.lane, s.start_s) for s in spans if s.kind == ActionKind.F][1:] == [(0, 3.0), (1, 5.0)]


def test_a_device_receives_from_one_lane_after_the_other() -> None:
    """Rank 1's microbatch comes from two lanes of which one starts a second later; both are needed."""
    spans = Replay(
        [
            Pipeline(
                rows=parse_schedule("0F0 0SEND_F0\n1RECV_F0 1F0"),
                num_microbatches=(1, 1),
                forward_s=(1.0, 1.0),
                backward_s=(1.0, 1.0),
                forward=(({(0, 0): cost(2.0), (1, 0): cost(2.0)},),),
                backward=(({(0, 0): cost(2.0), (0, 1): cost(2.0)},),),
                lanes=((LaneStart(), LaneStart(at_s=1.0)), (LaneStart(),)),
            )
        ],
    ).spans()
    assert [(s.lane, s.start_s) for s in spans if s.kind == ActionKind.SEND_F] == [(0, 1.0), (1, 3.0)]
    assert [s.start_s for s in spans if s.kind == ActionKind.F and s.stage == 1] == [5.0]


def test_a_slice_between_lanes_is_shown_from_its_first_message_to_its_last() -> None:
    """Four ranks of one sample before two: two senders of a slice, then the other two, each to its own receiver."""
    described = plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 3), ranks=(0, 1), device=A100, dp=2, depth=2),
                stage(layers=(3, 6), ranks=(2,), device=A100, depth=2),
                num_samples=4,
            )
        ],
    )
    result = run(described)
    sent = [span for span in result.spans_of(0) if span.kind in (ActionKind.SEND_F, ActionKind.SEND_B)]
    assert len(sent) == len({(span.stage, span.kind, span.number) for span in sent}) == 8
    assert len([span for span in result.spans if span.kind == ActionKind.F and span.stage == 0]) == 4
    assert len([span for span in result.spans_of(0) if span.kind == ActionKind.F and span.stage == 0]) == 2
