"""Text of strangers as it is shown."""

import pytest

from hetero.printable import printable, printable_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a100-80, größe 8 µs", "a100-80, größe 8 µs"),
        ("", ""),
        ("a\nb", r"a\nb"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("a\u202eb", r"a\u202eb"),
        ("a\x9bb", r"a\x9bb"),
        ("a\udc80b", r"a\udc80b"),
    ],
)
def test_one_line_shows_what_moves_a_cursor_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_lines_and_tabs_stay_where_lines_are_shown() -> None:
    assert printable_lines("first\n\tsecond\r\x1b[2J") == "first\n\tsecond\\r\\x1b[2J"
