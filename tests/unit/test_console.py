"""Names are printed as they are, whatever Rich would make of them."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.table import Table

from hetero.cli import main
from hetero.console import PAGE_COLUMNS, console
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
