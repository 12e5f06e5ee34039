"""Wording."""

import pytest

from hetero.text import in_halves, number_ranges, numbered


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


@pytest.mark.parametrize(("numbers", "text"), [((3,), "rank 3"), ((0, 1, 4), "ranks 0-1,4")])
def test_one_is_singular(numbers: tuple[int, ...], text: str) -> None:
    assert numbered("rank", numbers) == text


@pytest.mark.parametrize(("number", "text"), [(3, "3"), (3.0, "3"), (3.5, "3½"), (0.5, "½"), (0, "0")])
def test_halves_are_written_as_such(number: float, text: str) -> None:
    assert in_halves(number) == text
