"""Seconds of layers: measured where profiles reach, marked where they do not."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hetero.cost.cost_model import CostModel
from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.kernels import Kernels
from hetero.cost.layers.layer_kernels import ComputePass, LayerConfig
from hetero.cost.layers.layer_times import PASSES, LayerCost, LayerPlacement, LayerTimes, interpolate
from hetero.cost.layers.reference_profiles import ReferenceProfiles
from hetero.cost.layers.throughput_fit import fit, measured_config
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.cost.runtime_model import HETERO, HETERO_LAYERS
from hetero.errors import ConfigError
from hetero.spec.link import GroupLink, Link
from hetero.spec.profile import (
    HALVES,
    AttentionKernel,
    GradientSums,
    LayerImplementation,
    LayerMemory,
    LayerTime,
    ModuleKind,
    Profile,
    ProfileStore,
    RecomputedTime,
    SplitBackwardTime,
)
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model()

LARGE, TWICE = (
    gpt2_model(
        num_attention_heads=32 * n,
        num_query_groups=32 * n,
        kv_channels=128,
        hidden_size=4096 * n,
        ffn_hidden_size=16384 * n,
    )
    for n in (1, 2)
)
"""Large enough that a device has many tiles of each product to compute."""


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


class TestWhatIsNotMeasured:
    def test_another_tp_is_scaled_from_the_nearest_measured(self) -> None:
        """Times in proportion to 1 / tp, on a profile that stops at 2: the estimate goes on like that."""
        costs = cost_model(LARGE, [profile(LARGE, seq_length=2048, tps=(1, 2))], seq_length=2048)
        cost = costs.layer("block", device="A100-40", tp=4, micro_batch_size=2)
        assert cost.confidence == Confidence.ESTIMATED
        assert cost.forward_s == pytest.approx(0.5, rel=0.25)

    def test_another_model_is_estimated_from_those_of_the_device(self) -> None:
        costs = cost_model(TWICE, [profile(LARGE, seq_length=2048)], seq_length=2048)
        cost = costs.layer("block", device="A100-40", tp=1, micro_batch_size=1)
        assert cost.confidence == Confidence.ESTIMATED
        assert 2.0 < cost.forward_s < 4.0, "between what grows with the size and what grows with its square"

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

    @pytest.mark.parametrize(
        ("device", "confidence"), [("A100-40", Confidence.ESTIMATED), ("RTX-3090", Confidence.DATA_SHEET)]
    )
    def test_bf16_takes_what_was_published_of_its_kernels(self, device: str, confidence: Confidence) -> None:
        """Of the device, or of its generation: profiles in fp32 say nothing of tensor cores."""
        slow, fast = (
            cost_model(
                LARGE,
                [profile(LARGE, seq_length=2048, device=device, block_s=(seconds, seconds))],
                seq_length=2048,
                precision="bf16",
            ).layer("block", device=device, tp=1, micro_batch_size=1)
            for seconds in (1.0, 1e-2)
        )
        assert slow == fast
        assert slow.confidence == confidence
        operations = 24 * 2048 * 4096**2 + 2 * 2048**2 * 4096
        peak = SHIPPED_DEVICES.of(device).data_sheet
        assert peak is not None
        assert operations / peak.flops_per_s("bf16") < slow.forward_s < 2 * operations / peak.flops_per_s("bf16")

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
        assert seconds == pytest.approx(140 * 8544 / 1555e9), "a block of this model has 8,544 parameters"


class TestInAStep:
    BOUND = times((1, 2e-3), (2, 2e-3), (4, 2e-3), (8, 4e-3))
    """Launches take the host 2 ms, and the device computes a sample in half a millisecond."""

    def of(self, tp: int, size: int, **arguments: float) -> tuple[float, float]:
        measured = [dataclasses.replace(time, tp=tp, backward_s=time.forward_s) for time in self.BOUND]
        cost = interpolate(measured, micro_batch_size=size, isolation_s=0.0, **arguments)
        assert cost is not None
        return cost.forward_s, cost.backward_s

    @pytest.mark.parametrize(("size", "seconds"), [(1, 2e-3), (4, 2e-3), (8, 4e-3)])
    def test_alone_launches_hide_what_is_shorter(self, size: int, seconds: float) -> None:
        assert self.of(1, size) == pytest.approx((seconds, seconds))

    @pytest.mark.parametrize(("size", "device_s"), [(1, 0.5e-3), (4, 2e-3), (8, 4e-3)])
    def test_in_a_group_launches_and_kernels_add_up(self, size: int, device_s: float) -> None:
        assert self.of(2, size) == pytest.approx((math.hypot(device_s, 2e-3),) * 2)

    def test_where_nothing_shows_launches_a_group_takes_what_was_measured(self) -> None:
        costs = cost_model(MODEL, [profile(MODEL)])
        assert costs.layer("block", device="A100-40", tp=4, micro_batch_size=2).forward_s == 0.5

    def test_a_forward_may_have_more_of_them(self) -> None:
        assert self.of(2, 8, more_host_s=1e-3) == pytest.approx((5e-3, math.hypot(4e-3, 2e-3)))

    def test_isolation_is_off_before_a_device_that_never_rests_is_on(self) -> None:
        measured = profile(MODEL, isolation_s=0.25, in_a_step=1.5)
        cost = cost_model(MODEL, [measured]).layer("block", device="A100-40", tp=1, micro_batch_size=1)
        assert (cost.forward_s, cost.backward_s) == pytest.approx((1.5 * 0.75, 1.5 * 1.75))
        assert cost.confidence == Confidence.MEASURED


UNFUSED = LayerImplementation()
FLASH_WITH_DROPOUT = dataclasses.replace(HETERO_LAYERS, dropout=True)
HERE: dict[str, Any] = {"device": "A100-40", "micro_batch_size": 1}


def links(gb_per_s: float) -> tuple[GroupLink, ...]:
    return (GroupLink(size=4, bus=Link(bandwidth_gb_per_s=gb_per_s, latency_us=0)),)


class TestOtherLayersThanThoseProfiled:
    """Times of 1 and 2 s, of layers of 4096, say what these kernels take; others take what the kernels' ratio says."""

    def measured(self, **changes: Any) -> Profile:
        return profile(LARGE, **{"seq_length": 2048, "implementation": UNFUSED, **changes})

    def costs(self, measured: Profile, **arguments: Any) -> CostModel:
        return cost_model(LARGE, [measured], **{"seq_length": 2048, **arguments})

    def ratio(self, measured: Profile, compute_pass: ComputePass, here: LayerConfig) -> float:
        sheet = SHIPPED_DEVICES.of("A100-40").data_sheet
        assert sheet is not None
        kernels = Kernels(SHIPPED_DEVICES.of("A100-40"), sheet, arithmetic="fp32")
        found = fit([measured], kernels, kind="block", compute_pass=compute_pass)
        assert found is not None
        there = measured_config(measured, "block", tp=here.tp, micro_batch_size=here.micro_batch_size)
        return found.device_s(here) / found.device_s(there)

    def test_scores_that_nobody_writes_are_taken_off(self) -> None:
        measured = self.measured()
        cost = self.costs(measured).layer("block", tp=1, **HERE)
        here = dataclasses.replace(
            measured_config(measured, "block", tp=1, micro_batch_size=1), implementation=HETERO_LAYERS
        )
        forward, backward = (self.ratio(measured, each, here) for each in PASSES)
        assert (cost.forward_s, cost.backward_s) == pytest.approx((forward, 2 * backward))
        assert 0 < forward < 1
        assert 0 < backward < 1, "computing the scores again takes less than moving them"
        assert cost.confidence == Confidence.ESTIMATED

    def test_a_runtime_that_runs_what_was_profiled_takes_what_was_measured(self) -> None:
        cost = self.costs(self.measured(), runtime=DEEPSPEED).layer("block", tp=1, **HERE)
        assert (cost.forward_s, cost.backward_s, cost.confidence) == (1.0, 2.0, Confidence.MEASURED)

    @pytest.mark.parametrize("kind", ["embedding", "head"])
    def test_the_ends_have_no_attention(self, kind: ModuleKind) -> None:
        cost = self.costs(self.measured(ends_s=(0.25, 0.5))).layer(kind, tp=1, **HERE)
        assert (cost.forward_s, cost.backward_s, cost.confidence) == (0.25, 0.5, Confidence.MEASURED)

    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize(
        ("attention", "layers", "confidence"),
        [
            ("cudnn", None, Confidence.MEASURED),
            ("efficient", "local", Confidence.MEASURED),
            ("unfused", "local", Confidence.MEASURED),
            ("fused-softmax", "transformer_engine", Confidence.MEASURED),
            ("unfused", None, Confidence.ESTIMATED),
        ],
    )
    def test_the_kernel_that_the_device_has_is_the_one_that_runs(
        self, attention: AttentionKernel, layers: Any, confidence: Confidence, tp: int
    ) -> None:
        """Where our own layers were measured, or kernels that cost alike; other projects' scores are taken off."""
        implementation = dataclasses.replace(HETERO_LAYERS, attention=attention)
        measured = self.measured(implementation=implementation, layers=layers)
        costs = self.costs(measured)
        assert costs.layer("block", tp=tp, **HERE).confidence == confidence
        keeps = attention in ("unfused", "fused-softmax") and layers is not None
        assert costs.keeps_scores("A100-40") == keeps
        saved = {
            runs: self.costs(measured, runtime=dataclasses.replace(HETERO, implementation=runs)).saved_bytes(
                "block", costs.microbatch(tp=tp, micro_batch_size=1), device="A100-40"
            )
            for runs in (HETERO_LAYERS, UNFUSED)
        }
        assert (saved[HETERO_LAYERS] == saved[UNFUSED]) == keeps

    def test_a_run_that_asks_for_scores_has_them(self) -> None:
        measured = self.measured(
            implementation=dataclasses.replace(HETERO_LAYERS, attention="cudnn"), layers="transformer_engine"
        )
        runtime = dataclasses.replace(HETERO, implementation=UNFUSED)
        costs = self.costs(measured, runtime=runtime)
        assert costs.keeps_scores("A100-40")
        assert costs.layer("block", tp=1, **HERE).confidence == Confidence.ESTIMATED

    def test_dropout_is_more(self) -> None:
        with_dropout = dataclasses.replace(HETERO, implementation=FLASH_WITH_DROPOUT)
        without, more = (
            self.costs(self.measured(implementation=HETERO_LAYERS), runtime=runtime).layer("block", tp=1, **HERE)
            for runtime in (HETERO, with_dropout)
        )
        assert more.forward_s > without.forward_s == 1.0
        assert (without.confidence, more.confidence) == (Confidence.MEASURED, Confidence.ESTIMATED)

    def test_halves_of_what_was_scaled_add_up_to_it(self) -> None:
        costs = self.costs(self.measured())
        block, attention, mlp = (costs.layer(kind, tp=2, **HERE) for kind in ("block", "attention", "mlp"))
        assert attention.forward_s + mlp.forward_s == pytest.approx(block.forward_s)
        assert attention.backward_s + mlp.backward_s == pytest.approx(block.backward_s)

    def on_links(self, measured: Profile, gb_per_s: float | None) -> CostModel:
        cluster = {"A100-40": links(gb_per_s)} if gb_per_s is not None else {}
        store = ProfileStore([measured], all_reduce=cluster)
        return CostModel(model=LARGE, seq_length=2048, precision="fp32", profiles=store)

    def test_links_of_the_cluster_replace_those_of_the_profile(self) -> None:
        measured = self.measured(implementation=HETERO_LAYERS, all_reduce=links(1.0))
        cost = self.on_links(measured, 100.0).layer("block", tp=2, **HERE)
        here = dataclasses.replace(
            measured_config(measured, "block", tp=2, micro_batch_size=1), all_reduce=links(100.0)
        )
        assert cost.forward_s == pytest.approx(0.5 * self.ratio(measured, "forward", here))
        assert cost.forward_s < 0.5
        assert cost.confidence == Confidence.ESTIMATED
        slower = self.on_links(measured, 0.1).layer("block", tp=2, **HERE)
        assert slower.forward_s > 0.5 < slower.backward_s / 2

    @pytest.mark.parametrize("gb_per_s", [None, 1.0])
    def test_the_same_links_or_none_that_are_known_leave_it_measured(self, gb_per_s: float | None) -> None:
        measured = self.measured(implementation=HETERO_LAYERS, all_reduce=links(1.0))
        cost = self.on_links(measured, gb_per_s).layer("block", tp=2, **HERE)
        assert (cost.forward_s, cost.confidence) == (0.5, Confidence.MEASURED)

    def test_a_profile_that_says_nothing_of_links_is_taken_as_it_is(self) -> None:
        measured = self.measured(implementation=HETERO_LAYERS)
        cost = self.on_links(measured, 0.1).layer("block", tp=2, **HERE)
        assert (cost.forward_s, cost.confidence) == (0.5, Confidence.MEASURED)

    def test_a_sequence_that_is_split_takes_less_in_norms_and_sums(self) -> None:
        costs = self.costs(self.measured(implementation=HETERO_LAYERS))
        whole, cut = (costs.layer("block", tp=2, **HERE, sequence_parallel=each) for each in (False, True))
        assert cut.forward_s < whole.forward_s == 0.5
        assert cut.confidence == Confidence.ESTIMATED
        assert costs.layer("block", tp=1, **HERE, sequence_parallel=True) == costs.layer("block", tp=1, **HERE)


class TestGradientSums:
    """Of layers of 4096 in fp32, each profile with other sums than the runtime or the same."""

    ON = LayerPlacement("A100-40", tp=1, micro_batch_size=1)

    def costs(self, profiled: GradientSums | None, runs: GradientSums | None, **changes: Any) -> LayerTimes:
        measured = profile(
            LARGE,
            **{
                "seq_length": 2048,
                "implementation": dataclasses.replace(HETERO_LAYERS, gradient_sums=profiled),
                "ends_s": (0.25, 0.5),
                **changes,
            },
        )
        return LayerTimes(
            measured.shape,
            seq_length=2048,
            precision="fp32",
            references=ReferenceProfiles(
                ProfileStore([measured]), precision="fp32", arithmetic=None, data_sheets=False
            ),
            implementation=dataclasses.replace(HETERO_LAYERS, gradient_sums=runs),
        )

    def test_a_profile_with_the_passes_is_faster_where_products_add_and_the_other_way_round(self) -> None:
        measured, fused, separate = (
            self.costs(*sums).of("block", self.ON)
            for sums in (("separate", "separate"), ("separate", "fused"), ("fused", "separate"))
        )
        assert measured.confidence == Confidence.MEASURED
        assert fused.backward_s < measured.backward_s < separate.backward_s
        assert fused.forward_s == measured.forward_s == separate.forward_s
        assert fused.confidence == separate.confidence == Confidence.ESTIMATED

    def test_the_embedding_has_the_pass_whoever_adds_in_blocks(self) -> None:
        pairs: list[tuple[GradientSums, GradientSums]] = [
            ("separate", "fused_in_blocks"),
            ("fused_in_blocks", "separate"),
        ]
        costs = [self.costs(*sums).of("embedding", self.ON) for sums in pairs]
        assert {cost.backward_s for cost in costs} == {0.5}

    @pytest.mark.parametrize("runs", ["separate", "fused"])
    def test_a_profile_that_does_not_say_is_taken_as_it_is(self, runs: GradientSums) -> None:
        cost = self.costs(None, runs).of("block", self.ON)
        assert (cost.backward_s, cost.confidence) == (2.0, Confidence.MEASURED)

    def test_an_embedding_whose_backward_was_not_timed_has_its_gradient(self) -> None:
        """As in the published profiles, which say 0."""
        without = self.costs(None, None, ends_s=(0.25, 0.0)).of("embedding", self.ON)
        assert (without.forward_s, without.backward_s, without.confidence) == (0.25, 0.0, Confidence.MEASURED)
        found = self.costs(None, "fused", ends_s=(0.25, 0.0)).of("embedding", self.ON)
        assert found.forward_s == 0.25
        assert found.backward_s > 0.0
        assert found.confidence == Confidence.ESTIMATED

    def test_what_a_split_backward_leaves_for_later_contains_the_passes(self) -> None:
        separate, fused = (
            self.costs(sums, sums).weight_gradients_s("block", on=self.ON) for sums in ("separate", "fused")
        )
        assert separate > fused

    def test_the_host_adds_as_its_profile_says(self) -> None:
        """It has no product of half precision that adds to fp32, whatever the runtime does elsewhere."""
        on = LayerPlacement("cpu", tp=1, micro_batch_size=1)
        cost = self.costs("separate", "fused", device="cpu").of("block", on)
        assert (cost.backward_s, cost.confidence) == (2.0, Confidence.MEASURED)

    def test_the_host_adds_in_passes_where_the_launch_says_so(self) -> None:
        on = LayerPlacement("cpu", tp=1, micro_batch_size=1)
        assert self.costs("fused", "separate", device="cpu").of("block", on).backward_s > 2.0


class TestOwnProfile:
    """A profile as ``hetero profile run`` writes it, of one device alone: halves, recomputation, split backwards."""

    WHERE: ClassVar[Any] = {"tp": 1, "micro_batch_size": 1}
    MEASURED = profile(
        MODEL,
        device="cpu",
        tps=(1, 2),
        micro_batch_sizes=(1, 2),
        recomputed=(
            RecomputedTime(recompute="full", forward_s=1.0, backward_s=3.5, **WHERE),
            RecomputedTime(recompute="selective", forward_s=1.0, backward_s=2.25, **WHERE),
        ),
        split_backwards=(SplitBackwardTime(input_gradients_s=1.5, weight_gradients_s=1.0, **WHERE),),
        tp_collectives_included=False,
    )
    HALVES_ALONE = (
        LayerTime(kind="attention", forward_s=0.9, backward_s=1.0, **WHERE),
        LayerTime(kind="mlp", forward_s=0.3, backward_s=1.5, **WHERE),
    )
    ON = LayerPlacement("cpu", tp=1, micro_batch_size=1)

    def costs(self, *, all_reduce: Mapping[str, tuple[GroupLink, ...]] | None = None, **overrides: Any) -> LayerTimes:
        made = dataclasses.replace(self.MEASURED, **overrides)
        store = ProfileStore([made], all_reduce=all_reduce)
        return LayerTimes(
            made.shape,
            seq_length=made.seq_length,
            precision="fp32",
            references=ReferenceProfiles(store, precision="fp32", arithmetic=None, data_sheets=False),
            implementation=HETERO_LAYERS,
        )

    def test_halves_have_the_proportion_that_they_had_alone_and_add_up_to_the_block(self) -> None:
        costs = self.costs(times=(*self.MEASURED.times, *self.HALVES_ALONE))
        attention, mlp = (costs.of(half, self.ON) for half in HALVES)
        assert (attention.forward_s, mlp.forward_s) == pytest.approx((0.75, 0.25))
        assert (attention.backward_s, mlp.backward_s) == pytest.approx((0.8, 1.2))
        assert attention.confidence == mlp.confidence == Confidence.MEASURED
        one_alone = self.costs(times=(*self.MEASURED.times, self.HALVES_ALONE[0]))
        assert one_alone.of("mlp", self.ON).confidence == Confidence.ESTIMATED

    def test_recomputation_takes_what_was_measured_of_it(self) -> None:
        """As a share of the forward, also with microbatches that nobody recomputed."""
        costs, twice = self.costs(), self.ON._replace(micro_batch_size=2)
        for on, factor in ((self.ON, 1.0), (twice, 2.0)):
            for kind in ("block", "attention"):
                assert costs.recompute_s(kind, on=on, recompute="selective") == pytest.approx(0.25 * factor)
            assert costs.recompute_s("block", on=on, recompute="full") == pytest.approx(1.5 * factor)
            assert costs.recompute_s("mlp", on=on, recompute="selective") == 0.0
        estimated = self.costs(recomputed=())
        assert estimated.recompute_s("block", on=self.ON, recompute="full") == 1.0

    def test_a_split_backward_leaves_what_was_measured_to_the_weights(self) -> None:
        costs = self.costs()
        whole = costs.weight_gradients_s("block", on=self.ON)
        assert whole == pytest.approx(2.0 * 1.0 / 2.5)
        halves = sum(costs.weight_gradients_s(half, on=self.ON) for half in HALVES)
        assert halves == pytest.approx(whole)
        assert self.costs(split_backwards=()).weight_gradients_s("block", on=self.ON) != pytest.approx(whole)

    def test_collectives_that_were_not_measured_are_added_and_make_it_an_estimate(self) -> None:
        """A profile that says nothing of its links has them inside, or not at all: only the latter gets some."""
        links = {"cpu": (GroupLink(size=2, bus=Link(bandwidth_gb_per_s=0.001, latency_us=0.0)),)}
        on = self.ON._replace(tp=2)

        def seconds(included: bool) -> LayerCost:
            return self.costs(all_reduce=links, tp_collectives_included=included).of("block", on)

        assert (seconds(True).forward_s, seconds(True).confidence) == (0.5, Confidence.MEASURED)
        assert seconds(False).forward_s > 0.5
        assert seconds(False).confidence == Confidence.ESTIMATED
