"""Figures are real files, the same every time, and say what they should."""

import dataclasses
import io
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from PIL import Image

from hetero.cost.stage_memory import MemoryBreakdown
from hetero.report.content import Report
from hetero.report.figures.bars import CUT_AT, PART_COLOURS
from hetero.report.figures.canvas import fitting, inline_svg
from hetero.report.figures.catalogue import DRAWINGS, figure_bytes
from hetero.report.figures.colours import (
    BACKWARD,
    FORWARD,
    HUES,
    INK,
    PAPER,
    device_colour,
    ink_on,
    lighter,
    shade,
    work_colour,
)
from hetero.report.figures.timeline import is_cut
from tests.helpers.cases import slow
from tests.unit.report.samples import (
    SHORT,
    compared_report,
    fleet_report,
    half_cut_report,
    interleaved_report,
    long_report,
    many_sorts_report,
    mixed_report,
    split_report,
)

SVG = "{http://www.w3.org/2000/svg}"


def texts(report: Report, name: str) -> list[str]:
    """Every piece of text in a figure."""
    root = ElementTree.fromstring(figure_bytes(report, name, "svg"))
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["overview", *DRAWINGS])
def test_a_figure_is_an_svg(name: str) -> None:
    found = texts(compared_report(), name)
    assert found[0] == "small on room"
    assert "simulated, not measured" in found[1]


@pytest.mark.slow
@pytest.mark.rotates("figures")
@pytest.mark.parametrize("name", ["comparison", *slow("overview")])
def test_a_figure_is_a_png_or_a_pdf(name: str) -> None:
    with Image.open(io.BytesIO(figure_bytes(compared_report(), name, "png"))) as image:
        assert image.format == "PNG"
        assert image.width == 2000
        assert len(image.convert("RGB").getcolors(2**24)) > 10, "something is on it"
    assert figure_bytes(compared_report(), name, "pdf").startswith(b"%PDF-")


@pytest.mark.parametrize("file_format", ["svg", *slow("png", "pdf")])
def test_the_same_report_gives_the_same_file(file_format: str) -> None:
    first, second = (figure_bytes(compared_report(), "overview", file_format) for _ in range(2))
    assert first == second
    assert b"<dc:date>" not in first


def test_the_cluster_shows_every_stage_and_who_idles() -> None:
    found = texts(mixed_report(), "cluster")
    assert {"r0 · s0", "r1 · s0", "replica 0 · stage 1", "replica 1 · stage 1", "idle"} <= set(found)
    assert {"layers 2-5", "tp 2 · dp 1", "fast · node 0", "4 × A100-40"} <= set(found)
    assert {str(rank) for rank in range(8)} <= set(found)


def test_half_layers_are_named() -> None:
    assert {"0-1 + 2 a…", "L 2 mlp", "layers 3-5"} <= set(texts(half_cut_report(), "cluster"))


def test_thousands_of_devices_stay_a_few_boxes() -> None:
    found = texts(fleet_report(num_nodes=500), "cluster")
    assert {"500 × fast · nodes 0-499", "3 × slow · nodes 500-502", "zone default", "zone far"} <= set(found)
    assert len(found) < 30


def test_the_timeline_has_a_row_per_stage_and_a_number_per_microbatch() -> None:
    found = texts(mixed_report(), "timeline")
    assert {"replicas 0-1, 5 samples each", "stage 0 · 1 × V100-16", "stage 1 · 2 × A100-40"} <= set(found)
    assert {"forward", "backward", "activations sent", "exposed sync", "update"} <= set(found)
    assert {"0", "1", "2", "3", "4"} <= set(found)
    assert not is_cut(mixed_report())


@pytest.mark.slow
def test_stages_in_turns_share_a_row_of_the_timeline_a_bar_and_a_box() -> None:
    report = interleaved_report()
    found = texts(report, "timeline")
    assert {"stages 0,2 · 1 × A100-40", "stages 1,3 · 1 × A100-40", "layers 0-1 | 3-4 · tp 1 · dp 1"} <= set(found)
    assert sum(text.endswith("× A100-40") for text in found) == 4
    assert sum(text == "3" for text in found) >= 2 * 2 * 2, "the last microbatch forward and backward on every stage"
    assert "replicas 0-1 · stages 1,3 · A100-40" in texts(report, "memory")
    assert {"0-1 | 3-4", "r0 · s0,2"} <= set(texts(report, "cluster"))


def test_what_comes_in_a_later_turn_is_lighter() -> None:
    assert lighter("#4f9bd0", 0) == "#4f9bd0"
    channels = [[int(lighter("#4f9bd0", turn)[i : i + 2], 16) for i in (1, 3, 5)] for turn in range(4)]
    assert all(a < b for before, after in pairwise(channels) for a, b in zip(before, after, strict=True))


def test_split_backwards_have_a_colour_and_their_memory_too() -> None:
    assert "weights' gradients" in texts(split_report(), "timeline")
    assert "weights' gradients" not in texts(mixed_report(), "timeline")
    assert "deferred" in texts(split_report(), "memory")


def test_the_middle_of_a_long_step_is_left_out_and_said_to_be() -> None:
    report = long_report()
    assert is_cut(report)
    found = texts(report, "timeline")
    assert any("in between are not drawn" in text for text in found)
    assert "199" in found
    assert "100" not in found


def test_what_is_not_drawn_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.report.figures.timeline.MOST_ROWS", 9)
    monkeypatch.setattr("hetero.report.figures.cluster.MOST_BOXES", 5)
    monkeypatch.setattr("hetero.report.figures.bars.MOST_ROWS", 9)
    report = many_sorts_report()
    assert "3 more groups of replicas are not drawn; the table has them" in texts(report, "timeline")
    assert "and 7 more nodes in other arrangements" in texts(report, "cluster")
    assert "3 more stages are not drawn; the table has them" in texts(report, "memory")


def test_memory_names_every_part_and_the_capacity() -> None:
    report = mixed_report()
    found = texts(report, "memory")
    names = [field.name for field in dataclasses.fields(MemoryBreakdown)]
    absent = {"deferred", "sync_buffers", "held_by_collectives"}
    assert {name.replace("_", " ") for name in names} - set(found) == {name.replace("_", " ") for name in absent}
    assert not any(row.memory.named()[name] for row in report.rows for name in absent)
    assert list(PART_COLOURS) == names
    assert len(set(PART_COLOURS.values())) == len(names)
    assert sum(bool(re.fullmatch(r"[\d.]+ of (16|40) GiB \(\d+%\)", text)) for text in found) == 2


def test_the_comparison_says_how_much_longer_others_take() -> None:
    found = texts(compared_report(), "comparison")
    assert {"this plan", "uniform", "uniform, fast", "harp", f"does not fit: {SHORT}"} <= set(found)
    assert any(text.endswith("(2.00 × as long)") for text in found)


def test_a_hostile_name_is_text() -> None:
    found = texts(mixed_report(cluster_name="$x^2$ <script>&amp;"), "cluster")
    assert found[0] == "small on $x^2$ <script>&amp;"


@pytest.mark.slow
def test_figures_of_one_page_share_no_id() -> None:
    svgs = [inline_svg(draw(compared_report()), name=name, label='"a" <b>') for name, draw in DRAWINGS.items()]
    ids = [each for svg in svgs for each in set(re.findall(r' id="([^"]*)"', svg))]
    assert len(ids) == len(set(ids))
    for svg in svgs:
        ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
        own = set(re.findall(r' id="([^"]*)"', svg))
        assert set(re.findall(r'(?:url\(|href=")#([^")]*)', svg)) <= own


@pytest.mark.parametrize(
    ("room_in", "expected"), [(2.0, "stage 3, long"), (0.5, "stage 3"), (0.25, "s3"), (0.0, ""), (0.12, "s3")]
)
def test_the_longest_wording_that_fits(room_in: float, expected: str) -> None:
    assert fitting(["stage 3, long", "stage 3", "s3"], room_in=room_in, size_pt=6.5) == expected


def test_what_fits_nowhere_is_cut_short() -> None:
    assert fitting(["a long name"], room_in=0.3, size_pt=6.5) == "a lo…"


@pytest.mark.parametrize("hue", range(len(HUES)))
def test_stages_of_a_replica_differ_in_shade_and_can_be_read(hue: int) -> None:
    shades = [shade(hue, s, 8) for s in range(8)]
    assert len(set(shades)) == 8
    assert shades[-1] == shade(hue, 0, 1) == HUES[hue]
    assert ink_on("#ffffff") == INK
    assert ink_on("#000000") == PAPER


def test_a_long_bar_is_cut_and_its_figure_is_not() -> None:
    """The others keep a length to be compared by: the axis ends at four times the plan."""
    report = compared_report()
    uniform, *others = report.others
    assert uniform.best is not None
    far = dataclasses.replace(uniform.best.simulation, step_s=100 * report.simulation.step_s)
    longest = dataclasses.replace(uniform, best=dataclasses.replace(uniform.best, simulation=far))
    found = texts(dataclasses.replace(report, others=(longest, *others)), "comparison")
    assert any("(100.00 × as long)" in text for text in found)
    ticks = [float(text) for text in found if re.fullmatch(r"[\d.]+", text)]
    assert max(ticks) <= 1.01 * CUT_AT * report.simulation.step_s


def test_colours_by_device_type() -> None:
    """The same device has one colour on every row, box and bar; forwards are lighter than backwards."""
    report = dataclasses.replace(mixed_report(), colours="device")
    fast, slow = (device_colour(report, device) for device in ("A100-40", "V100-16"))
    assert fast != slow
    assert {"A100-40: 4 of 4 at work", "V100-16: 2 of 4 at work"} <= set(texts(report, "cluster"))
    found = texts(report, "timeline")
    assert {"A100-40", "V100-16", "activations sent"} <= set(found)
    assert not {"forward", "backward"} & set(found)
    assert work_colour(report, BACKWARD, "A100-40") == fast
    assert work_colour(report, FORWARD, "A100-40") == lighter(fast, 2)
    for name in ("cluster", "timeline", "memory"):
        drawn = figure_bytes(report, name, "svg").decode()
        assert fast in drawn
        assert slow in drawn
