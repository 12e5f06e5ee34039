"""Seconds of layers: measured where profiles reach, marked where they do not."""

import pytest

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.layer_times import interpolate
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.errors import ConfigError
from hetero.spec.profile import LayerMemory, LayerTime
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
