"""Keeps slots of the host's memory for the activations of blocks, all of them allocated before a step.

Pinning in the middle of a step could stand still (:mod:`.pinned_memory`), so what a block saves of a microbatch is
weighed beforehand, in a warm-up or in the steps before, and each block has a slot for every microbatch in flight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetero.runtime.host_copies import HostCopies

BlockKey = tuple[int, float]
"""A block by its stage and its position."""

_ALIGNMENT = 64
"""Bytes at whose multiples tensors begin in a slot: a line of most processors' caches."""


@dataclass(slots=True)
class Taken:
    """What one microbatch has of the host for one block.

    parts: bytes for each of its tensors.
    slot: that goes back when the backward is issued; ``None`` if there was none.
    """

    parts: list[torch.Tensor] = field(default_factory=list)
    slot: torch.Tensor | None = None


class HostSlots:
    """Hands out slots of a rank's host to blocks whose activations leave the device.

    A block that saves more than any before, as experts may with other tokens, has the rest in pageable memory. Its
    copies are slower for that step, and the next step has room.

    A slot may be taken again as soon as the backward that needed it is issued. The copy that fills it next waits for a
    later compute, and the computes have waited for the copy back to the device.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._saved: dict[BlockKey, int] = {}
        self._free: dict[BlockKey, list[torch.Tensor]] = {}

    def weigh(self, key: BlockKey, sizes: Sequence[int]) -> None:
        """Take note of the bytes of the tensors that a block saves of a microbatch."""
        self._saved[key] = max(self._saved.get(key, 0), sum(map(_padded, sizes)))

    def grow(self, in_flight: Mapping[int, int]) -> None:
        """Allocate what the blocks that were weighed need, while no step is under way and all slots are free.

        Args:
            in_flight: the most microbatches of each stage at a time.
        """
        for key, num_bytes in self._saved.items():
            slots, count = self._free.get(key, []), in_flight[key[0]]
            if num_bytes and (len(slots) < count or slots[0].numel() < num_bytes):
                if slots:
                    # What is too small is given back before, for which the device has to be idle: the update of the
                    # last step may be under way.
                    self._copies.wait_until_computed()
                    slots.clear()
                every = torch.empty(count * num_bytes, dtype=torch.uint8, device="meta")
                self._free[key] = list(self._copies.to_keep(every, dtype=torch.uint8).split(num_bytes))

    def take(self, key: BlockKey, sizes: Sequence[int]) -> Taken:
        """Return memory for tensors of these bytes, in a slot as far as there is room."""
        free = self._free.get(key, [])
        taken = Taken(slot=free.pop() if free else None)
        room = taken.slot if taken.slot is not None else torch.empty(0, dtype=torch.uint8)
        for num_bytes in sizes:
            if room.numel() >= num_bytes:
                taken.parts.append(room[:num_bytes])
                room = room[_padded(num_bytes) :]
            else:
                taken.parts.append(torch.empty(num_bytes, dtype=torch.uint8))
        return taken

    def give_back(self, key: BlockKey, taken: Taken) -> None:
        """Free what :meth:`take` has returned, after the backward of the block."""
        taken.parts.clear()
        if taken.slot is not None:
            self._free[key].append(taken.slot)
            taken.slot = None


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
