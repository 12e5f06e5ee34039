"""Runs a function on ranks of a device: on ranks of the pool, or in fresh processes that have one GPU, or share it.

    losses = run_on("cuda", train, 2, plan)         # losses[rank]; "cpu" for the same over gloo

Tests take the device as a parameter (:func:`on_devices`), so that what they do on a GPU runs on the CPU in every run.
"""

import dataclasses
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero.distributed.environment import CUDA_DEFAULTS, SHARED_DEVICE_DEFAULTS
from hetero.distributed.nccl_library import loaded_nccl_version
from hetero.distributed.shared_devices import OLDEST_NCCL, can_share_devices
from hetero.plan.ir import Plan
from hetero.spec.devices import DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.ranks import Ended, end_of_ranks, run_ranks

ENVIRONMENT: Mapping[str, str] = {
    **{each.name: each.value for each in CUDA_DEFAULTS + SHARED_DEVICE_DEFAULTS},
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))


def on_devices(cases: Sequence[Any], *, on_cpu: Sequence[Any]) -> list[Any]:
    """Parameters ``(device, case)``: all ``cases`` on a GPU, and those of ``on_cpu`` on the CPU as well."""
    made = [pytest.param("cpu", case, id=f"cpu-{_name(case)}") for case in on_cpu]
    return made + [pytest.param("cuda", case, id=f"cuda-{_name(case)}", marks=GPU) for case in cases]


def skip_unless_ranks_fit(device: str, world_size: int) -> None:
    """Skip a test of more ranks than GPUs where NCCL does not let them share one."""
    if device == "cpu" or world_size <= torch.cuda.device_count():
        return
    version = loaded_nccl_version()
    if not can_share_devices(version):
        wanted = ".".join(map(str, OLDEST_NCCL))
        pytest.skip(f"{world_size} ranks on {torch.cuda.device_count()} GPUs need NCCL {wanted}, this is {version}")


def run_on(device: str, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 110) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks, joined by gloo and on a GPU by NCCL, and return what each
    returned."""
    if device == "cpu":
        return run_ranks(function, world_size, *args, timeout_s=timeout_s)
    skip_unless_ranks_fit(device, world_size)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ends = end_on(device, _answer_into, world_size, folder, function, args, timeout_s=timeout_s)
        for rank, ended in enumerate(ends):
            assert ended.exit_code == 0, f"rank {rank} ended with {ended.exit_code}:\n{ended.stderr}"
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world_size)]


def end_on(
    device: str, function: Callable[..., None], world_size: int, *args: Any, timeout_s: float = 60
) -> list[Ended]:
    """:func:`tests.helpers.ranks.end_of_ranks` on a device."""
    skip_unless_ranks_fit(device, world_size)
    variables = ENVIRONMENT if device == "cuda" else None
    return end_of_ranks(function, world_size, *args, gpu_environment=variables, timeout_s=timeout_s)


def _answer_into(
    rank: int, store: dist.Store, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    (folder / str(rank)).write_bytes(pickle.dumps(function(rank, *args)))


def this_device(device: str) -> torch.device:
    """The device of this rank; of a GPU that ranks share, all have the same."""
    return torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")


def device_type_here(device: str) -> DeviceType:
    """What the catalogue calls the device; a GPU that it does not know counts as the nearest by compute capability."""
    if device == "cpu":
        return SHIPPED_DEVICES.of("cpu")
    known = SHIPPED_DEVICES.called(torch.cuda.get_device_name())
    if known is not None:
        return known
    major, _ = torch.cuda.get_device_capability()
    return SHIPPED_DEVICES.of("H100" if major >= 9 else "A100-40" if major == 8 else "V100-32")


def placed_on(plan: Plan, device: DeviceType) -> Plan:
    """``plan`` with all its stages on ``device``."""
    replicas = [
        dataclasses.replace(each, stages=tuple(dataclasses.replace(stage, device=device.name) for stage in each.stages))
        for each in plan.replicas
    ]
    return dataclasses.replace(plan, replicas=tuple(replicas))


def _name(case: Any) -> str:
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)
