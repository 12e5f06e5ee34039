"""Peak figures: complete, with a source, and in the order that physics has them."""

import pytest

from hetero.spec.devices import DEVICE_TYPES, DeviceType, device_type
from tests.helpers.data_sheets import check_data_sheet, sheet_of

GPUS = [device for device in DEVICE_TYPES.values() if device.compute_capability is not None]


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.name)
def test_every_gpu_has_one(device: DeviceType) -> None:
    check_data_sheet(device)


def test_the_host_has_none() -> None:
    assert device_type("cpu").data_sheet is None


@pytest.mark.parametrize(
    ("name", "arithmetic", "tera"),
    [
        ("A100-40", "tf32", 156),
        ("A100-40", "fp32", 19.5),
        ("A100-40", "bf16", 312),
        ("V100-16", "tf32", 15.7),  # it has none, and multiplies fp32 in fp32
        ("V100-16", "fp16", 125),
        ("H100", "fp64", 34),
    ],
)
def test_peaks(name: str, arithmetic: str, tera: float) -> None:
    assert sheet_of(device_type(name)).flops_per_s(arithmetic) == pytest.approx(tera * 1e12)


def test_the_same_chip_has_the_same_peaks_whatever_its_memory() -> None:
    for a, b in (("V100-16", "V100-32"), ("H100", "H200")):
        first, second = sheet_of(device_type(a)), sheet_of(device_type(b))
        assert (first.fp32, first.tf32, first.half) == (second.fp32, second.tf32, second.half)
