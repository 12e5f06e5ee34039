"""Whole plans: where the step goes, what hides what, and who waits for whom."""

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings

from hetero.cost.cost_model import StageCost
from hetero.cost.layers.confidence import Confidence
from hetero.cost.network import RING_SHARE, Topology, TransferCost
from hetero.cost.pipeline_period import steady_period_s
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.engine import Pipeline, Replay
from hetero.cost.simulation.simulator import Simulation, simulate, with_gradient_sync
from hetero.errors import ConfigError
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.lowering import step_rows
from hetero.schedule.actions import COMPUTE, Action, ActionKind
from hetero.schedule.activation_residency import HeldMicrobatches, Residency, worst_moments
from hetero.spec.cluster import ClusterSpec
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage, with_every_replica
from tests.helpers.strategies import legal_plans
from tests.helpers.synthetic_profiles import cost_model, nodes, profile
from tests.unit.cost.simulated import A100, BLOCK_S, MODEL, pipeline, run, split


def data_parallel(count: int, *, num_samples: int = 2) -> Plan:
    """``count`` replicas of one device."""
    return plan(
        MODEL,
        [
            replica(stage(layers=(0, 6), ranks=(r,), device=A100, depth=1), num_samples=num_samples)
            for r in range(count)
        ],
    )


def test_one_device_computes_and_updates() -> None:
    result = run(data_parallel(1, num_samples=4), update_s=0.5)
    assert result.step_s == pytest.approx(4 * 6 * 3.0 + 8 * 0.5)
    assert result.bubble_share == pytest.approx(0.0)
    assert result.confidence == Confidence.MEASURED
    assert result.samples_per_s == pytest.approx(4 / result.step_s)
    assert result.tokens_per_s == pytest.approx(4 * 16 / result.step_s)


@pytest.mark.parametrize("num_samples", [3, 6, 12])
def test_plain_1f1b_has_the_bubble_of_its_paper(num_samples: int) -> None:
    """arXiv 2104.04473: (p - 1) / m of the ideal time, without transfers."""
    result = run(pipeline(3, num_samples=num_samples))
    ideal_s = num_samples * 2 * 3.0
    assert result.compute_end_s == pytest.approx(ideal_s * (1 + 2 / num_samples), rel=1e-6)
    times = result.stages[0, 0]
    assert times.busy_s == pytest.approx(ideal_s)
    assert times.bubble_s == pytest.approx(ideal_s * 2 / num_samples, rel=1e-6)


@pytest.mark.parametrize("num_samples", [6, 12, 24])
def test_zero_bubble_idles_a_third_of_1f1b(num_samples: int) -> None:
    """arXiv 2401.10241, table 1, ZB-H1: (p - 1) (f + b - w) against (p - 1) (f + b + w) of 1F1B.

    Where all three take equally long that is a third; here w is what the cost model makes of this profile.
    """
    model = gpt2_model(num_layers=4, tied_embeddings=False)
    stages = [stage(layers=(s, s + 1), ranks=(s,), device=A100, depth=4 - s) for s in range(4)]
    whole = plan(model, [replica(*stages, num_samples=num_samples)])
    result = run(split(whole, [0, 1, 2, 3]))
    w = result.costs[0, 0].weight_s
    assert 0.0 < w < 1.0
    assert run(whole).compute_end_s - num_samples * 3.0 == pytest.approx(3 * 3.0, rel=1e-4)
    assert result.compute_end_s - num_samples * 3.0 == pytest.approx(3 * (3.0 - 2 * w), rel=1e-4)
    thirds = [dataclasses.replace(cost, weight_s=1.0) for cost in result.costs.values()]
    assert idle_s(result, thirds) == pytest.approx(3 * 1.0, rel=1e-4)


def idle_s(result: Simulation, costs: Sequence[StageCost]) -> float:
    """Seconds of the step in which an equal stage of the only replica does not compute, at other ``costs``."""
    (one,) = result.plan.replicas
    counts = tuple(one.num_microbatches(s) for s in range(len(costs)))
    free = tuple(({(0, 0): TransferCost(seconds=0.0, ports=(), num_bytes=0)},) for _ in counts[1:])
    replayed = Pipeline(
        rows=HETERO.rows(one),
        num_microbatches=counts,
        forward_s=tuple(cost.forward_s for cost in costs),
        backward_s=tuple(cost.backward_s - cost.weight_s for cost in costs),
        weight_s=tuple(cost.weight_s for cost in costs),
        forward=free,
        backward=free,
    )
    return max(span.end_s for span in Replay([replayed]).spans()) - counts[0] * costs[0].microbatch_s


def held_by(result: Simulation, r: int, group: tuple[int, ...]) -> dict[int, list[HeldMicrobatches]]:
    """What the stages of a device group hold while their computes run and behind each of them."""
    actions = [
        Action(span.stage, span.kind, span.number)
        for span in sorted(result.spans_of(r), key=lambda span: span.start_s)
        if span.stage in group and span.kind in COMPUTE
    ]
    residency = Residency.of_row(actions)
    found: dict[int, list[HeldMicrobatches]] = {s: [] for s in group}
    for action in actions:
        for change in (residency.begin, residency.end):
            change(action)
            for s in group:
                found[s].append(residency.held.get(s, HeldMicrobatches()))
    return found


def test_a_split_stage_is_as_busy_and_holds_more() -> None:
    whole = pipeline(3, num_samples=6)
    lagging = split(whole, [None, 1, 2])
    before, after = run(whole), run(lagging)
    for s in range(3):
        assert after.stages[0, s].busy_s == pytest.approx(before.stages[0, s].busy_s)
    assert after.step_s < before.step_s
    assert after.confidence == Confidence.ESTIMATED
    held = [held_by(after, 0, (s,))[s] for s in range(3)]
    assert [max(each.in_flight for each in of_stage) for of_stage in held] == [3, 2, 1]
    assert [max(each.in_flight + each.deferred for each in of_stage) for of_stage in held] == [3, 3, 3]


def test_gradients_of_a_split_stage_are_summed_after_its_last_weights_gradients() -> None:
    """Bucket by bucket beside the last W, from the last layer to the first."""
    eager = dataclasses.replace(HETERO, bucket_numel=1)
    two = [replica(stage(layers=(0, 6), ranks=(r,), device=A100, depth=1, delay=0), num_samples=2) for r in range(2)]
    result = run(plan(MODEL, two), runtime=eager)
    last = max((span for span in result.spans_of(0) if span.kind == ActionKind.W), key=lambda span: span.end_s)
    layer_s = (last.end_s - last.start_s) / 6
    starts = {sync.bucket.position: sync.start_s for sync in result.syncs}
    for layer in range(6):
        assert starts[layer] == pytest.approx(last.start_s + (6 - layer) * layer_s, rel=1e-4)
    assert starts[6] < last.start_s, "the head's is there after the backward"


def test_the_closed_form_is_the_step_of_a_long_pipeline() -> None:
    seconds_on_the_link = 0.6
    row_bytes = 4 * 16 * 32
    cluster = nodes(3, gb_per_s=row_bytes / 1e9 / seconds_on_the_link)
    described = pipeline(3, num_samples=40, depths=[5, 3, 1])
    stages_s, boundaries_s = [6.0] * 3, [seconds_on_the_link] * 2
    period_s = steady_period_s(microbatch_s=stages_s, boundary_s=boundaries_s, in_flight=[5, 3, 1])
    # The first microbatch's way there and back, and a period for each other one.
    formula_s = sum(stages_s) + 2 * sum(boundaries_s) + 39 * period_s
    assert run(described, cluster).compute_end_s == pytest.approx(formula_s, rel=0.02)


def test_a_deeper_pipeline_hides_a_slow_link() -> None:
    cluster = nodes(3, gb_per_s=4 * 16 * 32 / 1e9 / 3.0)
    shallow = run(pipeline(3, num_samples=20, depths=[3, 2, 1]), cluster)
    deep = run(pipeline(3, num_samples=20, depths=[7, 4, 1]), cluster)
    assert deep.step_s < shallow.step_s / 1.3


def test_two_boundaries_of_one_node_share_its_interface() -> None:
    """The middle stage sends activations one way and gradients the other, both through one wire."""
    row_bytes = 4 * 16 * 32
    described = pipeline(3, num_samples=30, depths=[9, 5, 1])
    assert run(described, nodes(3, gb_per_s=row_bytes / 1e9 / 5.0)).step_s > 30 * 10.0
    inside = nodes(1, gpus_per_node=3, gb_per_s=row_bytes / 1e9 / 5.0)
    assert run(described, inside).step_s < 30 * 7.0 + 40.0, "inside a node each boundary has its own"


class TestGradients:
    NUMEL = 6 * 8544 + 2 * 64 * 32 + 64 * 32 + 2 * 32
    """Blocks, embedding and head, positions, final norm."""

    def cluster(self, seconds: float) -> ClusterSpec:
        """Summing all gradients of two devices takes that long."""
        return nodes(2, gb_per_s=4 * self.NUMEL / 1e9 / seconds / RING_SHARE)

    def test_their_sum_follows_the_backward_where_nothing_overlaps(self) -> None:
        blocking = dataclasses.replace(HETERO, overlaps_gradient_sync=False)
        result = run(data_parallel(2), self.cluster(10.0), runtime=blocking)
        assert result.stages[0, 0].sync_s == pytest.approx(10.0)
        assert result.step_s == pytest.approx(2 * 18.0 + 10.0)

    def test_beside_the_last_backward_only_the_end_of_it_shows(self) -> None:
        eager = dataclasses.replace(HETERO, bucket_numel=1)
        result = run(data_parallel(2), self.cluster(10.0), runtime=eager)
        last_layer_s = 10.0 * (8544 + 2 * 64 * 32) / self.NUMEL
        assert 0.0 < result.stages[0, 0].sync_s < last_layer_s * 1.1
        assert result.syncs[0].start_s < result.compute_end_s < result.syncs[-1].end_s

    def test_the_slower_replica_is_waited_for(self) -> None:
        uneven = plan(
            MODEL,
            [
                replica(stage(layers=(0, 6), ranks=(0,), device=A100, depth=1), num_samples=1),
                replica(stage(layers=(0, 6), ranks=(1,), device=A100, depth=1), num_samples=3),
            ],
        )
        result = run(uneven, update_s=0.5)
        assert result.stages[0, 0].sync_s == pytest.approx(36.0, rel=1e-3)
        assert result.stages[1, 0].sync_s == pytest.approx(0.0, abs=1e-3)
        assert result.step_s == pytest.approx(54.0 + 8 * 0.5, rel=1e-3)

    def test_domains_halve_what_a_slow_link_carries(self) -> None:
        """Two nodes of two devices, inside 100 times as fast: a ring takes 2 (4 - 1) / 4 times 8 s; a hierarchical
        sum half a ring of two at each end and, one after the other, two rails with half of the gradients each."""
        gb_per_s = 4 * self.NUMEL / 1e9 / 8.0
        inside = Link(bandwidth_gb_per_s=100 * gb_per_s, latency_us=0)
        cluster = nodes(2, gpus_per_node=2, gb_per_s=gb_per_s / RING_SHARE, inside_node=inside)
        blocking = dataclasses.replace(HETERO, overlaps_gradient_sync=False)
        flat = data_parallel(4)
        sync = GradientSyncPlan(domains=((0, 1), (2, 3)))
        assert run(flat, cluster, runtime=blocking).stages[0, 0].sync_s == pytest.approx(12.0)
        result = run(dataclasses.replace(flat, gradient_sync=sync), cluster, runtime=blocking)
        assert result.stages[0, 0].sync_s == pytest.approx(0.04 + 8.0 + 0.04)

    def test_only_the_sums_are_run_again_for_other_domains_and_buckets(self) -> None:
        cluster = nodes(2, gpus_per_node=2, gb_per_s=1e-5)
        costs = cost_model(MODEL, [profile(MODEL, block_s=BLOCK_S)], runtime=HETERO)
        flat = data_parallel(4)
        sync = GradientSyncPlan(domains=((0, 1), (2, 3)), bucket_numel=5000)
        changed = with_gradient_sync(simulate(flat, cluster, costs), sync, Topology(cluster), costs)
        assert changed == simulate(dataclasses.replace(flat, gradient_sync=sync), cluster, costs)
        assert len(changed.syncs) > 6

    def test_transfers_of_the_last_backwards_are_there_for_the_sums_to_mind(self) -> None:
        """Replica 0 still sends between the nodes when the other two are in their only backward."""
        made = plan(
            MODEL,
            [
                replica(
                    stage(layers=(0, 3), ranks=(0,), device=A100, depth=2),
                    stage(layers=(3, 6), ranks=(2,), device=A100, depth=1),
                    num_samples=4,
                ),
                replica(stage(layers=(0, 6), ranks=(1,), device=A100, depth=1), num_samples=1),
                replica(stage(layers=(0, 6), ranks=(3,), device=A100, depth=1), num_samples=1),
            ],
        )
        result = run(made, nodes(2, gpus_per_node=2, gb_per_s=4 * 16 * 32 / 1e9 / 4.0))
        first = min(span.start_s for span in result.spans if span.kind == ActionKind.B and span.replica == 1)
        assert set(result.transfers) == {(way, n, 0) for way in ("in", "out") for n in (0, 1)}
        for intervals in result.transfers.values():
            assert all(start_s + 4.0 == pytest.approx(end_s) and end_s > first for start_s, end_s in intervals)

    def test_an_mlp_is_summed_before_the_attention_that_another_stage_has(self) -> None:
        """Beside a replica of whole layers: each half when it has the gradient, layer 2's by holders of their own."""
        cut = (stage(layers=(0, 2.5), ranks=(1,), device=A100), stage(layers=(2.5, 6), ranks=(2,), device=A100))
        beside = plan(MODEL, [replica(stage(layers=(0, 6), ranks=(0,), device=A100)), replica(*cut)])
        result = run(beside, runtime=dataclasses.replace(HETERO, bucket_numel=1))
        sums = {sync.bucket.position: sync for sync in result.syncs}
        assert list(sums) == sorted(sums, reverse=True)
        assert {position for position in sums if position % 1} == {layer + 0.5 for layer in range(6)}
        assert (sums[2.5].bucket.ranks, sums[2].bucket.ranks) == ((0, 2), (0, 1))
        assert sums[3].start_s < sums[2.5].start_s < sums[2].start_s < sums[1].start_s

    def test_where_nothing_is_shared_nothing_is_waited_for_but_the_norm(self) -> None:
        """The last stage ends its backwards first; only a runtime that agrees on the norm keeps it waiting."""
        described = pipeline(2, num_samples=4)
        hasty = dataclasses.replace(HETERO, waits_for_all_before_update=False)
        assert run(described).stages[0, 1].sync_s > 1.0
        assert run(described, runtime=hasty).stages[0, 1].sync_s == 0.0


@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_the_parts_of_every_stage_add_up_to_the_step(legal: Plan) -> None:
    described = on_a100(legal)
    result = run_any(described)
    for times in result.stages.values():
        parts = (times.busy_s, times.bubble_s, times.sync_s, times.update_s, times.rest_s)
        assert sum(parts) == pytest.approx(result.step_s)
        assert min(parts) >= -1e-9 * result.step_s
        assert 0.0 <= times.exposed_s <= times.bubble_s + 1e-9 * result.step_s


@pytest.mark.slow
@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_a_faster_network_is_never_much_slower(legal: Plan) -> None:
    """Not strictly never: fixed orders on shared wires have anomalies (Graham, SIAM J. Appl. Math. 17, 1969)."""
    described = on_a100(legal)
    assert run_any(described, gb_per_s=1.0).step_s <= run_any(described, gb_per_s=1e-6).step_s * 1.05


@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_no_stage_holds_more_than_its_depth(legal: Plan) -> None:
    described = on_a100(legal)
    result = run_any(described)
    for r, each in enumerate(described.replicas):
        for group, row in zip(each.device_groups, step_rows(each), strict=True):
            held = held_by(result, r, group)
            assert [of_stage[-1] for of_stage in held.values()] == [HeldMicrobatches()] * len(group)
            most = [[each.in_flight for each in held[s]] for s in group]
            if each.is_interleaved or each.schedule != "1f1b":
                held_most = [max(moment[s].in_flight for moment in worst_moments(row)) for s in group]
                assert list(map(max, most)) == held_most
            else:
                assert max(most[0]) == min(each.stages[group[0]].in_flight, each.num_microbatches(group[0]))


@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_the_critical_path_has_no_gaps(legal: Plan) -> None:
    result = run_any(on_a100(legal))
    path = result.critical_path()
    assert path[0].start_s == 0.0
    assert path[-1].end_s == pytest.approx(result.compute_end_s)
    for before, after in pairwise(path):
        assert before.end_s <= after.start_s + 1e-9 or before.kind not in (ActionKind.F, ActionKind.B)
        assert before.start_s <= after.start_s


def on_a100(legal: Plan) -> Plan:
    """The same plan for devices that can have a profile."""
    return with_every_replica(legal, lambda each: each.with_each_stage(device=[A100] * len(each.stages)))


def run_any(described: Plan, *, gb_per_s: float = 1e-5) -> Simulation:
    measured = profile(described.model, block_s=(1e-3, 2e-3), ends_s=(1e-3, 1e-3), tps=(1, 2, 3, 4, 6), seq_length=24)
    costs = cost_model(described.model, [measured], seq_length=24)
    return simulate(described, nodes(described.world_size, gb_per_s=gb_per_s), costs)


class TestReplicasThatAreAlike:
    def plan_of(self, count: int, *, samples: list[int] | None = None) -> Plan:
        return plan(
            MODEL,
            [
                replica(
                    stage(layers=(0, 3), ranks=(2 * r,), device=A100, depth=2),
                    stage(layers=(3, 6), ranks=(2 * r + 1,), device=A100, depth=1),
                    num_samples=samples[r] if samples else 4,
                )
                for r in range(count)
            ],
        )

    def test_they_are_replayed_once(self) -> None:
        result = run(self.plan_of(3))
        assert result.alike == (0, 0, 0)
        assert len(result.spans) == len(run(self.plan_of(1)).spans)
        assert result.spans_of(2) == result.spans_of(0)
        assert result.stages[2, 1] == result.stages[0, 1]

    def test_unless_they_share_an_interface(self) -> None:
        """Two replicas across the same two nodes: ranks 0, 1 on one, 2, 3 on the other."""
        crossing = plan(
            MODEL,
            [
                replica(
                    stage(layers=(0, 3), ranks=(r,), device=A100, depth=2),
                    stage(layers=(3, 6), ranks=(r + 2,), device=A100, depth=1),
                    num_samples=4,
                )
                for r in range(2)
            ],
        )
        slow_link = 4 * 16 * 32 / 1e9 / 4.0
        shared = run(crossing, nodes(2, gpus_per_node=2, gb_per_s=slow_link))
        apart = run(crossing, nodes(2, gpus_per_node=2, gb_per_s=slow_link, nics_per_node=2))
        assert shared.alike == (0, 1)
        assert shared.compute_end_s > apart.compute_end_s

    def test_other_shares_take_other_times(self) -> None:
        result = run(self.plan_of(2, samples=[4, 8]))
        assert result.alike == (0, 1)
        assert result.stages[1, 0].busy_s == pytest.approx(2 * result.stages[0, 0].busy_s)


def test_a_link_that_is_missing_is_named() -> None:
    cluster = dataclasses.replace(nodes(2), links=dataclasses.replace(nodes(2).links, between_nodes=None))
    with pytest.raises(ConfigError, match=r"no link between ranks 0 .* and 1"):
        run(pipeline(2, num_samples=2), cluster)


@pytest.mark.slow
def test_64_stages_of_64_microbatches() -> None:
    """Fill, steady state and drain of a deep pipeline; ``tests/bench/bench_simulator.py`` says how long that takes."""
    deep = dataclasses.replace(MODEL, num_layers=64)
    stages = [stage(layers=(s, s + 1), ranks=(s,), device=A100, depth=64 - s) for s in range(64)]
    described = plan(deep, [replica(*stages, num_samples=64)])
    result = run(described)
    assert len(result.spans) == 64 * 64 * 2 + 63 * 64 * 2
    assert result.step_s == pytest.approx((64 + 63) * 3.0, rel=1e-6)
