"""What holds for the data sheet of every GPU."""

from hetero.spec.devices import DataSheet, DeviceType


def sheet_of(device: DeviceType) -> DataSheet:
    assert device.data_sheet is not None
    return device.data_sheet


def check_data_sheet(device: DeviceType) -> None:
    sheet = sheet_of(device)
    assert sheet.source
    assert 300 <= sheet.memory_gb_per_s <= 4800
    assert sheet.fp64 <= sheet.fp32 < sheet.half
    assert device.compute_capability is not None
    assert (sheet.tf32 is not None) == (device.compute_capability >= (8, 0)), "TF32 begins with Ampere"
