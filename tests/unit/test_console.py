"""Names are printed as they are, whatever Rich would make of them."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from hetero.cli import main
from hetero.console import PAGE_COLUMNS, console
from hetero.printable import PrintableStream, printable_output
from hetero.progress import WorkProgress
from tests.helpers.mistakes import write_files

NAMES = ("rack[a]", "[/]", "[red]x[/red]", ":smile:", "[link=x]")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_printed_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", written := io.StringIO())
    table = Table(name, title=name)
    table.add_row(name)
    out = console()
    out.print(table)
    out.print(name)
    assert out.width == PAGE_COLUMNS
    assert written.getvalue().count(name) == 4


@pytest.mark.parametrize("name", NAMES)
def test_commands_print_such_a_node_type(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended in a traceback, or the node was called ``rack-0``."""
    write_files(tmp_path)
    cluster, plan = tmp_path / "laptops.yaml", str(tmp_path / "plan.json")
    text = cluster.read_text(encoding="utf-8")
    cluster.write_text(text.replace("name: laptop", f"name: {json.dumps(name)}"), encoding="utf-8")
    assert main(["launch", plan, "--cluster", str(cluster)]) == 0
    assert f"│ {name}-0 " in capsys.readouterr().out


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_cell_has_no_control_characters_and_the_table_keeps_its_width(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", PrintableStream(written := io.StringIO()))
    table = Table("a wide column\x1b[5m", title="title\x1b[6m", caption="\u202ecaption")
    table.add_row(Text("text\x1b[7m"), style="red")
    table.add_row("cell\x9b8m")
    out = console(highlight=False)
    out.print(table)
    out.print("line\x1b[9m", Text("words\x1b[10m", style="red"))
    text = written.getvalue()
    # A column has room for the characters that are printable, and the rest is cut.
    for shown in (
        r"title\x1b[6m",
        r"\u202ecaption",
        r"a wide column\x1",
        r"text\x1b[7m",
        r"cell\x9b8m",
        r"line\x1b[9m",
    ):
        assert shown in text
    assert ("\x1b[31m" in text) == on_terminal
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert {each for each in plain if not each.isprintable()} == {"\n"}
    assert len({len(line) for line in plain.splitlines() if line[0] in "┏┃┡│└"}) == 1


def test_styles_reach_a_terminal_also_while_progress_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich puts a stream of its own before the one that shows escapes as text."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with printable_output():
        out = console(stderr=True)
        with WorkProgress("measuring", total=2, text="a\x1b[5m", console=out) as shown:
            print("b\x1b[6m", file=sys.stderr)
            out.print(Text("red", style="red"))
            shown.show(1, "c\x1b[7m")
        print("d\x1b[8m", file=sys.stderr)
    text = written.getvalue()
    assert "\x1b[31mred" in text
    assert r"\x1b[31m" not in text
    for number in range(5, 9):
        assert f"\x1b[{number}m" not in text
    assert all(shown in text for shown in (r"a\x1", "b\n", r"c\x1", r"d\x1b[8m"))
