"""Wording."""

import pytest

from hetero.text import number_ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 3, 6], "0-3,6"),
        ([7, 8, 1, 2], "7-8,1-2"),
        ([1, 0], "1,0"),
        ([2, 4, 6], "2,4,6"),
    ],
)
def test_numbers_are_written_as_ranges_in_their_order(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text
