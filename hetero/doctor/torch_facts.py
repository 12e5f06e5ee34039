"""Asks torch what it is built for, and CUDA which devices there are."""

from pathlib import Path
from typing import Any

import torch

from hetero.distributed.cudnn_library import load_cudnn
from hetero.distributed.nccl_library import loaded_nccl_version
from hetero.distributed.runtime_versions import cudnn_versions
from hetero.doctor.facts import GpuFacts, TorchFacts
from hetero.errors import ConfigError
from hetero.serialization import read_text


def torch_facts() -> TorchFacts:
    """Ask this process's torch; starts CUDA where there is some, and loads cuDNN as a training does."""
    has_cuda = torch.version.cuda is not None
    load_cudnn()
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=cudnn_versions() if has_cuda else None,
        architectures=tuple(torch.cuda.get_arch_list()) if has_cuda else (),
        nccl=loaded_nccl_version() if has_cuda else None,
        gpus=tuple(_gpu(index) for index in range(torch.cuda.device_count())),
    )


def _gpu(index: int) -> GpuFacts:
    # torch's stubs do not know where a device sits on the bus.
    properties: Any = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return GpuFacts(
        name=properties.name,
        compute_capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        numa_node=_numa_node(address),
        pci_address=address,
    )


def _numa_node(pci_address: str) -> int | None:
    try:
        node = int(read_text(Path("/sys/bus/pci/devices") / pci_address / "numa_node"))
    except (ConfigError, ValueError):
        return None
    return node if node >= 0 else None
