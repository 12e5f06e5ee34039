"""What a rank tells of a node with GPUs, from a tree of ``/proc`` and ``/sys`` and the driver's answers."""

import os
from collections.abc import Sequence
from pathlib import Path

from hetero.discovery.node import node_facts
from hetero.units import GIB
from tests.unit.discovery.samples import seated
from tests.unit.doctor.samples import A100, torch_of

FILES = {
    "proc/meminfo": f"MemTotal: {64 * 1024**2} kB",
    "proc/cpuinfo": "model name\t: AMD EPYC 7B12",
    "proc/self/cgroup": "0::/step",
    "proc/sys/kernel/random/boot_id": "ca0b8b8e",
    "sys/fs/cgroup/step/memory.max": str(48 * GIB),
    "sys/fs/cgroup/step/cpu.max": "150000 100000",
}
ANSWERS = {
    "--query-gpu=pci.bus_id": "00000000:01:00.0\n00000000:02:00.0\n",
    "topo": "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV4\t0-7\nGPU1\tNV4\t X \t0-7\n",
    "nvlink": "GPU 0: NVIDIA A100\n\t Link 0: 25 GB/s\nGPU 1: NVIDIA A100\n\t Link 0: 25 GB/s\n",
}


def asked(command: Sequence[str]) -> str | None:
    return ANSWERS[command[1]]


def test_a_node_with_two_gpus(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    gpu = tmp_path / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    gpu.mkdir(parents=True)
    for name, text in {"max_link_speed": "16.0 GT/s PCIe", "max_link_width": "16"}.items():
        (gpu / name).write_text(f"{text}\n")
    (tmp_path / "sys/bus/pci/devices").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:01:00.0").symlink_to(gpu)
    facts = node_facts({"SLURMD_NODENAME": "gpu7"}, torch_of(A100, gpus=seated(A100, A100)), root=tmp_path, asked=asked)
    assert (facts.node, facts.boot_id, facts.processor) == ("gpu7", "ca0b8b8e", "AMD EPYC 7B12")
    assert (facts.memory_bytes, facts.core_quota) == (48 * GIB, 1.5)
    assert facts.allowed_cores == tuple(sorted(os.sched_getaffinity(0)))
    # The kernel tells of one of the two.
    assert {address: round(rate, 1) for address, rate in facts.pcie_gb_per_s.items()} == {"0000:01:00.0": 31.5}
    assert facts.topology is not None
    assert facts.topology.kinds == (("X", "NV4"), ("NV4", "X"))
    assert facts.topology.nvlink_gb_per_s == (25.0, 25.0)


def test_without_gpus_nobody_asks_the_driver(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(FILES["proc/meminfo"])
    facts = node_facts({}, None, root=tmp_path, asked=lambda command: ANSWERS["no question"])
    assert (facts.topology, facts.host.gpus, facts.core_quota) == (None, (), None)
