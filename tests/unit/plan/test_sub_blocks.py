"""Sub-blocks of a flat range: every element of it once, where it lies in the whole parameter."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hetero.plan.gradient_groups import ShardSegment
from hetero.plan.sub_blocks import sub_blocks_of
from hetero.spec.parameters import Parameter


@st.composite
def segments(draw: st.DrawFn) -> ShardSegment:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    size = 1 if dim is None else shape[dim]
    start = draw(st.integers(0, size - 1))
    end = draw(st.integers(start + 1, size))
    parameter = Parameter(name="p", shape=shape, position=0, shard_dim=dim)
    return ShardSegment(parameter=parameter, start=0 if dim is None else start, end=1 if dim is None else end)


@given(segments(), st.data())
def test_sub_blocks_are_the_range(segment: ShardSegment, data: st.DataObject) -> None:
    """Numbering the elements of the parameter, the sub-blocks have just the numbers of the range, in its order."""
    start = data.draw(st.integers(0, segment.numel))
    end = data.draw(st.integers(start, segment.numel))
    whole = np.arange(segment.parameter.numel).reshape(segment.parameter.shape)
    dim = segment.parameter.shard_dim
    part = whole if dim is None else np.take(whole, range(segment.start, segment.end), axis=dim)
    blocks = list(sub_blocks_of(segment, start=start, end=end))
    assert len(blocks) <= 3
    found = []
    for block in blocks:
        assert block.start == start + len(found)
        there = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.shape, strict=True))
        assert whole[there].shape == block.shape
        found += whole[there].ravel().tolist()
    assert found == part.ravel()[start:end].tolist()


def test_nothing_is_no_block() -> None:
    segment = ShardSegment(parameter=Parameter(name="p", shape=(3, 4), position=0), start=0, end=1)
    assert list(sub_blocks_of(segment, start=5, end=5)) == []
    assert list(sub_blocks_of(segment, start=7, end=5)) == [], "a range that does not reach the segment"
