"""Computes which rows and samples each rank of a stage sends to each rank of the next one.

Between two layers an activation is a tensor of S sequence rows x B samples x H. A rank of a stage holds a block of it:
the samples of its data-parallel rank, and all rows, or with sequence parallelism its share of them. The two stages may
differ in tp, dp and microbatch. A slice is the smaller microbatch of the two; of each slice, every receiver needs the
part that lies in its own block, and gets it from the senders whose blocks cover it. Where senders hold the same rows
(tensor parallelism without sequence parallelism repeats them) the receivers are spread over them, so that each part
crosses once per receiver.

The same rule serves gradients with the two stages exchanged: what a rank holds of an activation, it needs of its
gradient.
"""

from collections.abc import Iterator
from typing import NamedTuple

from hetero.plan.ir import Stage


class Transfer(NamedTuple):
    """One message of a slice, from one rank to another.

    sender_dp_rank, receiver_dp_rank: data-parallel ranks, in the stage of each.
    num_tokens: rows x samples of the message; each token is a hidden vector.
    sender_rows, sender_samples, receiver_rows, receiver_samples: index the microbatch tensor [S, B, H] of that rank.
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
    """After how many slices the messages repeat: those of slice ``i`` are those of phase ``i % num_phases``."""
    sizes = sender.samples_per_microbatch, receiver.samples_per_microbatch
    return max(sizes) // min(sizes)


def transfers(sender: Stage, receiver: Stage, *, seq_length: int, phase: int) -> tuple[Transfer, ...]:
    """The messages of one slice, at most one per pair of ranks, in the order that both stages follow.

    Args:
        phase: the number of the slice modulo :func:`num_phases`.
    """
    rows = list(_common_rows(sender, receiver, seq_length))
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
        for sender_dp, sender_samples, receiver_dp, receiver_samples, num_samples in _common_samples(
            sender, receiver, phase
        )
        for sender_tp, sender_rows, receiver_tp, receiver_rows, num_rows in rows
    )


def transfers_by_phase(sender: Stage, receiver: Stage, *, seq_length: int) -> list[tuple[Transfer, ...]]:
    """The messages of every phase: those of slice ``i`` stand at ``i % len``."""
    return [
        transfers(sender, receiver, seq_length=seq_length, phase=phase) for phase in range(num_phases(sender, receiver))
    ]


Overlap = tuple[int, slice, int, slice, int]
"""What the blocks of two ranks have in common: sender, where in its block, receiver, where in its block, how much."""


def _common_samples(sender: Stage, receiver: Stage, phase: int) -> Iterator[Overlap]:
    """The samples of a slice that pairs of data-parallel ranks have in common."""
    size = min(sender.samples_per_microbatch, receiver.samples_per_microbatch)
    # Where the slice begins in the microbatch of either; one of the two is no larger.
    sent, received = phase * size % sender.samples_per_microbatch, phase * size % receiver.samples_per_microbatch
    return _overlaps(sent, sender.micro_batch_size, received, receiver.micro_batch_size, size)


def _common_rows(sender: Stage, receiver: Stage, seq_length: int) -> Iterator[Overlap]:
    """The rows that pairs of tensor-parallel ranks have in common; one sender each where all senders hold the same."""
    wanted = seq_length // receiver.tp if receiver.splits_sequence else seq_length
    for receiver_tp in range(receiver.tp):
        first = receiver_tp * wanted if receiver.splits_sequence else 0
        if sender.splits_sequence:
            for sender_tp, held, _, got, num_rows in _overlaps(first, seq_length // sender.tp, 0, wanted, wanted):
                yield sender_tp, held, receiver_tp, got, num_rows
        else:
            sender_tp = receiver_tp * sender.tp // receiver.tp
            yield sender_tp, slice(first, first + wanted), receiver_tp, slice(0, wanted), wanted


def _overlaps(sent: int, sender_block: int, received: int, receiver_block: int, length: int) -> Iterator[Overlap]:
    """Cuts ``length`` indices wherever a block of either side ends, and yields where each part lies in its two blocks.

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
