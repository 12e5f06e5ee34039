"""Device types with what runs on them and the figures of their data sheets."""

from collections.abc import Iterable

from rich.table import Table

from hetero.report.tables.fitting_table import FittingTable
from hetero.spec.devices import DeviceType

FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


def devices_table(devices: Iterable[DeviceType]) -> Table:
    """One row per device type; what its data sheet has not, or nobody looked up, is left out."""
    table = FittingTable(title="Device types; peaks are dense, in TFLOP/s")
    table.add_column("device", no_wrap=True)
    for header in ("GiB", "CUDA", "memory\nGB/s", "NVLink\nGB/s", *FORMATS):
        table.add_column(header, justify="right")
    table.add_column("Trans-\nformer\nEngine")
    for device in devices:
        sheet = device.data_sheet
        figures: list[float | None] = [None] * (2 + len(FORMATS))
        if sheet is not None:
            figures = [sheet.memory_gb_per_s, sheet.nvlink_gb_per_s, *(getattr(sheet, f"{f}_tflops") for f in FORMATS)]
        table.add_row(
            device.name,
            _shown(device.memory_gib),
            "" if device.compute_capability is None else "{}.{}".format(*device.compute_capability),
            *map(_shown, figures),
            "with fp8" if device.has_fp8 else "yes" if device.has_transformer_engine else "",
        )
    return table


def source_lines(devices: Iterable[DeviceType]) -> list[str]:
    """Whose figures they are: ``A100-40, A100-80: NVIDIA A100 data sheet, SXM``."""
    names: dict[str, list[str]] = {}
    for device in devices:
        if device.data_sheet is not None:
            names.setdefault(device.data_sheet.source, []).append(device.name)
    return [f"{', '.join(of)}: {source}" for source, of in names.items()]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
