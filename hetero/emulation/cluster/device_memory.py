"""Follows what an emulated device would hold, microbatch by microbatch, and raises when that is more than it has."""

from collections.abc import Mapping

from hetero.cost.stage_memory import MemoryBreakdown, StageMemory
from hetero.errors import DeviceMemoryError
from hetero.schedule.actions import BACKWARD, Action, ActionKind
from hetero.schedule.activation_residency import Residency
from hetero.units import GIB

_WORDS = {ActionKind.F: "forward", ActionKind.R: "second forward", ActionKind.W: "weights' gradients"}


class DeviceMemory:
    """Counts the bytes that the described device of one rank would hold before each compute.

    Args:
        where: names the rank in an error.
        peak: predicted parts of the device when it holds most.
        stages: what a microbatch leaves behind on each stage that the device holds, by the stage's number.
        residency: counts what is held of which stage.
        capacity_bytes: of the device, ``None`` where nobody knows.
    """

    def __init__(
        self,
        where: str,
        *,
        peak: MemoryBreakdown,
        stages: Mapping[int, StageMemory],
        residency: Residency,
        capacity_bytes: int | None,
    ) -> None:
        self._where = where
        self._peak = peak
        self._stages = stages
        self._residency = residency
        self._capacity_bytes = capacity_bytes
        self._fixed_bytes = peak.total - peak.activations - peak.logits - peak.deferred

    def before(self, action: Action) -> None:
        """Check that the device holds what it needs once ``action`` begins.

        A forward adds what its microbatch saves, a W finds what is deferred at its most.

        Raises:
            DeviceMemoryError: the device does not have that much.
        """
        self._residency.begin(action)
        if action.kind in BACKWARD or self._capacity_bytes is None:
            return
        moving = self._moving_parts()
        needed = self._fixed_bytes + sum(moving.values())
        if needed > self._capacity_bytes:
            parts = {
                "weights": self._peak.weights,
                "gradients": self._peak.gradients,
                "optimizer": self._peak.optimizer,
                **moving,
            }
            listed = [f"{name} {count / GIB:.2f}" for name, count in parts.items()]
            listed.append(f"other {(needed - sum(parts.values())) / GIB:z.2f}")
            of_stage = f" on stage {action.stage}" if len(self._stages) > 1 else ""
            raise DeviceMemoryError.of(
                self._where,
                doing=f"the {_WORDS[action.kind]} of microbatch {action.number}{of_stage}",
                detail=f"it needs {needed / GIB:.2f} GiB ({', '.join(listed)}) of {self._capacity_bytes / GIB:.2f} GiB",
            )

    def after(self, action: Action) -> None:
        """Let go of what ``action`` needs no more: a backward's microbatch, but for what it defers until its W."""
        self._residency.end(action)

    def _moving_parts(self) -> dict[str, int]:
        """Bytes that the microbatches of all stages hold now, by what they are for."""
        held = {s: self._residency.held[s] for s in self._stages if s in self._residency.held}
        in_flight = sum(each.in_flight for each in held.values())
        inputs = sum(each.inputs for each in held.values())
        deferred = sum(each.deferred for each in held.values())
        parts = {
            f"activations of {in_flight} in flight": sum(
                each.in_flight * (self._stages[s].activations_per_microbatch + self._stages[s].logits_per_microbatch)
                for s, each in held.items()
            )
        }
        if inputs:
            parts[f"inputs of {inputs}"] = sum(
                each.inputs * self._stages[s].input_per_microbatch for s, each in held.items()
            )
        if deferred:
            parts[f"deferred of {deferred}"] = sum(
                each.deferred * self._stages[s].deferred_per_microbatch for s, each in held.items()
            )
        return parts
