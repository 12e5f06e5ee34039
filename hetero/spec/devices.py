"""Describes a type of device: memory, what it can compute, and the peak figures of its data sheet.

Common ones ship (:mod:`.shipped_devices`); a cluster file describes others under ``devices``, from their data sheets:

    devices:
      - name: RTX-A4000
        memory_gib: 16
        compute_capability: [8, 6]
        cuda_name: "NVIDIA RTX A4000"
        data_sheet: {memory_gb_per_s: 448, fp32_tflops: 19.2, tf32_tflops: 38.4, bf16_tflops: 76.7, fp16_tflops: 76.7,
                     source: NVIDIA RTX A4000 data sheet}

A plan carries the descriptions of its devices that do not ship, so that a name means the same wherever the plan goes.

Memory, precisions and names serve validation. Peak figures never price a layer that somebody has measured, as real
layers reach between a tenth and nine tenths of them. They only serve estimates, which are marked as such.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT, near_match
from hetero.units import GIB, TERA

AMPERE, ADA = (8, 0), (8, 9)
"""Compute capabilities: bf16, TF32, TransformerEngine and FlashAttention-2 begin with Ampere, fp8 with Ada."""


def is_short_of_memory(memory_bytes: int, nominal_gib: int) -> bool:
    """Whether a device that shows so much memory is hardly a whole one of ``nominal_gib``.

    Error correction takes up to a tenth of GDDR memory; who has less sits on a part of a device (MIG), or on another.
    """
    return memory_bytes < 0.9 * nominal_gib * GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSheet:
    """Peak figures of a device as its vendor states them: dense, without sparsity, 16-bit products summed in fp32.

    memory_gb_per_s: 10^9 bytes per second of the device's own memory.
    fp32_tflops, fp16_tflops and the like: 10^12 floating-point operations per second of matrix products, by tensor
        cores if there are such for the format, fp64 excepted. ``None`` where the device has not the format, or, of
        fp64, where nobody looked.
    nvlink_gb_per_s: to all devices of the node together, both directions added up, as data sheets have it; ``None``
        without NVLink or the like. Nothing is computed from it: what two devices reach is for the links of the cluster.
    multiprocessors: CUDA's streaming multiprocessors, into whose number the tiles of a product are rounded up; ``None``
        if nobody looked, or without CUDA.
    source: the document that states them.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    memory_gb_per_s: float
    fp64_tflops: float | None = None
    fp32_tflops: float
    tf32_tflops: float | None = None
    bf16_tflops: float | None = None
    fp16_tflops: float
    fp8_tflops: float | None = None
    nvlink_gb_per_s: float | None = None
    multiprocessors: int | None = None
    source: AnyText

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not 0 < value < math.inf:
                raise ConfigError(f"data sheet: {field.name} is {value}, must be above 0; leave out what there is not")

    def flops_per_s(self, arithmetic: str) -> float:
        """Peak rate of matrix products in ``arithmetic``, operations per second; fp32's where there is no TF32.

        Raises:
            ConfigError: the sheet has no such figure.
        """
        tflops = getattr(self, f"{arithmetic}_tflops")
        if tflops is None and arithmetic == "tf32":
            tflops = self.fp32_tflops
        if tflops is None:
            raise ConfigError(
                f"data sheet ({self.source}): it has no {arithmetic}_tflops; add it, or profile the device"
            )
        return float(tflops) * TERA

    @property
    def fp8_speedup(self) -> float:
        """How many times as fast as in bf16 products in fp8 are, at the peak.

        Raises:
            ConfigError: the sheet lacks one of the two.
        """
        return self.flops_per_s("fp8") / self.flops_per_s("bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """A type of accelerator, such as A100-40.

    memory_gib: nominal capacity; ``None`` for the host CPU, whose memory is not the device's own.
    compute_capability: CUDA's (major, minor), which says what runs on it; ``None`` for the host CPU and for GPUs
        without CUDA, which can be planned for, and on which nothing of this has run.
    cuda_name: what ``torch.cuda.get_device_name()`` and ``nvidia-smi -L`` call it, upper or lower case, with ``*`` for
        any characters; ``None`` if any name is taken as long as the compute capability is right.
    data_sheet: ``None`` for the host CPU, and where nobody looked: then only profiles price it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    memory_gib: int | None = None
    compute_capability: tuple[int, int] | None = None
    cuda_name: str | None = None
    data_sheet: DataSheet | None = None

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.name:
            raise ConfigError("device: name is empty")
        if self.memory_gib is not None and self.memory_gib < 1:
            raise ConfigError(f"{where}: memory_gib is {self.memory_gib}, must be at least 1")
        if (sheet := self.data_sheet) is None or self.compute_capability is None:
            return
        said = "compute_capability {}.{}".format(*self.compute_capability)
        for begin, formats in ((AMPERE, ("tf32", "bf16")), (ADA, ("fp8",))):
            for each in formats:
                has = getattr(sheet, f"{each}_tflops") is not None
                if has and self.compute_capability < begin:
                    raise ConfigError(
                        f"{where}: its {said} has no {each}, but data_sheet states {each}_tflops; leave one out"
                    )
                if not has and self.compute_capability >= begin:
                    raise ConfigError(f"{where}: its {said} has {each}; state {each}_tflops in data_sheet")

    @property
    def is_host(self) -> bool:
        """It is the host CPU, whose memory is not the device's own."""
        return self.memory_gib is None

    @property
    def has_bf16(self) -> bool:
        """It multiplies bf16 natively; of a GPU without CUDA, if its data sheet says so."""
        if self.compute_capability is not None:
            return self.compute_capability >= AMPERE
        return self.data_sheet is None or self.data_sheet.bf16_tflops is not None

    @property
    def has_transformer_engine(self) -> bool:
        """TransformerEngine's layers run on it."""
        return self.compute_capability is not None and self.compute_capability >= AMPERE

    @property
    def has_fp8(self) -> bool:
        """TransformerEngine multiplies in fp8 on it (``check_fp8_support`` there)."""
        return self.compute_capability is not None and self.compute_capability >= ADA

    @property
    def precisions(self) -> tuple[str, ...]:
        """The training precisions that the device computes natively, the host CPU all of them."""
        if self.compute_capability is None and self.data_sheet is None:
            return ("fp64", "fp32", "bf16", "fp16")
        return ("fp64", "fp32", "fp16") + (("bf16",) if self.has_bf16 else ())

    def is_called(self, cuda_name: str) -> bool:
        """Whether ``cuda_name``, such as ``NVIDIA A100-SXM4-40GB``, is a name of this type."""
        return self.cuda_name is not None and fnmatch.fnmatchcase(cuda_name.lower(), self.cuda_name.lower())


class DeviceCatalogue:
    """Looks up device types by name. Immutable; :meth:`plus` makes a larger one."""

    def __init__(self, devices: Iterable[DeviceType]) -> None:
        self._devices = {device.name: device for device in devices}

    def __iter__(self) -> Iterator[DeviceType]:
        return iter(self._devices.values())

    def __contains__(self, name: str) -> bool:
        return name in self._devices

    def plus(self, devices: Iterable[DeviceType]) -> "DeviceCatalogue":
        """A catalogue of ``devices`` and these; of two of one name the former counts."""
        more = {device.name: device for device in devices}
        return DeviceCatalogue((more | {d.name: d for d in self if d.name not in more}).values()) if more else self

    def of(self, name: str) -> DeviceType:
        """The device type called ``name``.

        Raises:
            ConfigError: no such type; the message lists the near match or the known ones.
        """
        if name not in self._devices:
            hint = near_match(name, list(self._devices)) or f" (known: {', '.join(self._devices)})"
            raise ConfigError(
                f"unknown device type {name!r}{hint}; a cluster file describes others under devices, and "
                "`hetero devices` lists those that ship"
            )
        return self._devices[name]

    def called(self, cuda_name: str) -> DeviceType | None:
        """The device type of a CUDA device name such as ``NVIDIA A100-SXM4-40GB``, ``None`` if it is not known."""
        return next((device for device in self if device.is_called(cuda_name)), None)


def check_described_once(devices: Iterable[DeviceType]) -> None:
    """Raises if two of ``devices``, which one file describes, have one name.

    Raises:
        ConfigError: two have.
    """
    names = [device.name for device in devices]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ConfigError(f"devices: it describes {repeated[0]!r} more than once; keep one of them")
