"""Who keeps the buffers of a transfer, and for how long."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hetero.distributed.p2p import Pending
from hetero.runtime.boundary_p2p import BoundaryP2P


@dataclass
class Work:
    """A send of NCCL: completed one way or the other, its buffers are kept until somebody has waited for it."""

    is_there: bool = True
    keeps_buffers: bool = True

    def is_completed(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        self.keeps_buffers = False


class SendingChannel:
    """Sends by the given works, one after the other."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = iter(works)

    def send(self, microbatch_SBH: torch.Tensor, *, number: int) -> Pending:
        return Pending(works=[next(self._works)], tensors=[microbatch_SBH])


def boundary(works: Sequence[Work]) -> BoundaryP2P:
    channel = SendingChannel(works)
    return BoundaryP2P(incoming=channel, outgoing=channel, slices_per_microbatch=1, new_tensor=lambda: torch.empty(1))  # type: ignore[arg-type]


def test_a_send_that_is_done_is_waited_for() -> None:
    """Before the next one starts, and not only at the end of the step; one that is under way holds nobody up."""
    works = [Work(), Work(is_there=False), Work(), Work()]
    ours = boundary(works)
    for number in range(4):
        ours.offer(number, torch.empty(1))
        ours.start_send(number)
    assert [work.keeps_buffers for work in works] == [False, True, False, True]
    ours.finish_sends()
    assert not any(work.keeps_buffers for work in works)


def test_no_more_are_under_way_than_asked_for() -> None:
    works = [Work(is_there=False) for _ in range(3)]
    ours = boundary(works)
    for number in range(3):
        ours.offer(number, torch.empty(1))
        ours.start_send(number, at_most=2)
    assert [work.keeps_buffers for work in works] == [False, True, True]
