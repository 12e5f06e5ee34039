"""What each rank of one stage sends to each rank of the next, when their tp, dp and microbatches differ.

Between two layers an activation is a tensor of S sequence rows x B samples x H. A rank of a stage holds a box of it:
the samples of its data-parallel rank, and all rows, or with sequence parallelism its share of them. A slice is the
smaller microbatch of the two stages; for each slice, every receiver needs its own box intersected with the slice,
and gets it from senders whose boxes cover it. Where senders hold the same rows (tensor parallelism without
sequence parallelism repeats them) the receivers are spread over them, each box crossing once per receiver.

The same rule serves gradients with the two stages exchanged: what a rank holds of an activation, it needs of its
gradient.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hetero.plan.ir import Stage


class Span(NamedTuple):
    """Indices ``[start, end)``."""

    start: int
    end: int

    def shifted(self, by: int) -> "Span":
        return Span(self.start + by, self.end + by)

    def since(self, origin: int) -> slice:
        """As a slice of a tensor whose first index stands for ``origin``."""
        return slice(self.start - origin, self.end - origin)

    def blocks(self, length: int) -> Iterator[tuple[int, "Span"]]:
        """What lies in block ``[i * length, (i + 1) * length)``, with ``i``; those that have some of it only."""
        for i in range(self.start // length, -(-self.end // length)):
            yield i, Span(max(self.start, i * length), min(self.end, (i + 1) * length))


class Transfer(NamedTuple):
    """One message of a slice. Rows and samples index the sender's and the receiver's own microbatch tensor [S, B].

    The data-parallel ranks are those of ``sender`` and ``receiver`` in their stages.
    """

    sender: int
    receiver: int
    sender_dp_rank: int
    receiver_dp_rank: int
    sender_rows: slice
    sender_samples: slice
    receiver_rows: slice
    receiver_samples: slice

    @property
    def num_tokens(self) -> int:
        """Rows x samples; of each, a hidden vector is sent."""
        rows, samples = self.sender_rows, self.sender_samples
        return int((rows.stop - rows.start) * (samples.stop - samples.start))


def num_phases(sender: Stage, receiver: Stage) -> int:
    """How many different slices there are: slice ``i`` has the routes of phase ``i % num_phases``."""
    sizes = sender.samples_per_microbatch, receiver.samples_per_microbatch
    return max(sizes) // min(sizes)


def transfers(sender: Stage, receiver: Stage, *, seq_length: int, phase: int) -> tuple[Transfer, ...]:
    """The messages of one slice, one per pair of ranks at most, in an order that both stages share."""
    rows = list(_shared_rows(sender, receiver, seq_length))
    return tuple(
        Transfer(
            sender=sender.ranks[sender_dp * sender.tp + sender_tp],
            receiver=receiver.ranks[receiver_dp * receiver.tp + receiver_tp],
            sender_dp_rank=sender_dp,
            receiver_dp_rank=receiver_dp,
            sender_rows=sender_rows,
            sender_samples=sender_samples,
            receiver_rows=receiver_rows,
            receiver_samples=receiver_samples,
        )
        for sender_dp, sender_samples, receiver_dp, receiver_samples in _shared_samples(sender, receiver, phase)
        for sender_tp, sender_rows, receiver_tp, receiver_rows in rows
    )


Shared = tuple[int, slice, int, slice]
"""What two ranks have in common: the sender and what it is there, the receiver and what it is there."""


def _shared_samples(sender: Stage, receiver: Stage, phase: int) -> Iterator[Shared]:
    """By data-parallel ranks; only pairs that have samples in common are visited, of what may be a million."""
    size = min(sender.samples_per_microbatch, receiver.samples_per_microbatch)
    # Where the slice begins in the microbatch of either: one of the two is the slice.
    sent = phase * size % sender.samples_per_microbatch
    received = phase * size % receiver.samples_per_microbatch
    for receiver_dp, wanted in Span(received, received + size).blocks(receiver.micro_batch_size):
        for sender_dp, held in wanted.shifted(sent - received).blocks(sender.micro_batch_size):
            receiver_samples = held.shifted(received - sent).since(receiver_dp * receiver.micro_batch_size)
            yield sender_dp, held.since(sender_dp * sender.micro_batch_size), receiver_dp, receiver_samples


def _shared_rows(sender: Stage, receiver: Stage, seq_length: int) -> Iterator[Shared]:
    """By tensor-parallel ranks; each receiver has one sender where all senders hold the same rows."""
    for receiver_tp in range(receiver.tp):
        wanted = _rows(receiver, receiver_tp, seq_length)
        if sender.splits_sequence:
            for sender_tp, held in wanted.blocks(seq_length // sender.tp):
                first = _rows(sender, sender_tp, seq_length).start
                yield sender_tp, held.since(first), receiver_tp, held.since(wanted.start)
        else:
            sender_tp = receiver_tp * sender.tp // receiver.tp
            yield sender_tp, wanted.since(0), receiver_tp, wanted.since(wanted.start)


def _rows(stage: Stage, tp_rank: int, seq_length: int) -> Span:
    """The sequence rows that a rank holds between two layers."""
    if not stage.splits_sequence:
        return Span(0, seq_length)
    rows = seq_length // stage.tp
    return Span(tp_rank * rows, (tp_rank + 1) * rows)
