"""Reads what a host has from its kernel: memory and cores, with the limits of its control groups, and PCIe switches."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from hetero.doctor.host_facts import kernel_text
from hetero.errors import ConfigError

ROOT = Path("/")

_NVIDIA = "0x10de"

_DISPLAY, _3D = "0x0300", "0x0302"
"""PCI classes of graphics cards, with and without an output for a screen; a card's sound and USB have others."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def memory_bytes(root: Path = ROOT) -> int:
    """Memory that this process may use: the host's, or the least limit of a control group that it is in.

    Args:
        root: where ``proc`` and ``sys`` are.

    Raises:
        ConfigError: the kernel does not say.
    """
    found = re.search(r"^MemTotal:\s+(\d+) kB", kernel_text(root / "proc/meminfo") or "", re.MULTILINE)
    if found is None:
        raise ConfigError(f"{root / 'proc/meminfo'}: it has no MemTotal; hosts are measured on Linux only")
    limits = [
        int(text)
        for folder in _control_groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := kernel_text(folder / name) or "").isdecimal()
    ]
    return min([int(found[1]) * 1024, *limits])


def usable_cores(root: Path = ROOT, *, allowed: Iterable[int] | None = None) -> list[int]:
    """Cores that this process may keep busy at the same time: those that it may run on, as many as its quota has.

    Args:
        root: where ``proc`` and ``sys`` are.
        allowed: that it may run on; asked of the kernel if ``None``.
    """
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    return cores[: max(1, math.floor(min(len(cores), core_quota(root))))]


def core_quota(root: Path = ROOT) -> float:
    """How many cores' time this process may use by the quotas of its control groups; infinite without any."""
    return min((quota for folder in _control_groups(root, "cpu") for quota in _quotas(folder)), default=math.inf)


def processor_name(root: Path = ROOT) -> str | None:
    """What the processor calls itself, ``None`` where the kernel does not say, as on some that are not x86."""
    found = re.search(r"^model name\s*:\s*(.+)$", kernel_text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return found[1].strip() if found else None


def gpus_per_switch(root: Path = ROOT) -> int:
    """The most GPUs that reach the host through one root port, whose link they share; 1 where there are none.

    Only a switch brings several devices behind one port. Virtual machines often show their GPUs without any.
    """
    ports = [port for folder in (root / "sys/bus/pci/devices").glob("*") if (port := _root_port(folder)) is not None]
    return max(Counter(ports).values(), default=1)


def pcie_gb_per_s(pci_address: str, root: Path = ROOT) -> float | None:
    """What the narrowest PCIe link between a device and its root port carries in one direction, 10^9 bytes per second.

    The most that the links are made for, as devices at rest slow theirs down; without the overhead of packets, which
    takes another tenth or more. ``None`` where the kernel does not say, as in many virtual machines.

    Args:
        pci_address: such as ``0000:07:00.0``.
        root: where ``sys`` is.
    """
    folder = (root / "sys/bus/pci/devices" / pci_address).resolve()
    links = []
    while _PCI_ADDRESS.fullmatch(folder.name):
        speed = re.match(r"([0-9.]+) GT/s", kernel_text(folder / "max_link_speed") or "")
        width = kernel_text(folder / "max_link_width") or ""
        if speed is not None and width.isdecimal() and int(width) > 0:
            links.append(float(speed[1]) * int(width) * _coded_share(float(speed[1])) / 8)
        folder = folder.parent
    return min(links, default=None)


def _coded_share(gt_per_s: float) -> float:
    """Bits of data per bit on the wire: 8 of 10 up to PCIe 2.0, 128 of 130 up to 5.0, all in 6.0 (PCI-SIG)."""
    return 0.8 if gt_per_s <= 5 else 128 / 130 if gt_per_s <= 32 else 1.0


def boot_id(root: Path = ROOT) -> str | None:
    """What the kernel drew when it started: equal in all containers of one machine, different on any two machines."""
    return kernel_text(root / "proc/sys/kernel/random/boot_id")


def _root_port(device: Path) -> str | None:
    """The port of the root complex behind which a GPU sits, ``None`` of any other device."""
    kind = kernel_text(device / "class") or ""
    if kernel_text(device / "vendor") != _NVIDIA or not kind.startswith((_DISPLAY, _3D)):
        return None
    *_, complex_and_ports = re.split(r"/(?=pci[0-9a-f]+:[0-9a-f]+/)", str(device.resolve()))
    return "/".join(complex_and_ports.split("/")[:2])


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, of either version, from its own group to the outermost.

    In a container the path may be the host's, which is not there; the outermost folder then is the container's group.
    """
    for line in (kernel_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mounted = root / "sys/fs/cgroup" / controller
        else:
            continue
        inside = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(inside), -1, -1):
            yield mounted.joinpath(*inside[:depth])


def _quotas(group: Path) -> Iterator[float]:
    """How many cores' time the group may use, if it says."""
    both = (kernel_text(group / "cpu.max") or "").split()
    if not both:
        both = [kernel_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
    if len(both) == 2 and all(each.isdecimal() for each in both) and int(both[1]) > 0:
        yield int(both[0]) / int(both[1])
