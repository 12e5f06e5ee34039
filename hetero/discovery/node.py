"""Gathers what this rank can find out of its node: devices, topology, memory, cores, networks."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hetero.discovery.facts import NodeFacts
from hetero.discovery.nvidia_smi import Asked, ask, gpu_topology
from hetero.doctor.facts import TorchFacts
from hetero.doctor.host_facts import host_facts
from hetero.profiling.host_hardware import (
    ROOT,
    boot_id,
    core_quota,
    gpus_per_switch,
    memory_bytes,
    pcie_gb_per_s,
    processor_name,
)
from hetero.slurm.job import node_name


def node_facts(
    environment: Mapping[str, str],
    torch: TorchFacts | None,
    *,
    torch_error: str | None = None,
    root: Path = ROOT,
    asked: Asked = ask,
) -> NodeFacts:
    """What this rank tells of its node; what cannot be found out is left out.

    Args:
        torch: what :func:`hetero.doctor.torch_facts.torch_facts` tells, ``None`` where it is not installed.
        torch_error: why it cannot be imported.
        root: where ``proc`` and ``sys`` are.
        asked: runs the driver's program.

    Raises:
        ConfigError: the kernel does not say how much memory there is, as on another system than Linux.
    """
    host = host_facts(environment, torch, torch_error=torch_error)
    addresses = [gpu.pci_address for gpu in host.gpus if gpu.pci_address is not None]
    rates = {address: pcie_gb_per_s(address, root) for address in addresses}
    quota = core_quota(root)
    return NodeFacts(
        node=node_name(environment),
        host=host,
        boot_id=boot_id(root),
        memory_bytes=memory_bytes(root),
        allowed_cores=tuple(sorted(os.sched_getaffinity(0))),
        core_quota=quota if math.isfinite(quota) else None,
        processor=processor_name(root),
        gpus_per_switch=gpus_per_switch(root),
        pcie_gb_per_s={address: rate for address, rate in rates.items() if rate is not None},
        topology=gpu_topology(asked) if host.gpus else None,
    )
