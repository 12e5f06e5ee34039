"""Builds the parts of a model that a profiler measures, each once, and keeps them for further points."""

import dataclasses
import gc
from typing import NamedTuple

import torch

from hetero.distributed.process_groups import create_groups
from hetero.profiling.host_hardware import memory_bytes
from hetero.profiling.points import PartOfModel, ProfilePoint
from hetero.profiling.profiled_plan import ProfiledModel
from hetero.profiling.stage_part import StagePart
from hetero.runtime.options import StageOptions

KEPT_SHARE = 0.25
"""Of the device's memory, for parts that wait for their next point. A heuristic: an allocator that runs out of memory
gives back what it holds in the middle of a lap. A quarter of 80 GB has room for all parts of a layer of 8B models, and
for one of their ends."""

BYTES_PER_PARAMETER = 18
"""Of weights in 16 bits, their gradient, the weights and both moments of AdamW in 32; in fp32 it is 16."""


class LayersOfModel(NamedTuple):
    """A model in one precision, and whose layers it has."""

    profiled: ProfiledModel
    options: StageOptions


class BuiltParts:
    """Has the parts of some models, in the world of :func:`.world_of_rank_0`.

    Args:
        world_size: that of the world.
        room_bytes: for the parts that are kept; by default a share of the memory of ``device``.
    """

    def __init__(self, device: torch.device, *, world_size: int, room_bytes: int | None = None) -> None:
        self._device = device
        self._world_size = world_size
        self._room_bytes = int(KEPT_SHARE * _memory_bytes(device)) if room_bytes is None else room_bytes
        self._parts: dict[tuple[LayersOfModel, PartOfModel], StagePart] = {}

    def has(self, layers: LayersOfModel, point: ProfilePoint) -> bool:
        """Return whether the part that ``point`` measures is built."""
        return (layers, point.part) in self._parts

    def take(self, layers: LayersOfModel, point: ProfilePoint) -> StagePart:
        """Return the part that ``point`` measures, ready for its microbatches. Build it if need be.

        Raises:
            ConfigError: the model cannot be cut so.
            torch.OutOfMemoryError: it does not fit on the device.
        """
        key = layers, point.part
        # The last is the one that was taken last.
        part = self._parts.pop(key) if key in self._parts else self._build(layers, point)
        self._parts[key] = part
        self._make_room()
        part.take_turn(micro_batch_size=point.micro_batch_size)
        return part

    def forget_others(self, layers: LayersOfModel, point: ProfilePoint) -> bool:
        """Forget every part, after one was built or run in vain; return whether another than that one was there."""
        others = self._parts.keys() - {(layers, point.part)}
        self._parts.clear()
        self._free()
        return bool(others)

    def _build(self, layers: LayersOfModel, point: ProfilePoint) -> StagePart:
        kind, tp, recompute, splits_backward = point.part
        plan = layers.profiled.plan(
            tp=tp,
            micro_batch_size=1,
            recompute=recompute,
            splits_backward=splits_backward,
            on_rank_0=kind,
            world_size=self._world_size,
        )
        context = create_groups(plan, device=self._device)
        return StagePart(context, kind, options=dataclasses.replace(layers.options, init_method_std=None))

    def _make_room(self) -> None:
        """Forget what was not taken for the longest time, but never the last one."""
        sizes = {key: BYTES_PER_PARAMETER * part.parameters for key, part in self._parts.items()}
        excess = sum(sizes.values()) - self._room_bytes
        for key in list(self._parts)[:-1]:
            if excess <= 0:
                break
            excess -= sizes[key]
            del self._parts[key]
        if len(self._parts) < len(sizes):
            self._free()

    def _free(self) -> None:
        """Free the memory of dropped parts, whose modules refer to one another in cycles."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return memory_bytes()
