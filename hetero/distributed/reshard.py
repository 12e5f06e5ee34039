"""What each rank of one stage sends to each rank of the next, when their tp, dp and microbatches differ.

Between two layers an activation is a tensor of S sequence rows x B samples x H. A rank of a stage holds a box of it:
the samples of its data-parallel rank, and all rows, or with sequence parallelism its share of them. A slice is the
smaller microbatch of the two stages; for each slice, every receiver needs its own box intersected with the slice,
and gets it from senders whose boxes cover it. Where senders hold the same rows (tensor parallelism without
sequence parallelism repeats them) the receivers are spread over them, each box crossing once per receiver.

The same rule serves gradients with the two stages exchanged: what a rank holds of an activation, it needs of its
gradient.
"""

from dataclasses import dataclass

from hetero.plan.ir import Stage


@dataclass(frozen=True, slots=True)
class Span:
    """Indices ``[start, end)``."""

    start: int
    end: int

    def __and__(self, other: "Span") -> "Span":
        return Span(max(self.start, other.start), min(self.end, other.end))

    def __bool__(self) -> bool:
        return self.start < self.end

    def since(self, origin: int) -> slice:
        """As a slice of a tensor whose first index stands for ``origin``."""
        return slice(self.start - origin, self.end - origin)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One message of a slice. Rows and samples index the sender's and the receiver's own microbatch tensor [S, B]."""

    sender: int
    receiver: int
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
    size = min(sender.samples_per_microbatch, receiver.samples_per_microbatch)
    messages = []
    for receiver_dp in range(receiver.dp):
        wanted = _samples_in_slice(receiver, receiver_dp, size, phase)
        for sender_dp in range(sender.dp):
            held = _samples_in_slice(sender, sender_dp, size, phase)
            if not held & wanted:
                continue
            for receiver_tp, sender_tp in _tp_pairs(sender, receiver, seq_length):
                rows = _rows(sender, sender_tp, seq_length) & _rows(receiver, receiver_tp, seq_length)
                messages.append(
                    Transfer(
                        sender=sender.ranks[sender_dp * sender.tp + sender_tp],
                        receiver=receiver.ranks[receiver_dp * receiver.tp + receiver_tp],
                        sender_rows=rows.since(_rows(sender, sender_tp, seq_length).start),
                        receiver_rows=rows.since(_rows(receiver, receiver_tp, seq_length).start),
                        sender_samples=(held & wanted).since(_first_sample(sender, sender_dp, size, phase)),
                        receiver_samples=(held & wanted).since(_first_sample(receiver, receiver_dp, size, phase)),
                    )
                )
    return tuple(messages)


def _tp_pairs(sender: Stage, receiver: Stage, seq_length: int) -> list[tuple[int, int]]:
    """(receiver, sender) tensor-parallel ranks with rows in common; one sender each where all hold the same rows."""
    pairs = []
    for receiver_tp in range(receiver.tp):
        if sender.splits_sequence:
            needed = _rows(receiver, receiver_tp, seq_length)
            pairs += [(receiver_tp, t) for t in range(sender.tp) if _rows(sender, t, seq_length) & needed]
        else:
            pairs.append((receiver_tp, receiver_tp * sender.tp // receiver.tp))
    return pairs


def _rows(stage: Stage, tp_rank: int, seq_length: int) -> Span:
    """The sequence rows that a rank holds between two layers."""
    if not stage.splits_sequence:
        return Span(0, seq_length)
    rows = seq_length // stage.tp
    return Span(tp_rank * rows, (tp_rank + 1) * rows)


def _first_sample(stage: Stage, dp_rank: int, slice_size: int, phase: int) -> int:
    """The first sample of a data-parallel rank's microbatch, counted from the start of the slice."""
    slices_per_microbatch = stage.samples_per_microbatch // slice_size
    return dp_rank * stage.micro_batch_size - phase % slices_per_microbatch * slice_size


def _samples_in_slice(stage: Stage, dp_rank: int, slice_size: int, phase: int) -> Span:
    """The samples of the slice that a data-parallel rank holds."""
    first = _first_sample(stage, dp_rank, slice_size, phase)
    return Span(first, first + stage.micro_batch_size) & Span(0, slice_size)
