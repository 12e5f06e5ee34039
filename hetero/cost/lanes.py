"""Which data-parallel ranks of a stage run alike, so that one clock serves all of them: a lane.

Neighbouring stages may divide their samples differently. Then some ranks of a stage are in other slices than others,
and wait for other ranks: one sample before a stage of two reaches one of the two first. All ranks of a device group
start in one lane, which is split wherever its ranks meet different lanes of a neighbour in some slice, until nothing
is left to split: the coarsest stable partition, as in the minimisation of an automaton (Hopcroft 1971).

    micro_batch_size 1 x dp 1        micro_batch_size 1 x dp 2
       slice 0  ------------------------->  rank 0            two lanes behind a stage that makes
       slice 1  ------------------------->  rank 1            one sample after the other
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from hetero.plan.ir import Replica, Stage
from hetero.plan.reshard import Transfer, num_phases, transfers

Lanes = tuple[tuple[int, ...], ...]
"""By device group, the lane of each data-parallel rank; numbered from 0 in the order of their first ranks."""

Meetings = list[list[set[tuple[int, int]]]]
"""By boundary and phase, the data-parallel ranks before and after it that exchange something."""


def one_lane_each(replica: Replica) -> Lanes:
    """A single lane per device group."""
    return tuple((0,) * replica.stages[group[0]].dp for group in replica.device_groups)


def lanes_of(replica: Replica, *, seq_length: int) -> Lanes:
    """The lanes of the device groups of ``replica``."""
    # In a boundary of one phase every rank is in every slice, so that there is nothing to tell them apart by.
    if all(num_phases(here, after) == 1 for here, after in pairwise(replica.stages)):
        return one_lane_each(replica)
    met = [
        [_meetings(here, after, seq_length, phase) for phase in range(num_phases(here, after))]
        for here, after in pairwise(replica.stages)
    ]
    groups = replica.device_groups
    group_of = {s: g for g, group in enumerate(groups) for s in group}
    lanes = [list(row) for row in one_lane_each(replica)]
    while True:
        seen: list[list[set[object]]] = [[{lane} for lane in row] for row in lanes]
        for b, phases in enumerate(met):
            here, after = group_of[b], group_of[b + 1]
            for phase, pairs in enumerate(phases):
                for sender, receiver in pairs:
                    seen[here][sender].add((b, phase, 0, lanes[after][receiver]))
                    seen[after][receiver].add((b, phase, 1, lanes[here][sender]))
        split = [_numbered([frozenset(each) for each in row]) for row in seen]
        if split == lanes:
            return tuple(map(tuple, lanes))
        lanes = split


def _numbered(marks: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]


def _meetings(sender: Stage, receiver: Stage, seq_length: int, phase: int) -> set[tuple[int, int]]:
    messages = transfers(sender, receiver, seq_length=seq_length, phase=phase)
    return {(message.sender_dp_rank, message.receiver_dp_rank) for message in messages}


def messages_by_lanes(
    sender: Stage, receiver: Stage, lanes: tuple[Sequence[int], Sequence[int]], *, seq_length: int, phase: int
) -> dict[tuple[int, int], list[Transfer]]:
    """The messages of one slice by the lanes that send and receive them.

    Args:
        lanes: of the data-parallel ranks of the sender and of the receiver.
    """
    found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for message in transfers(sender, receiver, seq_length=seq_length, phase=phase):
        found[lanes[0][message.sender_dp_rank], lanes[1][message.receiver_dp_rank]].append(message)
    return found
