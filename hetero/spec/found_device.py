"""Says which device type a device is that was found, from what CUDA says of it."""

import dataclasses
import glob
from dataclasses import dataclass

from hetero.errors import ConfigError
from hetero.spec.devices import DeviceCatalogue, DeviceType
from hetero.units import GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundDevice:
    """What a rank sits on.

    cuda_name: ``None`` on the host CPU.
    compute_capability: ``None`` there and on a GPU without CUDA.
    memory_bytes: of the device, ``None`` on the host CPU.
    """

    cuda_name: str | None = None
    compute_capability: tuple[int, int] | None = None
    memory_bytes: int | None = None

    def is_a(self, wanted: DeviceType) -> bool:
        """Whether it is of this type, by its name and its compute capability."""
        is_host_cpu = wanted.compute_capability is None and wanted.cuda_name is None
        if self.cuda_name is None or is_host_cpu:
            return self.cuda_name is None and is_host_cpu
        is_called = wanted.cuda_name is None or wanted.is_called(self.cuda_name)
        return is_called and self.compute_capability == wanted.compute_capability

    def type_called(self, name: str | None, known: DeviceCatalogue) -> DeviceType:
        """Its type, which is to be called ``name`` if that is given.

        Raises:
            ConfigError: a known type is called so, and it is none of those.
        """
        if name is None:
            return self.type_among(known)
        if name not in known:
            return dataclasses.replace(self.type_among(known), name=name, cuda_name=self._exact_name, data_sheet=None)
        if not self.is_a(known.of(name)):
            raise ConfigError(
                f"device type {name}: this is {self.cuda_name or 'a processor'}, which is none; give it a name of its "
                "own with --device-type, or none, or correct the cluster file"
            )
        return known.of(name)

    @property
    def _exact_name(self) -> str | None:
        return glob.escape(self.cuda_name) if self.cuda_name is not None else None

    def type_among(self, known: DeviceCatalogue) -> DeviceType:
        """Its type, by its name if one has that; of a GPU that nobody described, what CUDA says of it."""
        if found := [device for device in known if self.is_a(device)]:
            return min(found, key=lambda device: device.cuda_name is None)
        assert self.cuda_name is not None, "the host CPU is known"
        assert self.memory_bytes is not None, "a GPU has memory of its own"
        return DeviceType(
            name=self.cuda_name,
            memory_gib=max(1, round(self.memory_bytes / GIB)),
            compute_capability=self.compute_capability,
            cuda_name=self._exact_name,
        )
