"""Asks CUDA what a rank sits on, and says whether that is what the plan was made for."""

from collections.abc import Sequence

import torch

from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.spec.devices import DeviceCatalogue, DeviceType, is_short_of_memory
from hetero.spec.found_device import FoundDevice
from hetero.text import number_ranges
from hetero.units import GIB


def found_device(device: torch.device) -> FoundDevice:
    """What this rank sits on."""
    if device.type == "cpu":
        return FoundDevice()
    properties = torch.cuda.get_device_properties(device)
    # ROCm has numbers of its own there, which mean other things.
    capability = torch.cuda.get_device_capability(device) if torch.version.hip is None else None
    return FoundDevice(cuda_name=properties.name, compute_capability=capability, memory_bytes=properties.total_memory)


def check_devices(plan: Plan, found: Sequence[FoundDevice]) -> None:
    """Checks that every working rank sits on the device type that its stage names. ``found`` is by rank.

    Raises:
        PlanError: one does not.
    """
    for r, s, stage in plan.stages():
        wanted = plan.device_types.of(stage.device)
        wrong = [rank for rank in stage.ranks if not found[rank].is_a(wanted)]
        if wrong:
            others = ", ".join(sorted({_other_than(wanted, found[rank], plan.device_types) for rank in wrong}))
            raise PlanError(
                f"replica {r} stage {s}: it is planned for {stage.device}, but ranks {number_ranges(wrong)} sit on "
                f"{others}; reorder the hosts or make a plan for these devices"
            )


def _other_than(wanted: DeviceType, found: FoundDevice, known: DeviceCatalogue) -> str:
    """What ``found`` is called; where names agree, or say nothing, its compute capability."""
    name = found.type_among(known).name
    if found.cuda_name is None or (wanted.cuda_name is not None and not wanted.is_called(found.cuda_name)):
        return name
    capabilities = (
        "none" if each is None else "{}.{}".format(*each)
        for each in (found.compute_capability, wanted.compute_capability)
    )
    return "{} of compute capability {}, not {}".format(name, *capabilities)


def short_of_memory(found: Sequence[FoundDevice], memory_gib: Sequence[int | None]) -> list[str]:
    """A line for each sort of device with clearly less memory than the ``memory_gib`` that its rank is planned with."""
    ranks_of: dict[tuple[str, int, int], list[int]] = {}
    for rank, (device, nominal) in enumerate(zip(found, memory_gib, strict=True)):
        if device.cuda_name is None or device.memory_bytes is None or nominal is None:
            continue
        if is_short_of_memory(device.memory_bytes, nominal):
            ranks_of.setdefault((device.cuda_name, device.memory_bytes, nominal), []).append(rank)
    return [
        f"ranks {number_ranges(ranks)}: {name} has {memory_bytes / GIB:.1f} GiB, the plan counts on {nominal}; is it a "
        "part of a device (MIG)? Say so by memory_gib of the node type in the cluster file"
        for (name, memory_bytes, nominal), ranks in ranks_of.items()
    ]
