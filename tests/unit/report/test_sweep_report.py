"""The tables, changes and the page of a sweep."""

import pytest
from rich.console import Console

from hetero.report.page.sweep_page import sweep_page
from hetero.report.sweep_rows import SweepResult, SweepRow, changes
from hetero.report.tables.sweep import changes_table, headline, sweep_table
from tests.unit.report.test_page import read
from tests.unit.sweep.small import row

ROWS = (
    row("sailor_turing_ampere_24", price_per_hour=36.0, emulated_step_s=1.996, model="gpt-neo-2.7b"),
    row("sailor_turing_ampere_24", price_per_hour=20.0, objective="money", step_s=4.0, num_devices=4096),
    row("autohet_a100_h800_h20", step_s=None, uniform_step_s=None, why="short of <3> GiB", global_batch_size=16384),
    row("b", step_s=3.5),
)


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


@pytest.mark.parametrize("rows", [ROWS, ROWS[1:]])
def test_the_table_fits_80_columns(rows: tuple[SweepRow, ...]) -> None:
    """No number is cut, whatever has to fold."""
    lines = printed(sweep_table(rows, title="A sweep"), 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for number in ("0.3125", "4096", "16384", "no plan", "1.50", "0.86"):
        assert number in text or rows is not ROWS
    assert ("1.996" in text) is (rows is ROWS), "a column that would be empty is left out"


def test_the_headline_says_which_plans_are_slower() -> None:
    assert list(headline(ROWS)) == [
        "3 of 4 combinations have a plan",
        "speed-up over the fastest uniform plan: 0.86 to 1.50, 1.50 in the middle",
        "1 of the plans are slower than that one: raise settings.time_limit_s",
        "predictions are 0.2% off the emulated steps at most",
    ]


def test_changes_are_those_beyond_a_hundredth() -> None:
    before = [row(name) for name in ("same", "faster", "slower", "not", "gone")]
    before += [row(name, step_s=None) for name in ("fits", "no")]
    after = [row("same", step_s=2.01), row("faster", step_s=1.9), row("slower", step_s=2.1), row("fits")]
    after += [row("not", step_s=None), row("no", step_s=None), row("new")]
    found = changes(before, after)
    assert [(each.kind, each.place.cluster) for each in found] == [
        ("faster", "faster"), ("slower", "slower"), ("fits now", "fits"), ("fits no more", "not"), ("new", "new"),
        ("gone", "gone"),
    ]  # fmt: skip
    assert max(map(len, printed(changes_table(found, title="Since"), 80))) <= 80
    assert changes(after, after) == ()


def test_the_page_has_what_there_is() -> None:
    result = SweepResult(title="A <sweep>", mode="emulate", version="1", rows=ROWS)
    found = changes(ROWS[:1], ROWS)
    text = sweep_page(result, origins={"b": "from B"}, changes=found, compared_with="last")
    page = read(text)
    assert page.open == []
    assert list(page.sections) == ["changes", "speedups", "emulated", "cost", "rows", "reasons", "origins"]
    assert len(page.rows["rows"]) == 1 + len(ROWS)
    heads, first, _, without, _ = page.rows["rows"]
    assert dict(zip(heads, first, strict=True))["speed-up"] == "1.50"
    assert dict(zip(heads, first, strict=True))["emulateds"] == "1.996"
    assert without[-1] == "no plan, see below0123456789abcdef"
    assert page.rows["reasons"][1][1] == "short of <3> GiB"
    assert page.rows["origins"][1] == ["b", "from B"]
    loaded = [value for _, key, value in page.attributes if key in ("src", "href") and not value.startswith("#")]
    assert loaded == []
    assert "mathdefault" not in text
    assert text == sweep_page(result, origins={"b": "from B"}, changes=found, compared_with="last")


def test_a_page_without_prices_emulation_or_comparison_has_no_such_parts() -> None:
    result = SweepResult(title="t", mode="simulate", version="1", rows=(row(),))
    page = read(sweep_page(result, origins={}))
    assert list(page.sections) == ["speedups", "rows"]
    nothing = SweepResult(
        title="t", mode="simulate", version="1", rows=(row(step_s=None, uniform_step_s=None, why="w"),)
    )
    assert list(read(sweep_page(nothing, origins={})).sections) == ["rows", "reasons"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("price_per_hour", "is_drawn"), [((0.0, 0.0), False), ((0.0, 1.0), True)])
def test_devices_that_cost_nothing_have_no_place_on_a_logarithmic_axis(
    price_per_hour: tuple[float, float], is_drawn: bool
) -> None:
    """matplotlib warned of a figure without positive values."""
    rows = tuple(row(name, price_per_hour=price) for name, price in zip("ab", price_per_hour, strict=True))
    page = read(sweep_page(SweepResult(title="A sweep", mode="simulate", version="1", rows=rows), origins={}))
    assert ("cost" in page.sections) is is_drawn
