"""Seconds of layers and stages: measured where profiles reach, marked where they do not."""

from typing import Any

import pytest

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.latency import StageCost, interpolate
from hetero.cost.layers.stage_modules import Part
from hetero.cost.runtime_model import DEEPSPEED
from hetero.errors import ConfigError
from hetero.spec.profile import LayerMemory, LayerTime
from tests.helpers.models import gpt2_model
from tests.helpers.plans import stage
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()


def times(*forward_s: tuple[int, float]) -> list[LayerTime]:
    """Backwards take twice as long."""
    return [
        LayerTime(kind="block", tp=1, micro_batch_size=size, forward_s=seconds, backward_s=2 * seconds)
        for size, seconds in forward_s
    ]


class TestInterpolation:
    MEASURED = times((1, 1.0), (4, 2.5), (8, 6.5))

    @pytest.mark.parametrize(
        ("size", "forward_s", "confidence"),
        [
            (1, 1.0, Confidence.MEASURED),
            (2, 1.5, Confidence.INTERPOLATED),
            (6, 4.5, Confidence.INTERPOLATED),
            (8, 6.5, Confidence.MEASURED),
            (16, 14.5, Confidence.EXTRAPOLATED),
        ],
    )
    def test_straight_lines_between_the_measured_sizes(
        self, size: int, forward_s: float, confidence: Confidence
    ) -> None:
        cost = interpolate(self.MEASURED, micro_batch_size=size, isolation_s=0.0)
        assert cost is not None
        assert (cost.forward_s, cost.backward_s) == pytest.approx((forward_s, 2 * forward_s))
        assert cost.confidence == confidence
        assert cost.confidence.is_estimate == (size > 8)

    def test_below_the_smallest_its_time_stays(self) -> None:
        cost = interpolate(times((2, 1.0), (4, 2.0)), micro_batch_size=1, isolation_s=0.0)
        assert cost is not None
        assert (cost.forward_s, cost.confidence) == (1.0, Confidence.EXTRAPOLATED)

    def test_one_measurement_is_taken_as_proportional(self) -> None:
        cost = interpolate(times((2, 1.0)), micro_batch_size=6, isolation_s=0.0)
        assert cost is not None
        assert cost.forward_s == 3.0

    def test_more_samples_never_take_less_time(self) -> None:
        """0.97 ms at 1 sample and 0.46 ms at 2, as published: the first one was disturbed."""
        cost = interpolate(times((1, 0.97), (2, 0.46)), micro_batch_size=1, isolation_s=0.0)
        assert cost is not None
        assert cost.forward_s == 0.46

    def test_isolation_is_taken_off_but_never_below_nothing(self) -> None:
        cost = interpolate(times((1, 0.25), (2, 1.0)), micro_batch_size=1, isolation_s=0.4)
        assert cost is not None
        assert (cost.forward_s, cost.backward_s) == pytest.approx((0.0, 0.1))

    def test_nothing_measured(self) -> None:
        assert interpolate([], micro_batch_size=1, isolation_s=0.0) is None


class TestStages:
    COSTS = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0), ends_s=(0.25, 0.5), update_s=0.1)])

    def test_the_ends_have_the_embedding_and_the_head(self) -> None:
        first = self.COSTS.stage(device="A100-40", first_layer=0, end_layer=2, tp=1, micro_batch_size=1)
        middle = self.COSTS.stage(device="A100-40", first_layer=2, end_layer=4, tp=1, micro_batch_size=1)
        whole = self.COSTS.stage(device="A100-40", first_layer=0, end_layer=6, tp=1, micro_batch_size=1)
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
        all_layers = self.COSTS.stage(**arguments, recompute="full")
        one_layer = self.COSTS.stage(**arguments, recompute="full", recompute_num_layers=1)
        assert all_layers.backward_s == pytest.approx(3 * 2.0 + 3 * 1.0)
        assert one_layer.backward_s == pytest.approx(3 * 2.0 + 1.0)
        assert all_layers.forward_s == one_layer.forward_s == pytest.approx(3.0)

    def test_selective_recomputation_repeats_less_and_is_an_estimate(self) -> None:
        arguments = {"device": "A100-40", "first_layer": 2, "end_layer": 5, "tp": 1, "micro_batch_size": 1}
        none, full = self.COSTS.stage(**arguments), self.COSTS.stage(**arguments, recompute="full")
        selective = self.COSTS.stage(**arguments, recompute="selective")
        assert none.backward_s < selective.backward_s < full.backward_s
        assert selective.confidence == Confidence.ESTIMATED

    def test_a_split_backward_leaves_the_weights_products_for_later(self) -> None:
        """Less than half of the backward, nothing of embedding and head, and none of what is recomputed."""
        arguments = {"device": "A100-40", "first_layer": 2, "end_layer": 4, "tp": 1, "micro_batch_size": 1}
        whole = self.COSTS.stage(**arguments)
        split = self.COSTS.stage(**arguments, splits_backward=True)
        assert (whole.weight_s, whole.confidence) == (0.0, Confidence.MEASURED)
        assert (split.forward_s, split.backward_s) == (whole.forward_s, whole.backward_s)
        assert 0.0 < split.weight_s < split.backward_s / 2
        assert split.confidence == Confidence.ESTIMATED
        with_head = self.COSTS.stage(**{**arguments, "first_layer": 4, "end_layer": 6}, splits_backward=True)
        selective = self.COSTS.stage(**arguments, recompute="selective", splits_backward=True)
        assert split.weight_s == with_head.weight_s == selective.weight_s

    def test_weights_take_their_share_of_the_operations_where_products_are_all_there_is(self) -> None:
        """One of two products of each linear layer; a backward of 2 x forward, attention without weights."""
        costs = cost_model(big := gpt2_model(hidden_size=4096, ffn_hidden_size=16384), [profile(big)])
        work = costs.work("block", tp=1, micro_batch_size=4)
        cost = costs.stage(device="A100-40", first_layer=2, end_layer=3, tp=1, micro_batch_size=4, splits_backward=True)
        linear = 1 - work.attention_operations / work.operations
        assert cost.weight_s == pytest.approx(cost.backward_s * linear / 2, rel=0.05)


PARTS: tuple[Part, ...] = ("block", "attention", "mlp")


class TestHalves:
    """A stage that ends between attention and MLP."""

    COSTS = cost_model(MODEL, [profile(MODEL, block_s=(1.0, 2.0), ends_s=(0.25, 0.5), update_s=0.1)])

    def of(self, first: float, end: float, **recompute: Any) -> StageCost:
        return self.COSTS.stage(
            device="A100-40", first_layer=first, end_layer=end, tp=1, micro_batch_size=1, **recompute
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


class TestWhatIsNotMeasured:
    def test_another_tp_is_scaled_from_the_nearest_measured(self) -> None:
        """Times in proportion to 1 / tp, on a profile that stops at 2: the estimate goes on like that."""
        costs = cost_model(MODEL, [profile(MODEL, tps=(1, 2))])
        cost = costs.layer("block", device="A100-40", tp=4, micro_batch_size=2)
        assert cost.confidence == Confidence.ESTIMATED
        assert cost.forward_s == pytest.approx(0.5, rel=0.25)

    def test_another_model_is_estimated_from_those_of_the_device(self) -> None:
        twice = gpt2_model(num_attention_heads=8, num_query_groups=8, hidden_size=64, ffn_hidden_size=128)
        costs = cost_model(twice, [profile(MODEL)])
        cost = costs.layer("block", device="A100-40", tp=1, micro_batch_size=1)
        assert cost.confidence == Confidence.ESTIMATED
        assert 1.0 < cost.forward_s < 4.0, "between what grows with the size and what grows with its square"

    def test_another_vocabulary_is_estimated_at_the_ends_only(self) -> None:
        costs = cost_model(gpt2_model(padded_vocab_size=128), [profile(MODEL, ends_s=(1.0, 1.0))])
        assert costs.layer("block", device="A100-40", tp=1, micro_batch_size=1).confidence == Confidence.MEASURED
        assert costs.layer("head", device="A100-40", tp=1, micro_batch_size=1).confidence == Confidence.ESTIMATED

    def test_a_head_that_was_measured_without_its_projection_is_estimated(self) -> None:
        measured = profile(MODEL, ends_s=(1e-6, 1e-6), head_has_projection=False)
        ours = cost_model(MODEL, [measured]).layer("head", device="A100-40", tp=1, micro_batch_size=1)
        theirs = cost_model(MODEL, [measured], runtime=DEEPSPEED).layer(
            "head", device="A100-40", tp=1, micro_batch_size=1
        )
        assert (theirs.forward_s, theirs.confidence) == (1e-6, Confidence.MEASURED), (
            "the runs that were measured had that head"
        )
        assert ours.confidence == Confidence.ESTIMATED
        assert ours.forward_s > theirs.forward_s

    def test_so_is_its_update(self) -> None:
        block = LayerMemory(kind="block", tp=1, parameters=1000, saved_bytes=0, output_bytes=0)
        measured = profile(MODEL, update_s=1e-6, head_has_projection=False, memory=(block,))
        seconds, confidence = cost_model(MODEL, [measured]).update("head", device="A100-40", tp=1)
        assert confidence == Confidence.ESTIMATED
        assert seconds == pytest.approx(1e-9 * (64 * 32 + 2 * 32)), "1 us per 1000 parameters"

    def test_bf16_is_scaled_from_fp32_by_the_data_sheet(self) -> None:
        costs = cost_model(MODEL, [profile(MODEL)], precision="bf16")
        cost = costs.layer("block", device="A100-40", tp=1, micro_batch_size=1)
        assert cost.confidence == Confidence.DATA_SHEET
        assert cost.forward_s < 1.0

    def test_a_device_without_a_profile_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"no profile of any model on 'H100' \(profiled: A100-40\); measure one"):
            cost_model(MODEL, [profile(MODEL)]).layer("block", device="H100", tp=1, micro_batch_size=1)

    def test_unless_data_sheets_are_allowed(self) -> None:
        costs = cost_model(MODEL, [profile(MODEL)], data_sheets=True)
        cost = costs.layer("block", device="H100", tp=1, micro_batch_size=1)
        assert cost.confidence == Confidence.DATA_SHEET
        assert cost.forward_s < costs.layer("block", device="A100-40", tp=1, micro_batch_size=1).forward_s

    def test_the_host_has_no_data_sheet(self) -> None:
        with pytest.raises(ConfigError, match="device 'cpu' has neither a profile nor a data sheet"):
            cost_model(MODEL, [profile(MODEL)], data_sheets=True).layer("block", device="cpu", tp=1, micro_batch_size=1)

    def test_an_update_without_a_measurement_is_bytes_over_bandwidth(self) -> None:
        costs = cost_model(MODEL, [profile(MODEL, updates=())])
        seconds, confidence = costs.update("block", device="A100-40", tp=1)
        assert confidence == Confidence.DATA_SHEET
        assert seconds == pytest.approx(28 * 8544 / 1555e9), "a block of this model has 8,544 parameters"
