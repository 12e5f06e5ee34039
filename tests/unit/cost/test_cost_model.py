"""Seconds of stages: sums of layers, with what is computed again or later, and halves of layers at their ends."""

from typing import Any

import pytest

from hetero.cost.cost_model import StageConfig, StageCost
from hetero.cost.layers.confidence import Confidence
from hetero.cost.simulation.simulator import simulate
from hetero.spec.profile import ModuleKind
from tests.helpers.cost_comparison import shipped_costs
from tests.helpers.models import gpt2_model
from tests.helpers.plans import stage
from tests.helpers.published_runs import h200, read_family
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()


class TestStages:
    COSTS = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0), ends_s=(0.25, 0.5), update_s=0.1)])

    def test_the_ends_have_the_embedding_and_the_head(self) -> None:
        first = self.COSTS.stage(StageConfig(device="A100-40", first_layer=0, end_layer=2, tp=1, micro_batch_size=1))
        middle = self.COSTS.stage(StageConfig(device="A100-40", first_layer=2, end_layer=4, tp=1, micro_batch_size=1))
        whole = self.COSTS.stage(StageConfig(device="A100-40", first_layer=0, end_layer=6, tp=1, micro_batch_size=1))
        assert (middle.forward_s, middle.backward_s, middle.update_s) == pytest.approx((2.0, 4.0, 0.2))
        assert (first.forward_s, first.backward_s, first.update_s) == pytest.approx((2.25, 4.5, 0.3))
        assert (whole.forward_s, whole.backward_s, whole.update_s) == pytest.approx((6.5, 13.0, 0.8))
        assert middle.microbatch_s == pytest.approx(6.0)
        assert whole.confidence == Confidence.MEASURED

    def test_tp_and_microbatch_size_are_those_of_the_profile(self) -> None:
        cost = self.COSTS.of(stage(layers=(2, 4), ranks=(0, 1), tp=2, mbs=4, device="A100-40"))
        assert cost.forward_s == pytest.approx(4.0)

    def test_full_recomputation_repeats_the_forward_of_its_layers(self) -> None:
        arguments = {"device": "A100-40", "first_layer": 2, "end_layer": 5, "tp": 1, "micro_batch_size": 1}
        all_layers = self.COSTS.stage(StageConfig(**arguments, recompute="full"))
        one_layer = self.COSTS.stage(StageConfig(**arguments, recompute="full", recompute_num_layers=1))
        assert all_layers.backward_s == pytest.approx(3 * 2.0 + 3 * 1.0)
        assert one_layer.backward_s == pytest.approx(3 * 2.0 + 1.0)
        assert all_layers.forward_s == one_layer.forward_s == pytest.approx(3.0)

    def test_selective_recomputation_repeats_less_and_is_an_estimate(self) -> None:
        arguments = {"device": "A100-40", "first_layer": 2, "end_layer": 5, "tp": 1, "micro_batch_size": 1}
        none, full = (
            self.COSTS.stage(StageConfig(**arguments)),
            self.COSTS.stage(StageConfig(**arguments, recompute="full")),
        )
        selective = self.COSTS.stage(StageConfig(**arguments, recompute="selective"))
        assert none.backward_s < selective.backward_s < full.backward_s
        assert selective.confidence == Confidence.ESTIMATED

    def test_a_split_backward_leaves_the_weights_products_for_later(self) -> None:
        """Less than half of the backward, nothing of embedding and head, and none of what is recomputed."""
        arguments = {"device": "A100-40", "first_layer": 2, "end_layer": 4, "tp": 1, "micro_batch_size": 1}
        whole = self.COSTS.stage(StageConfig(**arguments))
        split = self.COSTS.stage(StageConfig(**arguments, splits_backward=True))
        assert (whole.weight_s, whole.confidence) == (0.0, Confidence.MEASURED)
        assert (split.forward_s, split.backward_s) == (whole.forward_s, whole.backward_s)
        assert 0.0 < split.weight_s < split.backward_s / 2
        assert split.confidence == Confidence.ESTIMATED
        with_head = self.COSTS.stage(
            StageConfig(**{**arguments, "first_layer": 4, "end_layer": 6}, splits_backward=True)
        )
        selective = self.COSTS.stage(StageConfig(**arguments, recompute="selective", splits_backward=True))
        assert split.weight_s == with_head.weight_s == selective.weight_s

    def test_weights_take_their_share_of_the_operations_where_products_are_all_there_is(self) -> None:
        """One of two products of each linear layer; a backward of 2 x forward, attention without weights."""
        costs = cost_model(big := gpt2_model(hidden_size=4096, ffn_hidden_size=16384), [profile(big)])
        work = costs.work("block", tp=1, micro_batch_size=4)
        cost = costs.stage(
            StageConfig(device="A100-40", first_layer=2, end_layer=3, tp=1, micro_batch_size=4, splits_backward=True)
        )
        linear = 1 - work.attention_operations / work.operations
        assert cost.weight_s == pytest.approx(cost.backward_s * linear / 2, rel=0.05)


PARTS: tuple[ModuleKind, ...] = ("block", "attention", "mlp")


class TestHalves:
    """A stage that ends between attention and MLP."""

    COSTS = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0), ends_s=(0.25, 0.5), update_s=0.1)])

    def of(self, first: float, end: float, **recompute: Any) -> StageCost:
        return self.COSTS.stage(
            StageConfig(device="A100-40", first_layer=first, end_layer=end, tp=1, micro_batch_size=1, **recompute)
        )

    @pytest.mark.parametrize("tp", [1, 2, 8])
    def test_attention_and_mlp_add_up_to_the_block(self, tp: int) -> None:
        block, attention, mlp = (self.COSTS.layer(part, device="A100-40", tp=tp, micro_batch_size=2) for part in PARTS)
        assert attention.forward_s + mlp.forward_s == pytest.approx(block.forward_s)
        assert attention.backward_s + mlp.backward_s == pytest.approx(block.backward_s)
        assert attention.confidence == mlp.confidence == Confidence.ESTIMATED

    def test_so_do_their_updates(self) -> None:
        block, attention, mlp = (self.COSTS.update(part, device="A100-40", tp=2) for part in PARTS)
        assert attention[0] + mlp[0] == pytest.approx(block[0])
        assert (block[1], attention[1], mlp[1]) == (Confidence.MEASURED, Confidence.ESTIMATED, Confidence.ESTIMATED)

    def test_the_mlp_takes_more_where_it_has_more_of_the_work(self) -> None:
        long, short = (gpt2_model(ffn_hidden_size=size) for size in (256, 16))
        shares = []
        for model in (long, short):
            costs = cost_model(model, [profile(model)])
            shares.append(costs.layer("mlp", device="A100-40", tp=1, micro_batch_size=1).forward_s)
        assert 1 > shares[0] > shares[1] > 0

    def test_two_stages_that_share_a_layer_add_up_to_one(self) -> None:
        whole, front, back = self.of(1, 5), self.of(1, 2.5), self.of(2.5, 5)
        for name in ("forward_s", "backward_s", "update_s"):
            assert getattr(front, name) + getattr(back, name) == pytest.approx(getattr(whole, name))
        assert whole.confidence == Confidence.MEASURED
        assert front.confidence == back.confidence == Confidence.ESTIMATED

    def test_an_mlp_with_the_attention_behind_it_is_a_block(self) -> None:
        assert self.of(1.5, 2.5).microbatch_s == pytest.approx(self.of(1, 2).microbatch_s)

    def test_half_a_layer_is_not_yet_the_head(self) -> None:
        assert self.of(0, 0.5).forward_s > 0.25 > self.of(0.5, 1).forward_s - self.of(1.5, 2).forward_s

    @pytest.mark.parametrize("recompute", ["selective", "full"])
    def test_what_is_computed_again_adds_up_as_well(self, recompute: str) -> None:
        whole, front, back = (self.of(*held, recompute=recompute) for held in ((1, 4), (1, 2.5), (2.5, 4)))
        assert front.backward_s + back.backward_s == pytest.approx(whole.backward_s)
        assert self.of(2.5, 3, recompute="selective").backward_s == self.of(2.5, 3).backward_s, "no attention in it"

    def test_half_a_layer_counts_as_one_for_recomputation(self) -> None:
        mlp_again_s = self.of(1.5, 3, recompute="full", recompute_num_layers=1).backward_s - self.of(1.5, 3).backward_s
        assert mlp_again_s == pytest.approx(self.of(1.5, 2).forward_s)


def test_who_adds_gradients_is_in_every_microbatch_that_is_simulated() -> None:
    """On one rank a step is M forwards and backwards and an update: no other term differs."""
    local, transformer_engine = read_family(h200.H200)[:2]
    assert local.plan == transformer_engine.plan
    costs = [shipped_costs(run) for run in (local, transformer_engine)]
    (stage,) = local.plan.replicas[0].stages
    separate, fused = (each.of(stage) for each in costs)
    assert separate.backward_s > fused.backward_s
    assert (separate.forward_s, separate.update_s) == (fused.forward_s, fused.update_s)
    steps = [simulate(local.plan, local.cluster, each).step_s for each in costs]
    more_s = local.plan.replicas[0].num_microbatches(0) * (separate.backward_s - fused.backward_s)
    assert steps[0] - steps[1] == pytest.approx(more_s)
