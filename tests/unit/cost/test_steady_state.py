"""A step from one agreement on the norm to the next: updates, gathers of weights, and interleaved stages, by hand."""

import dataclasses
from itertools import pairwise

import pytest

from hetero.cost.network import RING_SHARE, Topology
from hetero.cost.runtime_model import HETERO, RuntimeModel
from hetero.cost.simulation.engine import Span
from hetero.cost.simulation.simulator import Simulation, simulate, with_gradient_sync
from hetero.errors import PlanError
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.validate import validate
from hetero.schedule.actions import ActionKind
from hetero.spec.cluster import ClusterSpec
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile
from tests.unit.cost.simulated import DEEPSPEED_FAST_HOST as DEEPSPEED

MODEL = gpt2_model(tied_embeddings=False)
A100 = "A100-40"
RUNTIME = dataclasses.replace(HETERO, overlaps_gradient_sync=False)
NUMEL = 6 * 8544 + 2 * 64 * 32 + 64 * 32 + 2 * 32
"""Blocks, embedding and head, positions, final norm."""


def run(
    described: Plan, cluster: ClusterSpec | None = None, *, update_s: float = 0.0, runtime: RuntimeModel = RUNTIME
) -> Simulation:
    costs = cost_model(
        described.model, [profile(described.model, block_s=(1.0, 2.0), update_s=update_s)], runtime=runtime
    )
    return simulate(described, cluster or nodes(described.world_size, gb_per_s=1e9), costs)


def two_devices() -> Plan:
    """Two replicas of one device, one sample each, that share optimizer states."""
    one = [replica(stage(layers=(0, 6), ranks=(r,), device=A100, depth=1), num_samples=1) for r in range(2)]
    return sharded(plan(MODEL, one))


def summing_in(seconds: float) -> ClusterSpec:
    """Two nodes that take so long to sum all gradients everywhere; to scatter sums, or to gather weights, is half."""
    return nodes(2, gb_per_s=4 * NUMEL / 1e9 / seconds / RING_SHARE)


def named(result: Simulation) -> dict[str, Span]:
    return {f"{span.stage}{span.kind}{span.number}": span for span in result.spans}


class TestGathers:
    def test_all_weights_come_before_the_first_forward(self) -> None:
        """Update 2 s, half of what all weights take, gathers 5 s, forward 6 s, backward 12 s, sums 5 s: each shard has
        one owner."""
        result = run(two_devices(), summing_in(10.0), update_s=0.5)
        (gather,) = result.gathers
        assert (gather.start_s, gather.end_s) == pytest.approx((0.0, 5.0))
        assert gather.bucket.ranks == (0, 1)
        assert named(result)["0F0"].start_s == pytest.approx(5.0)
        assert result.step_s == pytest.approx(2.0 + 5.0 + 18.0 + 5.0)
        times = result.stages[0, 0]
        assert (times.busy_s, times.bubble_s, times.sync_s, times.update_s) == pytest.approx((18.0, 5.0, 5.0, 2.0))
        assert times.rest_s == pytest.approx(0.0, abs=1e-9)

    def test_who_owns_more_updates_longer(self) -> None:
        """Shares of 3 and 1: three quarters of the 4 s, and a quarter."""
        shared = two_devices()
        first, second = shared.replicas
        uneven = dataclasses.replace(shared, replicas=(first.with_stage(0, optimizer_share=3), second))
        result = run(uneven, update_s=0.5)
        assert [result.stages[r, 0].update_s for r in (0, 1)] == pytest.approx([3.0, 1.0])

    def test_a_forward_stands_still_in_the_middle_for_the_weights_of_its_next_layer(self) -> None:
        """The embedding first, then layer by layer, each 1 s of forward, as long as its weights are there."""
        overlapping = dataclasses.replace(RUNTIME, overlaps_param_gather=True, bucket_numel=1)
        result = run(two_devices(), summing_in(16.0), runtime=overlapping)
        assert [gather.bucket.position for gather in result.gathers] == sorted(
            gather.bucket.position for gather in result.gathers
        )
        # By position, when the last of its buckets is there; a layer of forward takes 1 s, embedding and head nothing.
        here_s = {gather.bucket.position: gather.end_s for gather in result.gathers}
        at_s = 0.0
        for position, further in pairwise([*sorted(here_s), 6]):
            at_s = max(at_s, here_s[position]) + max(0, min(further, 6) - max(position, 0))
        assert max(here_s.values()) == pytest.approx(8.0, rel=1e-2)
        assert here_s[0] < named(result)["0F0"].end_s - 6.0, "it does not wait for all of them"
        assert named(result)["0F0"].end_s == pytest.approx(at_s)
        assert named(result)["0F0"].start_s == pytest.approx(max(here_s[-1], here_s[0]))
        assert result.stages[0, 0].busy_s == pytest.approx(18.0), "what it stands still is no compute"

    def test_they_take_the_interfaces_before_the_pipeline_does(self) -> None:
        """Ranks 0 and 1 of a node gather with 2 and 3 of the other. Rank 4 has no weights to wait for, and sends its
        first activation to the second node when the gathers have left its interface."""
        cluster = nodes(2, gpus_per_node=3, gb_per_s=4 * NUMEL / 1e9 / 20.0)
        described = plan(
            MODEL,
            [
                replica(
                    stage(layers=(0, 3), ranks=(0,), device=A100, depth=2),
                    stage(layers=(3, 6), ranks=(3,), device=A100, depth=1),
                    num_samples=4,
                ),
                replica(stage(layers=(0, 3), ranks=(4,), device=A100), stage(layers=(3, 6), ranks=(1,), device=A100)),
            ],
            idle_ranks=(2, 5),
        )
        result = run(sharded(described), cluster)
        last_s = max(gather.end_s for gather in result.gathers)
        sent = [span for span in result.spans if span.kind == ActionKind.SEND_F]
        assert last_s > 3.0
        assert min(span.start_s for span in sent) >= last_s

    def test_without_a_distributed_optimizer_there_are_none(self) -> None:
        whole = dataclasses.replace(two_devices(), distributed_optimizer=False)
        assert run(whole, summing_in(10.0)).gathers == ()

    def test_other_buckets_are_gathered_otherwise(self) -> None:
        cluster = nodes(2, gb_per_s=1e-5)
        costs = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0))], runtime=RUNTIME)
        sync = GradientSyncPlan(bucket_numel=5000)
        changed = with_gradient_sync(simulate(two_devices(), cluster, costs), sync, Topology(cluster), costs)
        assert changed == simulate(dataclasses.replace(two_devices(), gradient_sync=sync), cluster, costs)
        assert len(changed.gathers) == len(changed.syncs) > 6


class TestUnlikeUpdates:
    def pipeline(self, cut: int) -> Plan:
        return plan(
            MODEL,
            [
                replica(
                    stage(layers=(0, cut), ranks=(0,), device=A100, depth=2),
                    stage(layers=(cut, 6), ranks=(1,), device=A100, depth=1),
                    num_samples=3,
                )
            ],
        )

    def test_alike_they_come_on_top(self) -> None:
        """3 blocks and the embedding, 3 blocks and the head."""
        described = self.pipeline(3)
        assert run(described, update_s=0.5).step_s == pytest.approx(run(described).step_s + 2.0)

    @pytest.mark.parametrize("cut", [1, 2, 4, 5])
    def test_a_longer_one_delays_its_own_stage_alone(self, cut: int) -> None:
        """The pipeline may hide some of it, never more than it is longer by."""
        described = self.pipeline(cut)
        updates = [0.5 * (cut + 1), 0.5 * (7 - cut)]
        alone_s = run(described).step_s
        assert alone_s + min(updates) - 1e-9 <= run(described, update_s=0.5).step_s <= alone_s + max(updates) + 1e-9

    def test_the_fill_of_the_pipeline_hides_that_of_the_last_stage(self) -> None:
        """Stage 1 updates for 2.5 s, stage 0 for 1.5 s, and its first activation comes 2 s later."""
        described = self.pipeline(2)
        result = run(described, update_s=0.5)
        assert result.step_s == pytest.approx(run(described).step_s + 1.5)
        for times in result.stages.values():
            parts = (times.busy_s, times.bubble_s, times.sync_s, times.update_s, times.rest_s)
            assert sum(parts) == pytest.approx(result.step_s)
            assert min(parts) >= -1e-9

    def test_that_of_the_first_stage_delays_everything(self) -> None:
        described = self.pipeline(4)
        result = run(described, update_s=0.5)
        assert named(result)["0F0"].start_s == pytest.approx(1.0)
        assert result.step_s == pytest.approx(run(described).step_s + 2.5)


class TestInterleaved:
    FOUR = gpt2_model(num_layers=4, tied_embeddings=False)

    def turns(self) -> Plan:
        """Two devices with two stages of one layer each, and two microbatches."""
        depths = (3, 2, 1, 1)
        stages = [stage(layers=(s, s + 1), ranks=(s % 2,), device=A100, depth=depth) for s, depth in enumerate(depths)]
        return plan(self.FOUR, [replica(*stages, num_samples=2)])

    def test_by_hand(self) -> None:
        """The fill is half as long as with two stages of two layers:

        stages 0 2    0F0 0-1  0F1 1-2  2F0 2-3  2F1 3-4  2B0 6-8  2B1 9-11  0B0 11-13  0B1 13-15
        stages 1 3    1F0 1-2  1F1 2-3  3F0 3-4  3B0 4-6  3F1 6-7  3B1 7-9   1B0 9-11   1B1 11-13
        """
        described = self.turns()
        validate(described)
        result = run(described)
        computes = {
            name: (span.start_s, span.end_s)
            for name, span in named(result).items()
            if span.kind in (ActionKind.F, ActionKind.B)
        }
        expected = "0F0 0-1 0F1 1-2 2F0 2-3 2F1 3-4 2B0 6-8 2B1 9-11 0B0 11-13 0B1 13-15 "
        expected += "1F0 1-2 1F1 2-3 3F0 3-4 3B0 4-6 3F1 6-7 3B1 7-9 1B0 9-11 1B1 11-13"
        words = expected.split()
        assert set(computes) == set(words[::2])
        for name, times in zip(words[::2], words[1::2], strict=True):
            assert computes[name] == pytest.approx(tuple(map(float, times.split("-"))), abs=1e-3)
        assert result.compute_end_s == pytest.approx(15.0, abs=1e-3)

    def test_the_stages_of_a_group_show_its_account(self) -> None:
        result = run(self.turns(), update_s=0.5)
        assert result.stages[0, 0] == result.stages[0, 2]
        times = result.stages[0, 1]
        assert (times.busy_s, times.update_s) == pytest.approx((12.0, 1.5))
        assert times.bubble_s == pytest.approx(1.0, abs=1e-3)
        for times in result.stages.values():
            assert times.busy_s + times.bubble_s + times.sync_s + times.update_s + times.rest_s == pytest.approx(
                result.step_s
            )
        assert result.bubble_share == pytest.approx(1 - (12.0 + 1.5) / result.step_s)

    def test_gradients_are_ready_with_the_last_backward_of_their_own_stage(self) -> None:
        """Beside a replica of one device that is further at any time: stages 2 and 3 are summed while the same ranks
        have the last backwards of stages 0 and 1 before them."""
        (turns,) = self.turns().replicas
        beside = replica(stage(layers=(0, 4), ranks=(2,), device=A100), num_samples=1)
        eager = dataclasses.replace(RUNTIME, overlaps_gradient_sync=True, bucket_numel=1)
        sums = {sync.bucket.position: sync for sync in run(plan(self.FOUR, [turns, beside]), runtime=eager).syncs}
        ready = {layer: sums[layer].start_s for layer in range(4)}
        assert ready == pytest.approx({3: 9.0, 2: 11.0, 1: 13.0, 0: 15.0}, abs=0.05)

    def test_a_runtime_with_blocking_transfers_has_none(self) -> None:
        with pytest.raises(PlanError, match=r"deepspeed-1f1b: this runtime does not interleave stages; give each"):
            run(self.turns(), runtime=DEEPSPEED)
