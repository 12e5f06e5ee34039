"""How far a step may be off, and from what difference on two plans can be told apart."""

import dataclasses
import math
from collections.abc import Mapping

import pytest

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import (
    LAYER_ERRORS,
    ORDER_ERROR,
    RUN_ERROR,
    STATED_LINK_ERROR,
    Confidence,
    LayerBasis,
)
from hetero.cost.network import Topology
from hetero.cost.prediction_range import ErrorSource, Shift, StepRange, least_difference, step_range
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import simulate
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(num_layers=8)

MEASURED_LINK = Link(bandwidth_gb_per_s=((1, 1.0),), latency_us=0)

A100, V100 = "A100-40", "V100-16"

BEYOND = 8
"""Samples per microbatch, twice what the profiles have."""

AS_PROFILED = dataclasses.replace(HETERO, implementation=None)
"""Layers are those that were profiled."""

EXTRAPOLATED = LAYER_ERRORS[Confidence.EXTRAPOLATED]


def cluster(link: Link = MEASURED_LINK) -> ClusterSpec:
    """One node of either device."""
    return ClusterSpec(
        node_types=tuple(NodeType(name=name, device=name, gpus_per_node=2, inside_node=link) for name in (A100, V100)),
        links=Links(between_nodes=link),
    )


def costs(*, v100_s: float = 3.0) -> CostModel:
    """A layer takes 3 seconds per sample on an A100 and ``v100_s`` on a V100; both were measured up to 4 samples."""
    profiles = [
        profile(MODEL, device=A100, block_s=(1.0, 2.0)),
        profile(MODEL, device=V100, block_s=(v100_s / 3, v100_s * 2 / 3)),
    ]
    return cost_model(MODEL, profiles, runtime=AS_PROFILED)


def one_device(rank: int, device: str, *, mbs: int = BEYOND) -> Plan:
    return plan(MODEL, [replica(stage(layers=(0, 8), ranks=(rank,), device=device, mbs=mbs), num_samples=16)])


def pipeline(*, layers: int = 4, mbs: tuple[int, int] = (BEYOND, BEYOND)) -> Plan:
    stages = (
        stage(layers=(0, layers), ranks=(0,), device=A100, mbs=mbs[0]),
        stage(layers=(layers, 8), ranks=(2,), device=V100, mbs=mbs[1]),
    )
    return plan(MODEL, [replica(*stages, num_samples=16)])


def found(made: Plan, prices: CostModel, spec: ClusterSpec | None = None, *, replays: bool = True) -> StepRange:
    topology = Topology(spec or cluster())
    return step_range(simulate(made, topology, prices), topology, prices, replays=replays)


def test_a_measured_step_is_as_uncertain_as_whole_runs() -> None:
    step = found(one_device(0, A100, mbs=4), costs())
    assert step.shifts == {}
    assert (step.low_s, step.high_s) == pytest.approx((step.step_s / RUN_ERROR.factor, step.step_s * RUN_ERROR.factor))


def test_a_step_of_nothing_else_shifts_as_far_as_its_figures() -> None:
    step = found(one_device(0, A100), costs())
    (shift,) = step.shifts.values()
    assert list(step.shifts) == [LayerBasis(A100, Confidence.EXTRAPOLATED)]
    assert shift == pytest.approx((-EXTRAPOLATED.log, EXTRAPOLATED.log))
    assert math.log(step.high_s / step.step_s) == pytest.approx(math.hypot(RUN_ERROR.log, EXTRAPOLATED.log))
    assert step.width == pytest.approx(2 * math.hypot(RUN_ERROR.log, EXTRAPOLATED.log))


def test_devices_err_apart_from_one_another() -> None:
    """Of two equal stages in a row each shifts a part of the step; what both may do adds up by squares."""
    step = found(pipeline(), costs())
    shifts = [shift.slow for shift in step.shifts.values()]
    assert set(step.shifts) == {LayerBasis(device, Confidence.EXTRAPOLATED) for device in (A100, V100)}
    assert all(0 < shift < EXTRAPOLATED.log for shift in shifts)
    assert math.log(step.high_s / step.step_s) == pytest.approx(math.hypot(RUN_ERROR.log, *shifts))


def test_what_is_not_on_the_critical_path_cannot_make_a_step_shorter() -> None:
    """A stage of one fast layer beside one of seven slow ones: the step hardly knows it."""
    step = found(pipeline(layers=1), costs(v100_s=30.0))
    fast, slow = (step.shifts[LayerBasis(device, Confidence.EXTRAPOLATED)] for device in (A100, V100))
    assert abs(fast.fast) < 0.01 * EXTRAPOLATED.log
    assert abs(slow.fast) == pytest.approx(EXTRAPOLATED.log, rel=0.02)


def test_only_what_rests_on_the_source_is_moved() -> None:
    """The stage on the V100 takes microbatches that were measured."""
    step = found(pipeline(mbs=(BEYOND, 4)), costs())
    assert set(step.shifts) == {LayerBasis(A100, Confidence.EXTRAPOLATED)}


def test_measurements_take_away_what_they_settle() -> None:
    step = found(pipeline(), costs())
    left = step.without([LayerBasis(A100, Confidence.EXTRAPOLATED)])
    assert set(left.shifts) == {LayerBasis(V100, Confidence.EXTRAPOLATED)}
    assert step.low_s < left.low_s < left.step_s < left.high_s < step.high_s
    assert step.without(step.shifts).width == pytest.approx(2 * RUN_ERROR.log)


def data_parallel(ranks: tuple[int, ...]) -> Plan:
    replicas = [
        replica(stage(layers=(0, 8), ranks=(rank,), device=A100 if rank < 2 else V100), num_samples=1) for rank in ranks
    ]
    return plan(MODEL, replicas)


@pytest.mark.parametrize(
    ("ranks", "link", "sources"),
    [
        ((0, 1), Link(bandwidth_gb_per_s=1e-5, latency_us=0), {"inside nodes"}),
        ((1, 2), Link(bandwidth_gb_per_s=1e-5, latency_us=0), {"between nodes"}),
        ((1, 2), Link(bandwidth_gb_per_s=((1, 1e-5),), latency_us=0), set()),
    ],
)
def test_links_that_are_stated_as_one_number(ranks: tuple[int, ...], link: Link, sources: set[ErrorSource]) -> None:
    """A sum of gradients on a link that is the whole step, about: the step is off as far as the link."""
    step = found(data_parallel(ranks), costs(), cluster(link))
    assert set(step.shifts) == sources
    for shift in step.shifts.values():
        assert 0.5 * STATED_LINK_ERROR.log < shift.slow < STATED_LINK_ERROR.log


@pytest.mark.parametrize("made", [one_device(0, A100), pipeline(), pipeline(layers=1)])
def test_bounds_are_not_narrower_than_replays(made: Plan) -> None:
    replayed, bounded = (found(made, costs(), replays=replays) for replays in (True, False))
    assert bounded.low_s <= replayed.low_s * (1 + 1e-9)
    assert bounded.high_s >= replayed.high_s * (1 - 1e-9)


def test_slower_costs_leave_the_first_ones_alone() -> None:
    prices, made = costs(), one_device(0, A100)
    before_s = simulate(made, cluster(), prices).step_s
    slower = prices.slower({LayerBasis(A100, Confidence.EXTRAPOLATED): 2.0})
    assert simulate(made, cluster(), slower).step_s == pytest.approx(2 * before_s)
    assert simulate(made, cluster(), prices).step_s == before_s
    assert slower.layer("block", device=A100, tp=1, micro_batch_size=BEYOND).forward_s == pytest.approx(2.0 * BEYOND)
    assert slower.layer("block", device=A100, tp=1, micro_batch_size=4).forward_s == pytest.approx(4.0)


def ranged(shifts: Mapping[ErrorSource, float]) -> StepRange:
    return StepRange(1.0, {source: Shift(-shift, shift) for source, shift in shifts.items()})


def test_plans_on_the_same_devices_share_their_errors() -> None:
    """Both steps are nothing but that device: however wrong its figures are, the order stays."""
    first, second = (found(one_device(rank, A100), costs()) for rank in (0, 1))
    assert least_difference(first, second) == pytest.approx(ORDER_ERROR.factor)


def test_of_bounds_nobody_knows_what_they_share() -> None:
    first, second = (found(one_device(rank, A100), costs(), replays=False) for rank in (0, 1))
    expected = math.hypot(ORDER_ERROR.log, EXTRAPOLATED.log)
    assert math.log(least_difference(first, second)) == pytest.approx(expected)


def test_plans_on_unlike_devices_share_nothing() -> None:
    first, second = found(one_device(0, A100), costs()), found(one_device(2, V100), costs())
    expected = math.hypot(ORDER_ERROR.log, EXTRAPOLATED.log, EXTRAPOLATED.log)
    assert math.log(least_difference(first, second)) == pytest.approx(expected)


def test_what_shifts_two_plans_unlike_is_what_counts() -> None:
    a = ranged({"between nodes": 0.3, LayerBasis(A100, Confidence.DATA_SHEET): 0.5})
    b = ranged({"between nodes": 0.1, LayerBasis(A100, Confidence.DATA_SHEET): 0.5})
    assert math.log(least_difference(a, b)) == pytest.approx(math.hypot(ORDER_ERROR.log, 0.2))
    assert least_difference(a, b) == least_difference(b, a)
