"""Lists the known device types, with memory, precisions and the peak figures of their data sheets.

Memory, precisions and names serve validation. Peak figures never price a layer that somebody has measured, as real
layers reach between a tenth and nine tenths of them. They only serve estimates, which are marked as such.
"""

import re
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.serialization import near_match
from hetero.units import TERA


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """Peak figures of a device as its vendor states them: without sparsity, 16-bit products summed in fp32.

    memory_gb_per_s: 10^9 bytes per second of the device's own memory.
    fp64, fp32, tf32, half: 10^12 floating-point operations per second; ``tf32`` is ``None`` before Ampere. ``half``
        is fp16, and bf16 where the device has it.
    source: the document that states them.
    """

    memory_gb_per_s: float
    fp64: float
    fp32: float
    tf32: float | None
    half: float
    source: str

    def flops_per_s(self, arithmetic: str) -> float:
        """Peak rate of matrix products in ``arithmetic``, operations per second; fp32's where there is no TF32."""
        rates = {
            "fp64": self.fp64,
            "fp32": self.fp32,
            "tf32": self.tf32 or self.fp32,
            "bf16": self.half,
            "fp16": self.half,
        }
        return rates[arithmetic] * TERA


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """A type of accelerator, such as A100-40.

    memory_gib: nominal capacity; ``None`` for the host CPU, whose memory is not the device's own.
    compute_capability: CUDA's (major, minor); bf16, TransformerEngine and FlashAttention-2 begin at (8, 0).
    cuda_name: pattern that ``torch.cuda.get_device_name()`` matches, case-insensitive.
    data_sheet: ``None`` for the host CPU.
    """

    name: str
    memory_gib: int | None
    compute_capability: tuple[int, int] | None
    cuda_name: str | None
    data_sheet: DataSheet | None = None

    @property
    def precisions(self) -> tuple[str, ...]:
        """The training precisions that the device computes natively."""
        if self.compute_capability is None:
            return ("fp64", "fp32", "bf16", "fp16")
        return ("fp64", "fp32", "fp16") + (("bf16",) if self.compute_capability >= (8, 0) else ())

    @property
    def has_transformer_engine(self) -> bool:
        """TransformerEngine's layers run on it."""
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


def _gpu(
    name: str,
    memory_gib: int,
    capability: tuple[int, int],
    cuda_name: str,
    memory_gb_per_s: float,
    tflops: tuple[float, float, float | None, float],
    source: str,
) -> DeviceType:
    """A GPU of the catalogue; ``tflops`` are in the order fp64, fp32, tf32, half."""
    fp64, fp32, tf32, half = tflops
    sheet = DataSheet(memory_gb_per_s=memory_gb_per_s, fp64=fp64, fp32=fp32, tf32=tf32, half=half, source=source)
    return DeviceType(
        name=name, memory_gib=memory_gib, compute_capability=capability, cuda_name=cuda_name, data_sheet=sheet
    )


_VOLTA = "NVIDIA V100 data sheet, SXM2"
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_A100 = "NVIDIA A100 data sheet, SXM"
_AMPERE = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_HOPPER = "NVIDIA H100 data sheet, SXM"

_CATALOGUE = (
    DeviceType(name="cpu", memory_gib=None, compute_capability=None, cuda_name=None),
    _gpu("V100-16", 16, (7, 0), r"V100.*16GB", 900, (7.8, 15.7, None, 125), _VOLTA),
    _gpu("V100-32", 32, (7, 0), r"V100.*32GB", 900, (7.8, 15.7, None, 125), _VOLTA),
    _gpu("T4", 16, (7, 5), r"\bT4\b", 320, (0.25, 8.1, None, 65), "NVIDIA T4 data sheet"),
    _gpu("RTX-2080Ti", 11, (7, 5), r"RTX 2080 Ti", 616, (0.42, 13.4, None, 53.8), _TURING),
    _gpu("Titan-RTX", 24, (7, 5), r"TITAN RTX", 672, (0.51, 16.3, None, 130.5), _TURING),
    _gpu("A100-40", 40, (8, 0), r"A100.*40GB", 1555, (9.7, 19.5, 156, 312), _A100),
    _gpu("A100-80", 80, (8, 0), r"A100.*80GB", 2039, (9.7, 19.5, 156, 312), _A100),
    _gpu("A800", 80, (8, 0), r"A800", 2039, (9.7, 19.5, 156, 312), "NVIDIA A800 data sheet, SXM"),
    _gpu("A10G", 24, (8, 6), r"A10G", 600, (0.49, 35, 35, 70), "NVIDIA A10G data sheet"),
    _gpu("A40", 48, (8, 6), r"\bA40\b", 696, (0.58, 37.4, 74.8, 149.7), "NVIDIA A40 data sheet"),
    _gpu("RTX-3090", 24, (8, 6), r"RTX 3090", 936, (0.56, 35.6, 35.6, 71), _AMPERE),
    _gpu("RTX-4090", 24, (8, 9), r"RTX 4090", 1008, (1.29, 82.6, 82.6, 165.2), _ADA),
    _gpu("L4", 24, (8, 9), r"\bL4\b", 300, (0.47, 30.3, 60, 121), "NVIDIA L4 data sheet"),
    _gpu("L40S", 48, (8, 9), r"L40S", 864, (1.43, 91.6, 183, 362), "NVIDIA L40S data sheet"),
    _gpu("H100", 80, (9, 0), r"H100", 3350, (34, 67, 494.5, 989.5), _HOPPER),
    _gpu("H800", 80, (9, 0), r"H800", 3350, (1, 67, 494.5, 989.5), "NVIDIA H800 data sheet, SXM"),
    _gpu("H20", 96, (9, 0), r"\bH20\b", 4000, (1, 44, 74, 148), "NVIDIA H20 data sheet"),
    _gpu("H200", 141, (9, 0), r"\bH200\b", 4800, (34, 67, 494.5, 989.5), "NVIDIA H200 data sheet, SXM"),
    _gpu("GH200", 96, (9, 0), r"GH200", 4000, (34, 67, 494, 990), "NVIDIA GH200 data sheet, 96 GB HBM3"),
)
DEVICE_TYPES = {device.name: device for device in _CATALOGUE}


def device_type(name: str) -> DeviceType:
    """The device type called ``name``.

    Raises:
        ConfigError: no such type; the message lists the near match or the known ones.
    """
    if name not in DEVICE_TYPES:
        hint = near_match(name, list(DEVICE_TYPES)) or f" (known: {', '.join(DEVICE_TYPES)})"
        raise ConfigError(f"unknown device type {name!r}{hint}")
    return DEVICE_TYPES[name]


def device_type_of_cuda_name(cuda_name: str) -> DeviceType | None:
    """The device type of a CUDA device name such as ``NVIDIA A100-SXM4-40GB``, ``None`` if it is not known."""
    for device in _CATALOGUE:
        if device.cuda_name is not None and re.search(device.cuda_name, cuda_name, re.IGNORECASE):
            return device
    return None
