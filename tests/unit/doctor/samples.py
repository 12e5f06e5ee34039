"""Facts of hosts that nobody has here."""

import dataclasses
from typing import Any

from hetero.distributed.cudnn_library import CudnnVersions
from hetero.doctor.facts import GpuFacts, HostFacts, NetworkInterface, TorchFacts
from hetero.units import GIB

CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
"""What wheels of torch 2.11 to 2.14 are built for: RELEASE.md of pytorch, "PyTorch CUDA Support Matrix"."""

A100 = GpuFacts(name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), memory_bytes=int(39.4 * GIB), numa_node=0)
V100 = GpuFacts(name="Tesla V100-SXM2-16GB", compute_capability=(7, 0), memory_bytes=int(15.8 * GIB), numa_node=0)


def torch_of(gpu: GpuFacts, *, num_gpus: int = 8, **overrides: Any) -> TorchFacts:
    old = gpu.compute_capability < (7, 5)
    made = TorchFacts(
        version="2.11.0+cu126" if old else "2.11.0+cu130",
        cuda="12.6" if old else "13.0",
        cudnn=CudnnVersions(loaded="9.10.2", built="9.10.2", folders=("/venv/nvidia/cudnn/lib",)),
        architectures=CU126 if old else CU130,
        nccl="2.29.7",
        gpus=(gpu,) * num_gpus,
    )
    return dataclasses.replace(made, **overrides)


def host(gpu: GpuFacts = A100, **overrides: Any) -> HostFacts:
    """A host on which there is nothing to find fault with."""
    engine = {"transformer-engine": "2.11.0"} if gpu.compute_capability >= (8, 0) else {}
    made = HostFacts(
        host="fast",
        os="Linux 6.8.0, Ubuntu 24.04",
        python="3.12.3",
        address="10.0.0.1",
        driver="580.95.05",
        driver_cuda="13.0",
        torch=torch_of(gpu),
        packages={"megatron-core": "0.16.1", "safetensors": "0.5.0", "megatron-hetero": "0.2.0", **engine},
        modules=("apex", "fused_weight_gradient_mlp_cuda"),
        shared_memory_bytes=64 * GIB,
        open_files=65536,
        numa_nodes=2,
        cpus=32,
        all_cpus=64,
        interfaces=(NetworkInterface(name="eth0", address="10.0.0.1", speed_mbit_per_s=100_000),),
    )
    return dataclasses.replace(made, **overrides)


def rank_of(facts: HostFacts, rank: int, *, world_size: int, local_world_size: int) -> HostFacts:
    """``facts`` as a rank under torchrun has them."""
    launch = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "OMP_NUM_THREADS": "1",
    }
    return dataclasses.replace(facts, environment={**facts.environment, **launch})
