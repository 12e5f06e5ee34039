"""What a host has, read from folders that look like ``/proc`` and ``/sys`` of hosts that nobody has here."""

from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.profiling.host_hardware import (
    boot_id,
    core_quota,
    gpus_per_switch,
    memory_bytes,
    pcie_gb_per_s,
    processor_name,
    usable_cores,
)
from hetero.units import GIB

UNLIMITED_1 = "9223372036854771712"
"""What version 1 of control groups says without a limit."""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def host(root: Path, gib: int = 64, **files: str) -> Path:
    meminfo = f"MemTotal:       {gib * 1024**2} kB\nMemFree:        1 kB"
    return write(root, {"proc/meminfo": meminfo, **files})


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/job/step", f"{GROUPS}/job/step/memory.max": "max"}, 64),
        ({"proc/self/cgroup": "0::/job/step", f"{GROUPS}/job/step/memory.max": str(16 * GIB)}, 16),
        (
            {
                "proc/self/cgroup": "0::/job/step",
                f"{GROUPS}/job/step/memory.max": "max",
                f"{GROUPS}/job/memory.max": str(8 * GIB),
            },
            8,
        ),
        ({"proc/self/cgroup": "0::/job/step", f"{GROUPS}/job/memory.max": str(128 * GIB)}, 64),
        ({"proc/self/cgroup": "0::/../../kubepods/pod1", f"{GROUPS}/memory.max": str(4 * GIB)}, 4),
        ({"proc/self/cgroup": "0::/", f"{GROUPS}/memory.max": str(4 * GIB)}, 4),
        (
            {
                "proc/self/cgroup": "7:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/",
                f"{GROUPS}/memory/docker/1/memory.limit_in_bytes": str(12 * GIB),
                f"{GROUPS}/memory/memory.limit_in_bytes": UNLIMITED_1,
            },
            12,
        ),
        ({"proc/self/cgroup": "4:memory:/", f"{GROUPS}/memory/memory.limit_in_bytes": UNLIMITED_1}, 64),
        ({"proc/self/cgroup": "4:memory:/x", f"{GROUPS}/cpu/x/memory.limit_in_bytes": "1"}, 64),
    ],
    ids=[
        "no groups",
        "no limit",
        "a limit",
        "of the group around it",
        "beyond the host's",
        "a path outside of the container",
        "a container",
        "version 1",
        "version 1 without a limit",
        "another controller's",
    ],
)
def test_memory_is_the_least_of_host_and_groups(tmp_path: Path, files: dict[str, str], gib: int) -> None:
    assert memory_bytes(host(tmp_path, **files)) == gib * GIB


def test_memory_of_no_linux(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="meminfo: it has no MemTotal; hosts are measured on Linux only"):
        memory_bytes(tmp_path)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, [2, 3, 8, 9]),
        ({"proc/self/cgroup": "0::/a", f"{GROUPS}/a/cpu.max": "max 100000"}, [2, 3, 8, 9]),
        ({"proc/self/cgroup": "0::/a", f"{GROUPS}/a/cpu.max": "250000 100000"}, [2, 3]),
        ({"proc/self/cgroup": "0::/a", f"{GROUPS}/a/cpu.max": "50000 100000"}, [2]),
        ({"proc/self/cgroup": "0::/a", f"{GROUPS}/cpu.max": "300000 100000"}, [2, 3, 8]),
        (
            {
                "proc/self/cgroup": "7:cpu,cpuacct:/a",
                f"{GROUPS}/cpu/a/cpu.cfs_quota_us": "200000",
                f"{GROUPS}/cpu/a/cpu.cfs_period_us": "100000",
            },
            [2, 3],
        ),
        (
            {
                "proc/self/cgroup": "7:cpu,cpuacct:/a",
                f"{GROUPS}/cpu/a/cpu.cfs_quota_us": "-1",
                f"{GROUPS}/cpu/a/cpu.cfs_period_us": "100000",
            },
            [2, 3, 8, 9],
        ),
    ],
)
def test_cores_are_as_many_as_the_quota_has(tmp_path: Path, files: dict[str, str], cores: list[int]) -> None:
    assert usable_cores(write(tmp_path, files), allowed={9, 3, 2, 8}) == cores


def test_a_quota_may_be_a_part_of_a_core(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a", f"{GROUPS}/a/cpu.max": "50000 100000", f"{GROUPS}/cpu.max": "max 100000"}
    assert core_quota(write(tmp_path / "limited", files)) == 0.5
    assert core_quota(tmp_path) == float("inf")


def test_a_machine_by_what_it_drew_when_it_started(tmp_path: Path) -> None:
    write(tmp_path, {"proc/sys/kernel/random/boot_id": "ca0b8b8e-0d3b-4b51"})
    assert boot_id(tmp_path) == "ca0b8b8e-0d3b-4b51"
    assert boot_id(tmp_path / "elsewhere") is None


def test_this_host() -> None:
    assert memory_bytes() > GIB
    assert usable_cores()
    assert boot_id()


def test_the_processor_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: fpu\nprocessor\t: 1"})
    assert processor_name(tmp_path) == "AMD EPYC 7B13"
    assert processor_name(tmp_path / "elsewhere") is None


GPU = {"vendor": "0x10de", "class": "0x030200"}


def pci(root: Path, devices: dict[str, dict[str, str]]) -> Path:
    """A bus with devices, by their paths from the root complex on."""
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for path, facts in devices.items():
        write(root / "sys/devices" / path, facts)
        (bus / Path(path).name).symlink_to(root / "sys/devices" / path)
    return root


SWITCH = "pci0000:00/0000:00:01.1/0000:01:00.0"


@pytest.mark.parametrize(
    ("devices", "shared"),
    [
        ({}, 1),
        ({"pci0000:00/0000:00:05.0": GPU, "pci0000:00/0000:00:06.0": GPU}, 1),
        (
            {
                f"{SWITCH}/0000:02:00.0/0000:03:00.0": GPU,
                f"{SWITCH}/0000:02:01.0/0000:04:00.0": GPU,
                "pci0000:40/0000:40:01.1/0000:41:00.0": GPU,
            },
            2,
        ),
        (
            {
                "pci0000:00/0000:00:01.1/0000:01:00.0": GPU,
                "pci0000:00/0000:00:01.1/0000:01:00.1": {"vendor": "0x10de", "class": "0x040300"},
                "pci0000:00/0000:00:01.2/0000:02:00.0": {"vendor": "0x10de", "class": "0x030000"},
                "pci0000:00/0000:00:01.2/0000:02:00.1": {"vendor": "0x1a03", "class": "0x030000"},
            },
            1,
        ),
        ({"pci0000:00/0000:00:01.0/0000:01:00.0": GPU, "pci0001:00/0001:00:01.0/0001:01:00.0": GPU}, 1),
    ],
    ids=["no bus", "a virtual machine", "two behind a switch", "sound and other cards", "two domains"],
)
def test_gpus_that_share_the_link_of_a_root_port(
    tmp_path: Path, devices: dict[str, dict[str, str]], shared: int
) -> None:
    assert gpus_per_switch(pci(tmp_path, devices)) == shared


def pcie(speed: str, width: str = "16") -> dict[str, str]:
    return {"max_link_speed": speed, "max_link_width": width}


@pytest.mark.parametrize(
    ("root_port", "device", "gb_per_s"),
    [
        (pcie("16.0 GT/s PCIe"), pcie("16.0 GT/s PCIe"), 31.51),
        (pcie("8.0 GT/s PCIe"), pcie("16.0 GT/s PCIe"), 15.75),
        (pcie("32.0 GT/s PCIe"), pcie("32.0 GT/s PCIe", "8"), 31.51),
        (pcie("5 GT/s"), pcie("8 GT/s"), 8.0),
        (pcie("64.0 GT/s PCIe"), pcie("64.0 GT/s PCIe"), 128.0),
        ({}, pcie("32.0 GT/s PCIe"), 63.02),
        ({}, pcie("Unknown", "0"), None),
        ({}, {}, None),
    ],
    ids=["gen 4", "a slot of gen 3", "8 lanes", "gen 2", "gen 6", "no port", "a virtual machine", "nothing said"],
)
def test_what_the_narrowest_pcie_link_carries(
    tmp_path: Path, root_port: dict[str, str], device: dict[str, str], gb_per_s: float | None
) -> None:
    port = "pci0000:00/0000:00:01.1"
    root = pci(tmp_path, {port: root_port, f"{port}/0000:01:00.0": {**GPU, **device}})
    assert pcie_gb_per_s("0000:01:00.0", root) == (None if gb_per_s is None else pytest.approx(gb_per_s, rel=1e-3))
    assert pcie_gb_per_s("0000:99:00.0", root) is None
