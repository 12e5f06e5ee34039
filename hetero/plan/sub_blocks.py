"""Describes a flat range of a shard segment as rectangular sub-blocks of its parameter.

A shard of a bucket cuts segments wherever its edge falls. To save such a range under any plan and load it under any
other, it is named by where it lies in the parameter. A range of a matrix is up to three sub-blocks: a part of a row,
whole rows, and another part of a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hetero.plan.gradient_groups import ShardSegment


@dataclass(frozen=True, slots=True)
class SubBlock:
    """A rectangular block of a parameter that is contiguous in its segment.

    offsets, shape: of the block, in the parameter.
    start: where it lies in the segment: at ``[start, start + numel)``.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def sub_blocks_of(segment: ShardSegment, *, start: int, end: int) -> Iterator[SubBlock]:
    """The sub-blocks that make up elements ``[start, end)`` of ``segment``, which lies row by row, in this order.

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
