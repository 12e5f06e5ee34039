"""Which boxes of a parameter a flat stretch of one of its segments is.

A shard of a bucket cuts segments wherever its edge falls. To save such a stretch under any plan and load it under any
other, it is named by where it lies in the parameter: up to three boxes of a matrix, a part of a row, whole rows, and
another part of a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.plan.gradient_groups import ShardSegment


@dataclass(frozen=True, slots=True)
class SubBlock:
    """``shape`` elements of a parameter from ``offsets`` on, which lie at ``[start, start + numel)`` of the segment."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def sub_blocks_of(segment: ShardSegment, *, start: int, end: int) -> Iterator[SubBlock]:
    """The boxes of elements ``[start, end)`` of ``segment``, whose elements lie row by row.

    Parameters have one or two dimensions.
    """
    parameter = segment.parameter
    origin, extent = [0] * len(parameter.shape), list(parameter.shape)
    if parameter.shard_dim is not None:
        origin[parameter.shard_dim], extent[parameter.shard_dim] = segment.start, segment.end - segment.start
    if len(extent) == 1:
        if start < end:
            yield SubBlock((origin[0] + start,), (end - start,), start)
        return
    columns = extent[1]
    while start < end:
        row, column = divmod(start, columns)
        if column == 0 and end - start >= columns:
            rows, width = (end - start) // columns, columns
        else:
            rows, width = 1, min(columns - column, end - start)
        yield SubBlock((origin[0] + row, origin[1] + column), (rows, width), start)
        start += rows * width
