"""Decides when computes, transfers and collectives happen: in production, as soon as they can.

:mod:`hetero.emulation` overrides every method to let a rank behave in time like a device that this machine does not
have, and to record what it did. The runtime calls them at the places where time passes, and knows no more of it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from hetero.plan.gradient_groups import Bucket
from hetero.plan.reshard import Transfer
from hetero.schedule.actions import Action, ActionKind
from hetero.schedule.program import QueuedAction

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Waitable(Protocol):
    """What is used of a ``torch.distributed.Work``."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


Start = Callable[[], Sequence[Waitable]]
"""Starts communication and returns what to wait for."""


@dataclass(frozen=True, slots=True)
class TransferDirection:
    """One direction of a boundary: ``kind`` is SEND_F from stage ``boundary`` to the next one, SEND_B back."""

    replica: int
    boundary: int
    kind: ActionKind


class Timing:
    """Lets everything happen at once, in the real time of this device."""

    def compute(self, action: Action) -> AbstractContextManager[None]:
        """Surrounds a compute whose input is there, or the update."""
        return nullcontext()

    def transfer(
        self, direction: TransferDirection, messages: Sequence[Transfer], number: int, start: Start
    ) -> Sequence[Waitable]:
        """Start this rank's end of its messages of slice ``number``."""
        return start()

    def collective(
        self, queued: QueuedAction, operation: Collective, bucket: Bucket, start: Start
    ) -> Sequence[Waitable]:
        """Start the collective ``queued`` of the program among the holders of ``bucket``, all phases of it where
        ``bucket.domains`` has some."""
        return start()

    def meet(self) -> None:
        """Take note that all ranks of the world have just agreed on a step."""

    def outside_steps(self) -> AbstractContextManager[None]:
        """Surrounds what all ranks do between two steps and no step should be charged for: evaluations, saves."""
        return nullcontext()
