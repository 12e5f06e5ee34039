"""The memory of an emulated device: what it would hold, microbatch by microbatch, against what it has."""

from hetero.cost.memory import MemoryParts
from hetero.errors import DeviceMemoryError
from hetero.schedule.actions import BACKWARD, Kind
from hetero.units import GIB


class DeviceMemory:
    """
    Args:
        where: names the rank in an error.
        peak: predicted parts of the device at ``deepest`` microbatches, without what a split backward defers.
        deepest: microbatches between forward and backward at the peak.
        deferred_bytes: that a microbatch holds between B and W of a split backward.
        capacity_bytes: of the device, ``None`` where nobody knows.
    """

    def __init__(
        self, where: str, *, peak: MemoryParts, deepest: int, capacity_bytes: int | None, deferred_bytes: int = 0
    ) -> None:
        self._where = where
        self._peak = peak
        self._capacity_bytes = capacity_bytes
        self._per_microbatch = (peak.activations + peak.logits) // deepest
        self._fixed_bytes = peak.total - deepest * self._per_microbatch
        self._held = 0
        self._deferred_bytes = deferred_bytes
        self._waiting = 0

    def before(self, kind: Kind, number: int) -> None:
        """A compute begins; a forward adds what its microbatch saves, a W finds what is deferred at its most.

        Raises:
            DeviceMemoryError: the device does not have that much.
        """
        if kind in BACKWARD:
            return
        self._held += kind == Kind.F
        deferred = self._waiting * self._deferred_bytes
        needed = self._fixed_bytes + self._held * self._per_microbatch + deferred
        if self._capacity_bytes is not None and needed > self._capacity_bytes:
            parts = {
                "weights": self._peak.weights,
                "gradients": self._peak.gradients,
                "optimizer": self._peak.optimizer,
                f"activations of {self._held} in flight": self._held * self._per_microbatch,
            }
            if deferred:
                parts[f"deferred of {self._waiting}"] = deferred
            what = "forward" if kind == Kind.F else "weights' gradients"
            listed = [f"{name} {count / GIB:.2f}" for name, count in parts.items()]
            listed.append(f"other {(needed - sum(parts.values())) / GIB:.2f}")
            raise DeviceMemoryError.of(
                self._where,
                doing=f"the {what} of microbatch {number}",
                detail=f"it needs {needed / GIB:.2f} GiB ({', '.join(listed)}) of {self._capacity_bytes / GIB:.2f} GiB",
            )

    def after(self, kind: Kind) -> None:
        """A compute has ended; a backward lets go of its microbatch, but for what it defers until its W."""
        self._held -= kind in BACKWARD
        self._waiting += (kind in BACKWARD) - (kind == Kind.W)
