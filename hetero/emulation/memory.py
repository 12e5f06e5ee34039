"""The memory of an emulated device: what it would hold, microbatch by microbatch, against what it has."""

from hetero.cost.memory import MemoryParts
from hetero.errors import DeviceMemoryError
from hetero.schedule.actions import Kind
from hetero.units import GIB


class DeviceMemory:
    """
    Args:
        where: names the rank in an error.
        peak: predicted parts of the device at ``deepest`` microbatches.
        deepest: microbatches between forward and backward at the peak.
        capacity_bytes: of the device, ``None`` where nobody knows.
    """

    def __init__(self, where: str, *, peak: MemoryParts, deepest: int, capacity_bytes: int | None) -> None:
        self._where = where
        self._peak = peak
        self._capacity_bytes = capacity_bytes
        self._per_microbatch = (peak.activations + peak.logits) // deepest
        self._fixed_bytes = peak.total - deepest * self._per_microbatch
        self._held = 0

    def before(self, kind: Kind, number: int) -> None:
        """A compute begins; a forward adds what its microbatch saves.

        Raises:
            DeviceMemoryError: the device does not have that much.
        """
        if kind != Kind.F:
            return
        self._held += 1
        needed = self._fixed_bytes + self._held * self._per_microbatch
        if self._capacity_bytes is not None and needed > self._capacity_bytes:
            parts = {
                "weights": self._peak.weights,
                "gradients": self._peak.gradients,
                "optimizer": self._peak.optimizer,
                f"activations of {self._held} in flight": self._held * self._per_microbatch,
            }
            listed = [f"{name} {count / GIB:.2f}" for name, count in parts.items()]
            listed.append(f"other {(needed - sum(parts.values())) / GIB:.2f}")
            raise DeviceMemoryError.of(
                self._where,
                doing=f"the forward of microbatch {number}",
                detail=f"it needs {needed / GIB:.2f} GiB ({', '.join(listed)}) of {self._capacity_bytes / GIB:.2f} GiB",
            )

    def after(self, kind: Kind) -> None:
        """A compute has ended; a backward lets go of its microbatch."""
        self._held -= kind == Kind.B
