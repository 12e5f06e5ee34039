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


class Transfer(NamedTuple):
    """One message of a slice. Rows and samples index the sender's and the receiver's own microbatch tensor [S, B].

    sender_dp_rank, receiver_dp_rank: in their stages.
    num_tokens: rows x samples; a hidden vector is sent of each.
    """

    sender: int
    receiver: int
    sender_dp_rank: int
    receiver_dp_rank: int
    num_tokens: int
    sender_rows: slice
    sender_samples: slice
    receiver_rows: slice
    receiver_samples: slice


def num_phases(sender: Stage, receiver: Stage) -> int:
    """How many different slices there are: slice ``i`` has the routes of phase ``i % num_phases``."""
    sizes = sender.samples_per_microbatch, receiver.samples_per_microbatch
    return max(sizes) // min(sizes)


def transfers(sender: Stage, receiver: Stage, *, seq_length: int, phase: int) -> tuple[Transfer, ...]:
    """The messages of one slice, one per pair of ranks at most, in an order that both stages share."""
    rows = list(_shared_rows(sender, receiver, seq_length))
    return tuple(
        # By position: of thousands of ranks there are thousands, and keywords take half as long again.
        Transfer(
            sender.ranks[sender_dp * sender.tp + sender_tp],
            receiver.ranks[receiver_dp * receiver.tp + receiver_tp],
            sender_dp,
            receiver_dp,
            num_rows * num_samples,
            sender_rows,
            sender_samples,
            receiver_rows,
            receiver_samples,
        )
        for sender_dp, sender_samples, receiver_dp, receiver_samples, num_samples in _shared_samples(
            sender, receiver, phase
        )
        for sender_tp, sender_rows, receiver_tp, receiver_rows, num_rows in rows
    )


Shared = tuple[int, slice, int, slice, int]
"""What two ranks have in common: the sender and where it has it, the receiver and where it wants it, and how much."""


def _shared_samples(sender: Stage, receiver: Stage, phase: int) -> Iterator[Shared]:
    """The samples of a slice by data-parallel ranks."""
    size = min(sender.samples_per_microbatch, receiver.samples_per_microbatch)
    # Where the slice begins in the microbatch of either; one of the two is no larger.
    sent, received = phase * size % sender.samples_per_microbatch, phase * size % receiver.samples_per_microbatch
    return _shared(sent, sender.micro_batch_size, received, receiver.micro_batch_size, size)


def _shared_rows(sender: Stage, receiver: Stage, seq_length: int) -> Iterator[Shared]:
    """The rows of the sequence by tensor-parallel ranks; one sender each where all senders hold the same rows."""
    wanted = seq_length // receiver.tp if receiver.splits_sequence else seq_length
    for receiver_tp in range(receiver.tp):
        first = receiver_tp * wanted if receiver.splits_sequence else 0
        if sender.splits_sequence:
            for sender_tp, held, _, got, num_rows in _shared(first, seq_length // sender.tp, 0, wanted, wanted):
                yield sender_tp, held, receiver_tp, got, num_rows
        else:
            sender_tp = receiver_tp * sender.tp // receiver.tp
            yield sender_tp, slice(first, first + wanted), receiver_tp, slice(0, wanted), wanted


def _shared(sent: int, sender_block: int, received: int, receiver_block: int, length: int) -> Iterator[Shared]:
    """Cut ``length`` indices wherever a block of either side ends, and say where each part lies in its two blocks.

    Only pairs with something in common are visited, of what may be a million.

    Args:
        sent: the first of the indices as the sender counts them.
        received: the same one as the receiver counts it.
    """
    done = 0
    while done < length:
        i, start = divmod(sent + done, sender_block)
        j, to = divmod(received + done, receiver_block)
        count = min(length - done, sender_block - start, receiver_block - to)
        yield i, slice(start, start + count), j, slice(to, to + count), count
        done += count
