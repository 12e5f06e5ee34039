"""Facts of nodes that nobody has here."""

import dataclasses
from itertools import count
from typing import Any

from hetero.discovery.facts import GpuTopology, NodeFacts
from hetero.doctor.facts import GpuFacts, InfinibandPort, NetworkInterface
from hetero.units import GIB
from tests.unit.doctor.samples import A100, V100, host, torch_of

T4 = GpuFacts(name="Tesla T4", compute_capability=(7, 5), memory_bytes=int(14.6 * GIB))
UNKNOWN = GpuFacts(name="NVIDIA X1 [beta]", compute_capability=(8, 6), memory_bytes=12 * GIB)

_BOOTS = count()


def seated(*gpus: GpuFacts) -> tuple[GpuFacts, ...]:
    """``gpus``, each at a place of its own on the bus."""
    return tuple(dataclasses.replace(gpu, pci_address=f"0000:{i + 1:02x}:00.0") for i, gpu in enumerate(gpus))


def topology(num_gpus: int, kind: str, *, gb_per_s: float | None = None, **nics: tuple[str, ...]) -> GpuTopology:
    """All pairs of GPUs connected by ``kind``."""
    return GpuTopology(
        pci_addresses=tuple(f"0000:{i + 1:02x}:00.0" for i in range(num_gpus)),
        kinds=tuple(tuple("X" if i == j else kind for j in range(num_gpus)) for i in range(num_gpus)),
        nics=nics,
        nvlink_gb_per_s=(gb_per_s,) * num_gpus,
    )


def ports(*rates: str, state: str = "ACTIVE") -> tuple[InfinibandPort, ...]:
    return tuple(InfinibandPort(device=f"mlx5_{i}", port=1, state=state, rate=rate) for i, rate in enumerate(rates))


def gpu_node(name: str, *gpus: GpuFacts, **overrides: Any) -> NodeFacts:
    """A node with ``gpus``, on 100 Gbit/s Ethernet; ``facts`` are those of its host that are to be others."""
    facts = {"torch": torch_of(gpus[0], gpus=seated(*gpus)), **overrides.pop("facts", {})}
    made = NodeFacts(
        node=name,
        host=host(gpus[0], host=name, **facts),
        boot_id=str(next(_BOOTS)),
        memory_bytes=512 * GIB,
        allowed_cores=tuple(range(32)),
        processor="AMD EPYC 7742 64-Core Processor",
        pcie_gb_per_s={f"0000:{i + 1:02x}:00.0": 31.508 for i in range(len(gpus))},
        topology=topology(len(gpus), "NV12", gb_per_s=25.0),
    )
    return dataclasses.replace(made, **overrides)


def cpu_node(name: str, *, cores: tuple[int, ...] = (0, 1), **overrides: Any) -> NodeFacts:
    """A rank on a node without GPUs, that may run on ``cores``."""
    facts = host(host=name, driver=None, driver_cuda=None, torch=None, numa_nodes=1, interfaces=VETH)
    made = NodeFacts(
        node=name,
        host=facts,
        boot_id=str(next(_BOOTS)),
        memory_bytes=16 * GIB,
        allowed_cores=cores,
        processor="AMD EPYC",
    )
    return dataclasses.replace(made, **overrides)


VETH = (NetworkInterface(name="eth0", address="172.17.0.2", speed_mbit_per_s=10_000, is_physical=False),)
"""The end of a container, which says a speed that no wire has."""

EIGHT_A100 = (A100,) * 8
FOUR_V100 = (V100,) * 4
