"""Text of strangers as it is shown."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.printable import PrintableStream, printable, printable_lines, printable_output


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


def test_a_stream_writes_to_another_one_and_is_else_as_that_one(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        stream = PrintableStream(file)
        assert stream.write("a\x1b[2J\n") == 6
        stream.writelines(["b\u202e", "\tc\n"])
        stream.flush()
        assert (stream.fileno(), stream.isatty(), stream.encoding) == (file.fileno(), False, "utf-8")
        file.seek(0)
        assert file.read() == "a\\x1b[2J\nb\\u202e\tc\n"


def test_a_program_prints_what_is_printable_and_leaves_the_streams_as_they_were() -> None:
    @printable_output()
    def main() -> int:
        print("a\x1b[2J", flush=True)
        print("b\x9b2J", file=sys.stderr)
        return 3

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main() == 3
        assert (sys.stdout, sys.stderr) == (out, err)
    assert (out.getvalue(), err.getvalue()) == ("a\\x1b[2J\n", "b\\x9b2J\n")


def test_a_stream_that_was_replaced_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent tells its last error after its command, on a stream that a full disk does not end."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())
    with printable_output():
        sys.stdout = own = PrintableStream(io.StringIO())
    assert (sys.stdout, sys.stderr) == (own, err)


@pytest.mark.parametrize("is_printable", [True, False])
def test_output_that_may_be_lost_stays_printable_if_it_was(is_printable: bool) -> None:
    """An agent replaces its streams by ones that never raise; a program of the user's prints what it likes."""
    text = """
import sys
from hetero.distributed.process_output import ignore_output_errors
from hetero.printable import PrintableStream

if sys.argv[1] == "True":
    sys.stdout = PrintableStream(sys.stdout)
ignore_output_errors()
ignore_output_errors()
print("a\\x1b[2J")
"""
    done = subprocess.run(
        [sys.executable, "-c", text, str(is_printable)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ("a\\x1b[2J\n" if is_printable else "a\x1b[2J\n")


def test_a_name_of_a_file_that_is_no_text_can_be_printed() -> None:
    """It is a traceback on a stream of UTF-8 otherwise."""
    name = os.fsdecode(b"a\xff.json")
    with contextlib.redirect_stdout(written := io.TextIOWrapper(io.BytesIO(), encoding="utf-8")), printable_output():
        print(name)
    written.seek(0)
    assert written.read() == "a\\udcff.json\n"
