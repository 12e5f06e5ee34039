"""Gathers the facts of a host from its kernel, its libraries and its installed packages."""

import ctypes
import fcntl
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from hetero.doctor.facts import HostFacts, InfinibandPort, NetworkInterface, TorchFacts
from hetero.doctor.installed_files import OWN, changed_files, old_copies
from hetero.doctor.requirements import unmet_requirements
from hetero.errors import ConfigError
from hetero.extras import is_installed
from hetero.installed_versions import versions_of
from hetero.serialization import read_text
from hetero.units import MIB
from hetero.version import VERSION

PACKAGES = (
    "megatron-core",
    "safetensors",
    "torch",
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
    "flash-attn",
    "flash-attn-3",
    "apex",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)
"""Distributions whose versions are reported and compared between hosts, in addition to this project's own."""

MODULES = ("apex", "fused_weight_gradient_mlp_cuda", "flash_attn", "flash_attn_3", "transformer_engine")
"""Modules that megatron-core imports if they are there."""

PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "NVTE_")
NAMES = (
    *("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that are told: those of the libraries, and those of the launcher."""

_MAX_KERNEL_BYTES = 2 * MIB
"""Of a file of /proc or /sys. The largest that is read lists processors with 2 kB each; of /proc/sys, Linux lets nobody
ask for 4 MiB at once."""

_SIOCGIFADDR, _SIOCGIFFLAGS = 0x8915, 0x8913
_IFF_UP, _IFF_LOOPBACK = 0x1, 0x8
"""Of Linux's ``netdevice(7)``."""

_TCP_LISTEN = "0A"
"""A state in ``/proc/net/tcp``, of ``proc(5)``."""


def host_facts(
    environment: Mapping[str, str], torch: TorchFacts | None, *, torch_error: str | None = None
) -> HostFacts:
    """What can be known of this host without a launch; what cannot be found out is left out.

    Args:
        torch: what :func:`hetero.doctor.torch_facts.torch_facts` tells, ``None`` where it is not installed.
        torch_error: why it cannot be imported.
    """
    return HostFacts(
        host=socket.gethostname(),
        os=f"{platform.system()} {platform.release()}, {_distribution()}",
        python=platform.python_version(),
        address=_own_address(),
        driver=_driver(),
        driver_cuda=_driver_cuda(),
        torch=torch,
        torch_error=torch_error,
        packages=versions_of(PACKAGES) | {OWN: VERSION},
        modules=tuple(name for name in MODULES if is_installed(name)),
        unmet=unmet_requirements(),
        old_copies=old_copies(environment),
        changed_files=changed_files(),
        environment={
            name: value for name, value in sorted(environment.items()) if name in NAMES or name.startswith(PREFIXES)
        },
        locked_memory_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        numa_nodes=len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1,
        cpus=len(os.sched_getaffinity(0)),
        all_cpus=os.cpu_count() or 1,
        interfaces=tuple(_interfaces()),
        infiniband=infiniband_ports(),
        store_addresses=listening_addresses(environment.get("MASTER_PORT", "")),
    )


def kernel_text(path: str | Path) -> str | None:
    """What the kernel has to say in a file of /proc or /sys, if anything."""
    try:
        return read_text(Path(path), limit_bytes=_MAX_KERNEL_BYTES).strip()
    except ConfigError:
        return None


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return "unknown distribution"


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _driver() -> str | None:
    found = re.search(r"Module\D*(\d+\.\d[\d.]*)", kernel_text("/proc/driver/nvidia/version") or "")
    return found[1] if found else None


def _driver_cuda() -> str | None:
    """The newest CUDA that the driver runs; it can be asked without a context on any device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _interfaces() -> Iterator[NetworkInterface]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                (flags,) = struct.unpack("H", fcntl.ioctl(asked, _SIOCGIFFLAGS, request)[16:18])
            except OSError:
                continue
            if not flags & _IFF_UP or flags & _IFF_LOOPBACK:
                continue
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
            except OSError:
                address = None
            folder = Path("/sys/class/net") / name
            speed = kernel_text(folder / "speed") or ""
            yield NetworkInterface(
                name=name,
                address=address,
                speed_mbit_per_s=int(speed) if speed.isdecimal() and int(speed) > 0 else None,
                is_physical=(folder / "device").exists(),
            )


def infiniband_ports(root: Path = Path("/")) -> tuple[InfinibandPort, ...]:
    """The ports that speak RDMA, as the kernel lists them.

    Args:
        root: where ``sys`` is.
    """
    return tuple(
        InfinibandPort(
            device=port.parts[-3],
            port=int(port.name),
            state=(kernel_text(port / "state") or "unknown").partition(": ")[2] or "unknown",
            rate=kernel_text(port / "rate") or "unknown rate",
        )
        for port in sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    )


def listening_addresses(port: str, *, root: Path = Path("/")) -> tuple[str, ...]:
    """The addresses of this host on which something waits for connections at a TCP port, in its network namespace.

    Args:
        port: a number; there is none at anything else.
        root: where ``proc`` is.
    """
    found: set[str] = set()
    if not port.isdecimal():
        return ()
    for name in ("tcp", "tcp6"):
        for line in (kernel_text(root / "proc/net" / name) or "").splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, _, number = local.partition(":")
            if state == _TCP_LISTEN and int(number, 16) == int(port):
                # The kernel writes words of four bytes as the processor holds them.
                words = struct.iter_unpack("=I", bytes.fromhex(address))
                whole = ipaddress.ip_address(b"".join(struct.pack(">I", word) for (word,) in words))
                found.add(str(getattr(whole, "ipv4_mapped", None) or whole))
    return tuple(sorted(found))
