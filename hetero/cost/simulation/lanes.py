"""Groups the data-parallel ranks of a stage into lanes: ranks that do the same at the same times, and share a clock.

Neighbouring stages may divide their samples differently. Then some ranks of a stage are in other slices than others,
and wait for other ranks: one sample before a stage of two reaches one of the two first. All ranks of a device group
start in one lane, which is split wherever its ranks meet different lanes of a neighbour in some slice, until nothing
is left to split: the coarsest stable partition, as in the minimisation of an automaton (Hopcroft 1971).

    micro_batch_size 1 x dp 1        micro_batch_size 1 x dp 2
       slice 0  ------------------------->  rank 0            two lanes behind a stage that makes
       slice 1  ------------------------->  rank 1            one sample after the other
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from hetero.plan.ir import Replica, Stage
from hetero.plan.reshard import Transfer, num_phases, transfers

Lanes = tuple[tuple[int, ...], ...]
"""By device group, the lane of each data-parallel rank; numbered from 0 in the order of their first ranks."""


def one_lane_each(replica: Replica) -> Lanes:
    """A single lane per device group."""
    return tuple((0,) * replica.stages[group[0]].dp for group in replica.device_groups)


def lanes_of(replica: Replica) -> Lanes:
    """The lanes of the device groups of ``replica``."""
    # In a boundary of one phase every rank is in every slice, so that there is nothing to tell them apart by.
    if all(num_phases(here, after) == 1 for here, after in pairwise(replica.stages)):
        return one_lane_each(replica)
    return _partition(tuple((stage.dp, stage.micro_batch_size) for stage in replica.stages), replica.device_groups)


@lru_cache(maxsize=1024)
def _partition(shapes: tuple[tuple[int, int], ...], groups: tuple[tuple[int, ...], ...]) -> Lanes:
    """The lanes of device ``groups`` whose stages have these ``dp`` and ``micro_batch_size``.

    Remembered, since a planner asks for the same ones again and again.
    """
    exchanges = [
        [_exchanges(here, after, phase) for phase in range(num_phases(here, after))]
        for here, after in pairwise(_stage(*shape) for shape in shapes)
    ]
    group_of = {s: g for g, group in enumerate(groups) for s in group}
    lanes = [[0] * shapes[group[0]][0] for group in groups]
    while True:
        seen: list[list[set[object]]] = [[{lane} for lane in row] for row in lanes]
        for b, phases in enumerate(exchanges):
            here, after = group_of[b], group_of[b + 1]
            for phase, pairs in enumerate(phases):
                for sender, receiver in pairs:
                    seen[here][sender].add((b, phase, lanes[after][receiver]))
                    seen[after][receiver].add((b, phase, lanes[here][sender]))
        split = [_numbered([frozenset(each) for each in row]) for row in seen]
        if split == lanes:
            return tuple(map(tuple, lanes))
        lanes = split


def _stage(dp: int, micro_batch_size: int) -> Stage:
    """A stage of as many ranks without tensor parallelism, which changes nothing about who meets whom."""
    return Stage(
        first_layer=0,
        end_layer=1,
        ranks=tuple(range(dp)),
        device="",
        dp=dp,
        micro_batch_size=micro_batch_size,
        in_flight=1,
    )


def _exchanges(sender: Stage, receiver: Stage, phase: int) -> set[tuple[int, int]]:
    """The data-parallel ranks that exchange something in a slice."""
    messages = transfers(sender, receiver, seq_length=1, phase=phase)
    return {(message.sender_dp_rank, message.receiver_dp_rank) for message in messages}


def _numbered(marks: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(mark, len(numbers)) for mark in marks]


def messages_by_lanes(
    sender: Stage, receiver: Stage, lanes: tuple[Sequence[int], Sequence[int]], *, seq_length: int, phase: int
) -> Mapping[tuple[int, int], Sequence[Transfer]]:
    """The messages of one slice, by the lanes of sender and receiver.

    Args:
        lanes: of the data-parallel ranks of the sender and of the receiver.
    """
    messages = transfers(sender, receiver, seq_length=seq_length, phase=phase)
    if not any(lanes[0]) and not any(lanes[1]):
        return {(0, 0): messages}
    found: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for message in messages:
        found[lanes[0][message.sender_dp_rank], lanes[1][message.receiver_dp_rank]].append(message)
    return found
