"""Seconds of single kernels: products in tiles and waves, attention without scores, bytes."""

import dataclasses
import math
from itertools import pairwise

import pytest

from hetero.cost.layers.kernels import (
    GENERATION_RATES,
    MEASURED_RATES,
    MEMORY_SHARE,
    OTHER_RATES,
    PROLOGUE,
    SIMT_SHARE,
    SUSTAINED,
    TF32_ACROSS,
    Kernels,
    achieved_rates,
)
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES

PEAK, BYTES_PER_S = 100e12, 1e12
SHEET = DataSheet(memory_gb_per_s=1000, fp32_tflops=10, fp16_tflops=100, multiprocessors=10, source="a test")
UNKNOWN = DeviceType(name="unheard-of", data_sheet=SHEET)
PRODUCTS_PER_S = PEAK * SUSTAINED * OTHER_RATES.products


def kernels(device: str, arithmetic: str) -> Kernels:
    sheet = SHIPPED_DEVICES.of(device).data_sheet
    assert sheet is not None
    return Kernels(SHIPPED_DEVICES.of(device), sheet, arithmetic=arithmetic)


def half_precision(**sheet: int | None) -> Kernels:
    return Kernels(UNKNOWN, dataclasses.replace(SHEET, **sheet), arithmetic="fp16")


class TestProducts:
    def test_one_case_by_hand(self) -> None:
        """On 10 multiprocessors 1536 x 1024 outputs are 12 x 4 tiles of 128 x 256, 5 waves of 10, the last not full.
        Tiles of 128 x 128 need 10 waves of half as much at 0.95 of the rate, and smaller ones even more."""
        seconds = half_precision().product_s(1536, 1024, 4096, element_bytes=2)
        assert seconds == pytest.approx(5 * 10 * 2 * 128 * 256 * (4096 + PROLOGUE) / PRODUCTS_PER_S)

    def test_small_tiles_where_large_ones_leave_multiprocessors_idle(self) -> None:
        """Of 128 x 256 outputs: 1 tile, 2, 4, or 8 of 64 x 64; one wave each."""
        seconds = half_precision().product_s(128, 256, 4096, element_bytes=2)
        assert seconds == pytest.approx(10 * 2 * 64 * 64 * (4096 + PROLOGUE) / (0.55 * PRODUCTS_PER_S))

    def test_one_more_row_may_need_another_wave_of_tiles(self) -> None:
        full, more = (half_precision().product_s(m, 256, 4096, element_bytes=2) for m in (1280, 1281))
        assert full == pytest.approx(10 * 2 * 128 * 256 * (4096 + PROLOGUE) / PRODUCTS_PER_S)
        assert more > 1.2 * full

    def test_a_batch_fills_the_multiprocessors_together(self) -> None:
        """5 products of 256 x 256: ten tiles, one wave, as long as one of 1280 x 256."""
        batch = half_precision().product_s(256, 256, 4096, element_bytes=2, batch=5)
        assert batch == half_precision().product_s(1280, 256, 4096, element_bytes=2)

    @pytest.mark.parametrize("device", ["A100-40", "V100-16", "cpu-like"])
    def test_more_of_anything_never_takes_less(self, device: str) -> None:
        priced = half_precision(multiprocessors=None) if device == "cpu-like" else kernels(device, "fp16")
        sizes = (1, 64, 100, 128, 300, 1024, 1100, 5000)
        for others in (64, 128, 1000, 4096):
            for seconds in (
                [priced.product_s(size, others, others, element_bytes=2) for size in sizes],
                [priced.product_s(others, size, others, element_bytes=2) for size in sizes],
                [priced.product_s(others, others, size, element_bytes=2) for size in sizes],
                [priced.product_s(others, others, others, element_bytes=2, batch=size) for size in sizes],
            ):
                assert all(less <= more for less, more in pairwise(seconds))

    def test_never_below_the_bytes_of_its_three_matrices(self) -> None:
        for m, n, k in ((1, 1, 1), (4096, 4096, 1), (1, 8192, 8192), (300, 5000, 64)):
            moved = 2 * (m * k + k * n + m * n)
            assert half_precision().product_s(m, n, k, element_bytes=2) >= moved / (BYTES_PER_S * MEMORY_SHARE)
        vector = half_precision(multiprocessors=None).product_s(1, 65536, 65536, element_bytes=2)
        assert vector == pytest.approx(2 * (65536**2 + 2 * 65536) / (BYTES_PER_S * MEMORY_SHARE), rel=1e-6)

    def test_without_multiprocessors_nothing_is_rounded_up(self) -> None:
        seconds = half_precision(multiprocessors=None).product_s(1537, 1025, 4096, element_bytes=2, batch=3)
        assert seconds == pytest.approx(2 * 3 * 1537 * 1025 * (4096 + PROLOGUE) / PRODUCTS_PER_S)


class TestRates:
    def test_fp32_without_tensor_cores_reaches_nearly_its_peak(self) -> None:
        """V100 has none for fp32, nor for TF32, which falls back to it; there are no waves to speak of. Of fp16 it
        reaches what its generation does."""
        shape = (128 * 80, 256, 4096)
        fp32, tf32, fp16 = (
            kernels("V100-16", arithmetic).product_s(*shape, element_bytes=2) for arithmetic in ("fp32", "tf32", "fp16")
        )
        sheet = SHIPPED_DEVICES.of("V100-16").data_sheet
        assert sheet is not None
        operations = 80 * 2 * 128 * 256 * (4096 + PROLOGUE)
        assert fp32 == tf32 == pytest.approx(2 * math.prod(shape) / (SIMT_SHARE * sheet.flops_per_s("fp32")))
        share = SUSTAINED * GENERATION_RATES[7].products
        assert fp16 == pytest.approx(operations / (share * sheet.flops_per_s("fp16")))

    def test_tf32_across_is_slower_on_hopper_alone(self) -> None:
        """wgmma takes TF32 operands rows by rows only; bf16 in any layout, as Ampere does both."""
        shape, slower = (4096, 4096, 4096), {}
        for device, arithmetic in (("GH200", "tf32"), ("GH200", "bf16"), ("A100-40", "tf32")):
            own = kernels(device, arithmetic)
            across, along = (own.product_s(*shape, element_bytes=4, across=each) for each in (True, False))
            slower[device, arithmetic] = across / along
        assert slower == {
            ("GH200", "tf32"): pytest.approx(1 / TF32_ACROSS),
            ("GH200", "bf16"): 1.0,
            ("A100-40", "tf32"): 1.0,
        }

    def test_measured_devices_say_who_measured(self) -> None:
        assert all(rates.source for rates in MEASURED_RATES.values())
        assert not any(rates.source for rates in (*GENERATION_RATES.values(), OTHER_RATES))
        assert set(MEASURED_RATES) <= {device.name for device in SHIPPED_DEVICES}

    @pytest.mark.parametrize("device", list(SHIPPED_DEVICES), ids=lambda device: device.name)
    def test_no_device_reaches_more_than_its_peak(self, device: DeviceType) -> None:
        rates = achieved_rates(device)
        for share in (rates.products, rates.flash_forward, rates.flash_backward):
            assert 0 < share < 1
        assert rates.flash_backward < rates.flash_forward < rates.products, "as in all of the published figures"

    def test_a_generation_to_come_reaches_what_the_latest_does(self) -> None:
        later = dataclasses.replace(UNKNOWN, compute_capability=(99, 0), data_sheet=None)
        assert achieved_rates(later) == GENERATION_RATES[max(GENERATION_RATES)]
        assert achieved_rates(UNKNOWN) == OTHER_RATES


def test_attention_without_scores_is_operations_at_its_own_rate() -> None:
    priced = half_precision()
    assert priced.flash_s(1e12, backward=False) == pytest.approx(1e12 / (PEAK * OTHER_RATES.flash_forward))
    assert priced.flash_s(1e12, backward=True) == pytest.approx(1e12 / (PEAK * OTHER_RATES.flash_backward))
