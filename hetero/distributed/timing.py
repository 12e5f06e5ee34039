"""Decides when computes, transfers and collectives happen: in production, as soon as they can.

:mod:`hetero.emulation` overrides every method to let a rank behave in time like a device that this machine does not
have, and to record what it did. The runtime calls them at the places where time passes, and knows no more of it.
"""

from collections.abc import Callable, Iterable, Sequence
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


def wait_for_all(works: Iterable[Waitable]) -> None:
    """Wait for communication, one after the other.

    The one place where a thread of a rank waits for what it has started: by it :mod:`.standstill` knows that the main
    thread waits for other ranks.
    """
    for work in works:
        work.wait()


Start = Callable[[], Sequence[Waitable]]
"""Starts communication and returns what to wait for."""


@dataclass(frozen=True, slots=True)
class TransferDirection:
    """One direction of a boundary: ``kind`` is SEND_F from stage ``boundary`` to the next one, SEND_B back."""

    replica: int
    boundary: int
    kind: ActionKind


@dataclass(slots=True)
class HostSpan:
    """Something that a host does: when it is over, in emulated seconds; 0 where nobody counts."""

    end_s: float = 0.0


class Timing:
    """Lets everything happen at once, in the real time of this device.

    What hosts do, threads of a rank wait for, each by its own seconds; the rank's own move when it waits for them.
    """

    def compute(self, action: Action) -> AbstractContextManager[None]:
        """Surrounds a compute whose input is there, or the update."""
        return nullcontext()

    def transfer(
        self, direction: TransferDirection, messages: Sequence[Transfer], number: int, start: Start
    ) -> Sequence[Waitable]:
        """Start this rank's end of its messages of slice ``number``."""
        return start()

    def collective(
        self,
        queued: QueuedAction,
        operation: Collective,
        bucket: Bucket,
        start: Start,
        *,
        ready_s: float | None = None,
    ) -> Sequence[Waitable]:
        """Start the collective ``queued`` of the program among the holders of ``bucket``, all phases of it where
        ``bucket.domains`` has some.

        Args:
            ready_s: when a thread beside the rank has come to it; ``None`` for the rank's own time.
        """
        return start()

    def now_s(self) -> float:
        """The rank's own time."""
        return 0.0

    def reached_s(self, queued: QueuedAction) -> float:
        """When the device has come to what ``queued`` starts behind."""
        return 0.0

    def wait_beside(self, works: Sequence[Waitable]) -> float:
        """Wait for communication in a thread beside the rank; when it was over."""
        wait_for_all(works)
        return 0.0

    def host(self, kind: ActionKind, bucket: Bucket, *, after_s: float) -> AbstractContextManager[HostSpan]:
        """Surrounds what the host of this rank does to its part of ``bucket``, not before ``after_s``."""
        return nullcontext(HostSpan())

    def host_came(self, queued: QueuedAction, at_s: float) -> None:
        """Take note that the rank waited for what ``queued`` does between its host and it, which was done at ``at_s``:
        weights that came, or sums that are there."""

    def block_end_s(self, position: float | None) -> float:
        """When the compute under way has done the block at ``position``, or all of its work."""
        return 0.0

    def copy_block(self, kind: ActionKind, stage: int, position: float, *, after_s: float) -> float:
        """Take note of a copy of what the block at ``position`` of ``stage`` saves of a microbatch, of its gradients,
        which are added up where they come to, or of its weights; when it is over.

        Args:
            after_s: it does not begin before, nor before the last one of its ``kind`` is over. Those of weights are of
                one kind.
        """
        return 0.0

    def block_waited(self, position: float, until_s: float) -> None:
        """Take note that the compute under way could not begin the block at ``position`` before ``until_s``."""

    def meet(self) -> None:
        """Take note that all ranks of the world have just agreed on a step."""

    def outside_steps(self) -> AbstractContextManager[None]:
        """Surrounds what all ranks do between two steps and no step should be charged for: evaluations, saves."""
        return nullcontext()
