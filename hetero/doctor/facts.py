"""What a rank knows of its host: versions, devices, limits, networks, variables. Plain data, which needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pydantic import ConfigDict

from hetero.distributed.cudnn_library import CudnnVersions
from hetero.doctor.installed_files import OldCopy
from hetero.doctor.requirements import UnmetRequirement
from hetero.installed_versions import InstalledVersions, combination_of
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """What CUDA says of a device.

    numa_node: of the memory that is near it; ``None`` where the host does not say.
    pci_address: as the kernel writes it, such as ``0000:07:00.0``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    compute_capability: tuple[int, int]
    memory_bytes: int
    numa_node: int | None = None
    pci_address: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts:
    """What the installed torch is built for.

    cuda: CUDA's version, ``None`` of a build without it.
    architectures: as ``torch.cuda.get_arch_list`` has them: ``sm_80``, or ``compute_120`` for what the driver compiles.
    nccl: of the library that is loaded, which need not be the one that torch was compiled with.
    gpus: by their CUDA ordinal.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    version: str
    cuda: str | None = None
    cudnn: CudnnVersions | None = None
    architectures: tuple[str, ...] = ()
    nccl: str | None = None
    gpus: tuple[GpuFacts, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """A network interface that is up, but for the loopback.

    speed_mbit_per_s: ``None`` where the driver does not say, as of bridges and in containers.
    is_physical: there is a device behind it; bridges, tunnels and the ends of containers have none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    address: str | None
    speed_mbit_per_s: int | None = None
    is_physical: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class InfinibandPort:
    """A port of a device that speaks RDMA, InfiniBand or RoCE, as the kernel lists it."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    device: str
    port: int
    state: str
    rate: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a rank knows of the host that it runs on.

    address: what the host's own name resolves to.
    torch_error: why torch cannot be imported although it is installed.
    driver: of the NVIDIA kernel module; ``driver_cuda`` is the newest CUDA that it runs.
    packages: versions by distribution, of those that matter and are installed.
    modules: of those that matter, which can be imported.
    unmet: requirements of installed packages that others do not meet.
    old_copies: of megatron-hetero, from before its harness moved.
    changed_files: of megatron-core, missing or not as its wheel brought them.
    environment: the variables that CUDA, NCCL, torch and torchrun read.
    locked_memory_bytes: most that a process may pin, ``None`` without a limit; ``open_files`` likewise.
    shared_memory_bytes: size of /dev/shm, ``None`` if there is none.
    store_addresses: on which something listens at MASTER_PORT here: the launch's store, on the host that has it.
    numa_nodes: of the host; ``cpus`` are those that this process may run on, of ``all_cpus``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    host: str
    os: str
    python: str
    address: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    torch: TorchFacts | None = None
    torch_error: AnyText | None = None
    packages: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    unmet: tuple[UnmetRequirement, ...] = ()
    old_copies: tuple[OldCopy, ...] = ()
    changed_files: tuple[AnyText, ...] = ()
    environment: Mapping[str, AnyText] = field(default_factory=dict)
    locked_memory_bytes: int | None = None
    open_files: int | None = None
    shared_memory_bytes: int | None = None
    numa_nodes: int = 1
    cpus: int = 1
    all_cpus: int = 1
    interfaces: tuple[NetworkInterface, ...] = ()
    infiniband: tuple[InfinibandPort, ...] = ()
    store_addresses: tuple[str, ...] = ()

    @property
    def gpus(self) -> tuple[GpuFacts, ...]:
        """Those that torch sees."""
        return self.torch.gpus if self.torch is not None else ()

    @property
    def installed(self) -> InstalledVersions | None:
        """The combination of versions that has to fit together; ``None`` without torch or megatron-core."""
        packages = dict(self.packages)
        if self.torch is not None:
            packages["torch"] = self.torch.version
        return combination_of(self.python, packages)

    @property
    def has_nvidia(self) -> bool:
        """There is a driver for GPUs, or torch sees some."""
        return self.driver is not None or bool(self.gpus)

    @property
    def num_hosts(self) -> int:
        """Of this launch, if they have equally many ranks; 1 without a launcher."""
        world, here = (self.environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return max(1, int(world) // max(1, int(here))) if world.isdecimal() and here.isdecimal() else 1
