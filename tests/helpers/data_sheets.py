"""What holds for the data sheet of every GPU."""

import pytest

from hetero.spec.devices import DataSheet, DeviceType


def sheet_of(device: DeviceType) -> DataSheet:
    assert device.data_sheet is not None
    return device.data_sheet


def check_data_sheet(device: DeviceType) -> None:
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
