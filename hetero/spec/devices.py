"""Device types by name: what a plan may ask of them.

Figures are the vendors' data sheets. They serve validation only; speed comes from profiles, never from here.
"""

import re
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.serialization import near_match


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """One kind of accelerator.

    memory_gib: nominal capacity; ``None`` for the host CPU, whose memory is not the device's own.
    compute_capability: CUDA's (major, minor); bf16, TransformerEngine and FlashAttention-2 begin at (8, 0).
    cuda_name: pattern that ``torch.cuda.get_device_name()`` matches, case-insensitive.
    """

    name: str
    memory_gib: int | None
    compute_capability: tuple[int, int] | None
    cuda_name: str | None

    @property
    def precisions(self) -> tuple[str, ...]:
        """Training precisions that run on the device's own units, not emulated."""
        if self.compute_capability is None:
            return ("fp64", "fp32", "bf16", "fp16")
        return ("fp64", "fp32", "fp16") + (("bf16",) if self.compute_capability >= (8, 0) else ())

    @property
    def has_transformer_engine(self) -> bool:
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


def _gpu(name: str, memory_gib: int, capability: tuple[int, int], cuda_name: str) -> DeviceType:
    return DeviceType(name=name, memory_gib=memory_gib, compute_capability=capability, cuda_name=cuda_name)


_CATALOGUE = (
    DeviceType(name="cpu", memory_gib=None, compute_capability=None, cuda_name=None),
    _gpu("V100-16", 16, (7, 0), r"V100.*16GB"),
    _gpu("V100-32", 32, (7, 0), r"V100.*32GB"),
    _gpu("T4", 16, (7, 5), r"\bT4\b"),
    _gpu("RTX-2080Ti", 11, (7, 5), r"RTX 2080 Ti"),
    _gpu("Titan-RTX", 24, (7, 5), r"TITAN RTX"),
    _gpu("A100-40", 40, (8, 0), r"A100.*40GB"),
    _gpu("A100-80", 80, (8, 0), r"A100.*80GB"),
    _gpu("A800", 80, (8, 0), r"A800"),
    _gpu("A10G", 24, (8, 6), r"A10G"),
    _gpu("A40", 48, (8, 6), r"\bA40\b"),
    _gpu("RTX-3090", 24, (8, 6), r"RTX 3090"),
    _gpu("RTX-4090", 24, (8, 9), r"RTX 4090"),
    _gpu("L4", 24, (8, 9), r"\bL4\b"),
    _gpu("L40S", 48, (8, 9), r"L40S"),
    _gpu("H100", 80, (9, 0), r"H100"),
    _gpu("H800", 80, (9, 0), r"H800"),
    _gpu("H20", 96, (9, 0), r"\bH20\b"),
    _gpu("H200", 141, (9, 0), r"\bH200\b"),
    _gpu("GH200", 96, (9, 0), r"GH200"),
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
    """The device type whose CUDA device name is ``cuda_name``, such as ``NVIDIA A100-SXM4-40GB``."""
    for device in _CATALOGUE:
        if device.cuda_name is not None and re.search(device.cuda_name, cuda_name, re.IGNORECASE):
            return device
    return None
