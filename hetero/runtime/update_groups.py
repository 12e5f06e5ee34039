"""Says which settings of the optimizer each stretch of a bucket is updated with."""

from collections.abc import Iterator
from enum import IntEnum
from itertools import groupby

from hetero.runtime.buckets import LocalBucket
from hetero.spec.parameters import Parameter


class UpdateGroup(IntEnum):
    """Parameters that share a learning rate and a weight decay; the value is the place of their torch parameter group.

    DECOUPLED: the word embedding and the output layer, where they have a learning rate of their own
    (Megatron-LM's ``--decoupled-lr``); both decay.
    """

    DECAYED = 0
    NOT_DECAYED = 1
    DECOUPLED = 2


def group_of(parameter: Parameter, *, decoupled: bool) -> UpdateGroup:
    """The group of a parameter.

    Args:
        decoupled: embedding and output layer have a learning rate of their own.
    """
    if decoupled and parameter.is_word_embedding_or_output:
        return UpdateGroup.DECOUPLED
    return UpdateGroup.DECAYED if parameter.decays else UpdateGroup.NOT_DECAYED


def updated_places(local: LocalBucket, *, decoupled: bool) -> Iterator[tuple[slice, UpdateGroup]]:
    """What of a bucket this rank updates, and with which settings: stretches in the order of the buffer.

    Padding belongs to the segment before it.
    """
    bucket, summed = local.bucket, local.summed
    groups = [group_of(segment.parameter, decoupled=decoupled) for segment in bucket.segments]
    starts = bucket.offsets
    for group, members in groupby(range(len(groups)), key=groups.__getitem__):
        first, *others = members
        last = others[-1] if others else first
        end = bucket.length if last == len(groups) - 1 else starts[last + 1]
        place = slice(max(starts[first], summed.start), min(end, summed.stop))
        if place.start < place.stop:
            yield place, group
