"""Sends and receives slices asynchronously in one direction of a boundary between two stages, as one rank.

Tensor shapes: S sequence rows this rank holds, B samples of its microbatch, H hidden size.

The shape of every message follows from the plan, so none is announced. Each direction has a communicator of its
own, on which both sides issue the slices in ascending order: NCCL matches by order and ignores tags.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist

from hetero.distributed.timing import Start, Waitable, wait_for_all
from hetero.plan.ir import Stage
from hetero.plan.reshard import Transfer, transfers_by_phase

StartMessages = Callable[[Sequence[Transfer], int, Start], Sequence[Waitable]]


@dataclass(slots=True)
class Pending:
    """Transfers under way. ``tensors`` are the buffers that must live until they are done."""

    works: Sequence[Waitable]
    tensors: list[torch.Tensor]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        """Block until all is there (on NCCL: until the current stream is ordered behind it)."""
        wait_for_all(self.works)
        for target, source in self.copies:
            target.copy_(source)
        self.works, self.tensors, self.copies = [], [], []

    def finish_if_done(self) -> bool:
        """Whether all is there; if so, let go of it. NCCL keeps the buffers of a send until somebody waits for it."""
        done = all(work.is_completed() for work in self.works)
        if done:
            self.wait()
        return done


class Channel:
    """Carries slices from ``sender`` to ``receiver``, both stages of one replica; this rank is in one of them.

    Args:
        group: the ranks of both stages; used by this direction of this boundary only.
        start: starts this rank's messages of a slice: (messages, number of the slice, what does it).
    """

    def __init__(
        self,
        *,
        sender: Stage,
        receiver: Stage,
        rank: int,
        seq_length: int,
        group: dist.ProcessGroup,
        start: StartMessages = lambda messages, number, start: start(),
    ) -> None:
        routes = transfers_by_phase(sender, receiver, seq_length=seq_length)
        self._group = group
        self._start = start
        self._outgoing = [[t for t in route if t.sender == rank] for route in routes]
        self._incoming = [[t for t in route if t.receiver == rank] for route in routes]

    def connect(self, device: torch.device) -> None:
        """Exchange one element with every rank that this one ever sends to or receives from on this channel.

        Point to point on this channel's group, all in one batch; every rank of both stages calls it. Blocks until the
        others are there.
        """
        receivers = sorted({t.receiver for route in self._outgoing for t in route})
        senders = sorted({t.sender for route in self._incoming for t in route})
        element = torch.zeros(1, device=device)
        operations = [dist.P2POp(dist.isend, element, receiver, self._group) for receiver in receivers]
        operations += [dist.P2POp(dist.irecv, torch.empty_like(element), sender, self._group) for sender in senders]
        wait_for_all(_start(operations))

    def send(self, microbatch_SBH: torch.Tensor, *, number: int) -> Pending:
        """Start sending slice ``number``, a part of ``microbatch_SBH``.

        Point to point on this channel's group; the receivers call :meth:`receive` with the same number.
        """
        tensors = [microbatch_SBH[t.sender_rows, t.sender_samples].contiguous() for t in _of(self._outgoing, number)]
        operations = [
            dist.P2POp(dist.isend, tensor, t.receiver, self._group)
            for tensor, t in zip(tensors, _of(self._outgoing, number), strict=True)
        ]
        works = self._start(_of(self._outgoing, number), number, lambda: _start(operations))
        return Pending(works=works, tensors=tensors)

    def receive(self, microbatch_SBH: torch.Tensor, *, number: int) -> Pending:
        """Post the receipt of slice ``number`` into its part of ``microbatch_SBH``, which is valid after ``wait``."""
        operations, tensors, copies = [], [], []
        for t in _of(self._incoming, number):
            part = microbatch_SBH[t.receiver_rows, t.receiver_samples]
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            if buffer is not part:
                copies.append((part, buffer))
            tensors.append(buffer)
            operations.append(dist.P2POp(dist.irecv, buffer, t.sender, self._group))
        works = self._start(_of(self._incoming, number), number, lambda: _start(operations))
        return Pending(works=works, tensors=tensors, copies=copies)

    def warm_up(self, microbatch_SBH: torch.Tensor) -> None:
        """Copy the parts of a microbatch that messages have to be copied from and to, onto themselves."""
        for t in chain.from_iterable(self._outgoing):
            microbatch_SBH[t.sender_rows, t.sender_samples].contiguous()
        for t in chain.from_iterable(self._incoming):
            part = microbatch_SBH[t.receiver_rows, t.receiver_samples]
            part.copy_(part.clone(memory_format=torch.contiguous_format))


def _of(routes: Sequence[list[Transfer]], number: int) -> list[Transfer]:
    return routes[number % len(routes)]


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
