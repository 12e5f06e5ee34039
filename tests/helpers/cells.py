"""Who holds which part of an activation, written out a second time for tests: every (row, sample) cell has a number,
and a rank's box is the numbers of its cells. numpy cuts the sequence, a loop deals the samples."""

import numpy as np

from hetero.plan.ir import Stage

Boxes = dict[tuple[int, int], np.ndarray]
"""By rank and microbatch: the numbers of the cells that the rank holds of it, [its rows, its samples]."""

_PER_SAMPLE = 1000


def number(row: int, sample: int) -> int:
    """The number of a cell."""
    return _PER_SAMPLE * sample + row


def sample_of(number: int) -> int:
    """The sample of the cell that has this number."""
    return number // _PER_SAMPLE


def boxes(held_by: Stage, num_samples: int, *, seq_length: int) -> Boxes:
    """What the ranks of a stage hold of ``num_samples`` consecutive samples, microbatch after microbatch."""
    cut = held_by.sequence_parallel and held_by.tp > 1
    shares = np.split(np.arange(seq_length), held_by.tp) if cut else [np.arange(seq_length)] * held_by.tp
    samples = iter(range(num_samples))
    held: Boxes = {}
    for microbatch in range(num_samples // (held_by.micro_batch_size * held_by.dp)):
        for dp_rank in range(held_by.dp):
            columns = [next(samples) for _ in range(held_by.micro_batch_size)]
            for tp_rank, rows in enumerate(shares):
                rank = held_by.ranks[dp_rank * held_by.tp + tp_rank]
                held[rank, microbatch] = np.array([[number(row, sample) for sample in columns] for row in rows])
    return held
