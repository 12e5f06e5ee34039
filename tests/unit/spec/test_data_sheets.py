"""Peak figures: complete, with a source, and in the order that physics has them."""

import pytest

from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES

GPUS = [device for device in SHIPPED_DEVICES if device.name != "cpu"]


def sheet_of(device: DeviceType) -> DataSheet:
    assert device.data_sheet is not None
    return device.data_sheet


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_every_gpu_has_one(device: DeviceType) -> None:
    """Which formats it states is checked with every device type: those that its compute capability has."""
    sheet = sheet_of(device)
    assert sheet.source
    assert 300 <= sheet.memory_gb_per_s <= 8000
    assert sheet.fp64_tflops is None or sheet.fp64_tflops <= sheet.fp32_tflops
    assert sheet.fp32_tflops < sheet.fp16_tflops
    assert sheet.bf16_tflops in (None, sheet.fp16_tflops)
    if sheet.tf32_tflops is not None:
        assert sheet.fp32_tflops <= sheet.tf32_tflops <= sheet.fp16_tflops
    if sheet.fp8_tflops is not None:
        assert sheet.fp8_speedup == pytest.approx(2, rel=0.03)


def test_the_host_has_none() -> None:
    assert SHIPPED_DEVICES.of("cpu").data_sheet is None


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("A100-40", "tf32", 156),
        ("A100-40", "fp32", 19.5),
        ("A100-40", "bf16", 312),
        ("V100-16", "tf32", 15.7),  # it has none, and multiplies fp32 in fp32
        ("V100-16", "fp16", 125),
        ("H100", "fp64", 34),
        ("H100", "fp8", 1979),
    ],
)
def test_peaks(name: str, arithmetic: str, tera: float) -> None:
    assert sheet_of(SHIPPED_DEVICES.of(name)).flops_per_s(arithmetic) == pytest.approx(tera * 1e12)


def test_the_same_chip_has_the_same_peaks_whatever_its_memory() -> None:
    for a, b in (("V100-16", "V100-32"), ("A100-40", "A100-80"), ("H100", "H200")):
        first, second = sheet_of(SHIPPED_DEVICES.of(a)), sheet_of(SHIPPED_DEVICES.of(b))
        for arithmetic in ("fp32", "tf32", "fp16"):
            assert first.flops_per_s(arithmetic) == second.flops_per_s(arithmetic)
