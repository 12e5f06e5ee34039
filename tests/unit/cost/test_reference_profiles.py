"""Which profiles an estimate is made from, and what stands in where there are none."""

import dataclasses
import math
from typing import Any

import pytest

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.reference_profiles import UPDATE_BYTES, ReferenceProfiles
from hetero.errors import ConfigError
from hetero.plan.ir import Precision
from hetero.spec.devices import DeviceType
from hetero.spec.profile import LayerMemory, LayerTime, Profile, ProfileStore, UpdateTime
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GB
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import profile

MODEL = gpt2_model()


def references(
    *profiles: Profile, precision: Precision = "fp32", data_sheets: bool = False, **arguments: Any
) -> ReferenceProfiles:
    return ReferenceProfiles(
        ProfileStore(profiles), precision=precision, arithmetic=None, data_sheets=data_sheets, **arguments
    )


def bound_by_launches(device: str, host_s: float) -> Profile:
    times = tuple(
        LayerTime(kind="block", tp=1, micro_batch_size=size, forward_s=seconds, backward_s=seconds)
        for size, seconds in ((1, host_s), (2, host_s), (4, 2 * host_s))
    )
    return profile(MODEL, device=device, times=times, updates=())


@pytest.mark.parametrize(
    ("device", "confidence"),
    [
        ("A100-40", Confidence.ESTIMATED),
        ("GH200", Confidence.ESTIMATED),
        ("V100-16", Confidence.DATA_SHEET),
        ("RTX-3090", Confidence.DATA_SHEET),
    ],
)
def test_an_arithmetic_that_nobody_profiled_takes_what_was_published(device: str, confidence: Confidence) -> None:
    """Of this device, or of similar ones; and the launches that its own profiles show, since its host is the same."""
    found, basis = references(bound_by_launches(device, 0.5e-3), precision="fp16").throughput(
        device, "block", "forward"
    )
    assert (found.linear, found.attention, found.rows, found.collectives) == (1.0, 1.0, 1.0, 1.0)
    assert (found.host_s, basis) == (0.5e-3, confidence)


def test_the_host_of_another_device_is_not_its_own() -> None:
    found, basis = references(bound_by_launches("A100-40", 0.5e-3), precision="fp16", data_sheets=True).throughput(
        "H100", "block", "forward"
    )
    assert (found.host_s, basis) == (None, Confidence.ESTIMATED)


def test_in_its_own_arithmetic_a_device_takes_what_was_measured_on_it() -> None:
    found, basis = references(profile(MODEL)).throughput("A100-40", "block", "forward")
    assert found.linear > 100, "seconds for a few thousand tokens and weights"
    assert basis == Confidence.ESTIMATED


def test_another_device_takes_the_multiples_of_the_nearest_generation() -> None:
    """V100's, not A100's, for a T4; with the kernels of its own data sheet."""
    slow, fast = (
        profile(MODEL, device=device, block_s=(seconds, seconds))
        for device, seconds in (("V100-16", 4.0), ("A100-40", 1.0))
    )
    asked = references(fast, slow, data_sheets=True)
    ours, basis = asked.throughput("T4", "block", "forward")
    theirs, _ = asked.throughput("V100-16", "block", "forward")
    assert basis == Confidence.DATA_SHEET
    assert dataclasses.replace(ours, kernels=theirs.kernels) == theirs
    bytes_s = [each.kernels.moved_s(1e9) for each in (ours, theirs)]
    figures = [SHIPPED_DEVICES.of(name).data_sheet for name in ("T4", "V100-16")]
    assert figures[0] is not None
    assert figures[1] is not None
    assert bytes_s[0] / bytes_s[1] == pytest.approx(figures[1].memory_gb_per_s / figures[0].memory_gb_per_s)


def test_profiles_of_one_arithmetic_are_not_mixed_with_those_of_another() -> None:
    slow, fast = (
        profile(MODEL, name=arithmetic, arithmetic=arithmetic, block_s=(seconds, seconds))
        for arithmetic, seconds in (("fp32", 8.0), ("tf32", 1.0))
    )
    (both, _), (alone, _) = (
        references(*measured).throughput("A100-40", "block", "forward") for measured in ((slow, fast), (slow,))
    )
    assert (both.linear, both.rows) == (alone.linear, alone.rows)


class TestUpdates:
    def measured(self, *seconds: float, precision: Precision = "fp32") -> list[Profile]:
        """Blocks of 1000 parameters."""
        memory = LayerMemory(kind="block", tp=1, parameters=1000, saved_bytes=0, output_bytes=0)
        return [
            profile(
                MODEL,
                name=f"model {i}",
                precision=precision,
                updates=(UpdateTime(kind="block", tp=1, update_s=each),),
                memory=(memory,),
            )
            for i, each in enumerate(seconds)
        ]

    def test_the_median_of_the_measured(self) -> None:
        found = references(*self.measured(1e-6, 9e-6, 2e-6)).update_s_per_parameter("A100-40")
        assert found == (pytest.approx(2e-9), Confidence.ESTIMATED)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    def test_else_the_bytes_that_it_moves(self, precision: Precision) -> None:
        seconds, basis = references(profile(MODEL), precision=precision).update_s_per_parameter("A100-40")
        assert seconds == pytest.approx(UPDATE_BYTES[precision] / (1555 * GB))
        assert basis == Confidence.DATA_SHEET

    def test_an_update_in_fp32_says_nothing_of_one_with_master_weights(self) -> None:
        asked = references(*self.measured(1e-6), precision="bf16")
        assert asked.update_s_per_parameter("A100-40")[1] == Confidence.DATA_SHEET

    def test_a_profile_without_updates_of_a_device_without_a_data_sheet(self) -> None:
        bare = DeviceType(name="bare", memory_gib=24)
        store = ProfileStore([profile(MODEL, device="bare", updates=())], device_types=SHIPPED_DEVICES.plus([bare]))
        asked = ReferenceProfiles(store, precision="fp32", arithmetic=None, data_sheets=False)
        with pytest.raises(
            ConfigError, match="profiles do not tell its update of a block in fp32; profile that, or give"
        ):
            asked.update_s_per_parameter("bare")

    def test_half_precision_is_counted(self) -> None:
        """A fused Adam 28 bytes, norm and clipping 12, the half-precision copy 6; at 3/4 of the bandwidth."""
        assert UPDATE_BYTES["bf16"] == UPDATE_BYTES["fp16"] == math.floor((28 + 12 + 6) / 0.75)
