"""The page: well-formed, complete, of one piece, and the same every time."""

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hetero.cli import main
from hetero.cost.host_memory import host_memory_of_nodes
from hetero.cost.memory import plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.cost.stage_memory import MemoryBreakdown
from hetero.planner.certainty import Rival
from hetero.planner.reference.yardsticks import Yardstick
from hetero.report.content import Report
from hetero.report.launch_lines import launch_lines
from hetero.report.page.html_page import html_page
from hetero.report.plan_wording import range_of
from hetero.serialization import save
from tests.helpers.cases import slow
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, profile
from tests.unit.report.samples import (
    SHORT,
    cluster,
    compared_report,
    cpu_report,
    fleet_report,
    half_cut_report,
    interleaved_report,
    long_report,
    many_sorts_report,
    mixed_report,
    offloaded_report,
    split_report,
)

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Reader(HTMLParser):
    """Checks that tags nest, and collects texts, attributes and table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.sections: dict[str, list[str]] = {}
        self.rows: dict[str, list[list[str]]] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self._section = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
            self.sections[self._section] = []
            self.rows[self._section] = []
        if tag == "tr":
            self.rows[self._section].append([])
        if tag in ("td", "th"):
            self.rows[self._section][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._section:
            self.sections[self._section].append(data.strip())
        if self.open and {"td", "th"} & set(self.open):
            self.rows[self._section][-1][-1] += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader


def cells(reader: Reader, section: str) -> list[list[str]]:
    """The rows of a section's table, its head left out."""
    return [[cell.strip() for cell in row] for row in reader.rows[section]][1:]


@functools.cache
def page_of(make: Callable[[], Report]) -> str:
    """The page of a sample; its figures take half a second to draw."""
    return html_page(make())


REPORTS = [
    mixed_report, compared_report, fleet_report, half_cut_report, long_report, many_sorts_report, interleaved_report,
]  # fmt: skip


@pytest.mark.parametrize("make", [REPORTS[0], *slow(*REPORTS[1:], rotates="reports")])
def test_the_page_is_well_formed_and_has_a_row_per_stage(make: Callable[[], Report]) -> None:
    report = make()
    reader = read(page_of(make))
    assert len(cells(reader, "plan")) == len(report.rows)
    assert list(reader.sections) == [
        "cluster", "timeline", "memory", *(["comparison"] if report.others else []), "plan", "launch", "basis",
    ]  # fmt: skip


def test_the_plan_is_told_stage_by_stage() -> None:
    report = mixed_report()
    first, second = cells(read(page_of(mixed_report)), "plan")
    assert first[:13] == ["0-1", "5", "0", "emb + 0-1", "V100-16", "4-5", "1", "1", "-", "1", "5", "2", "full"]
    assert second[:13] == ["", "", "1", "2-5 + head", "A100-40", "0-3", "2", "1", "yes", "1", "5", "1", "-"]
    times = report.simulation.stages[0, 0]
    assert first[13] == f"{times.busy_s / report.simulation.step_s:.0%}"
    assert "Idle GPUs: 6-7." in read(page_of(mixed_report)).sections["plan"]


def test_the_lines_that_start_the_plan_are_those_of_its_file_and_its_nodes() -> None:
    report = dataclasses.replace(mixed_report(), plan_file=Path("my plan.json"))
    said = "\n".join(read(html_page(report)).sections["launch"])
    nodes = [f"{each.name}-{i}" for each in report.cluster.node_types for i in range(each.count)]
    assert "hetero launch 'my plan.json' --hosts " in said
    assert all(f"{name} (node {node}, " in said for node, name in enumerate(nodes))
    assert said.count("torchrun --nnodes") == said.count("--hetero-plan 'my plan.json'") == len(nodes)


def test_the_page_shows_what_hetero_launch_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word, but for the torchrun of another machine, and the port, which the command draws."""
    report = mixed_report()
    file, spec = tmp_path / "plan.json", tmp_path / "cluster.yaml"
    save(report.plan, file)
    save(report.cluster, spec)
    assert main(["launch", str(file), "--cluster", str(spec), "--torchrun", "torchrun"]) == 0
    drawn = re.compile(r"(?<=fast-0:)\d+")
    printed = drawn.sub("PORT", capsys.readouterr().out)
    lines = launch_lines(report.plan, report.cluster, file)
    for title, line in lines.hosts:
        own = line.splitlines()[-1]
        assert f"# {title}\n{drawn.sub('PORT', line).removesuffix(own).rstrip()[:-1].rstrip()}\n" in printed
    rows = cells(read(page_of(mixed_report)), "launch")
    hosts = {"0-1": "fast-0", "2-3": "fast-0", "4": "slow-0", "5": "slow-0", "6-7": "slow-0"}
    assert {row[0]: row[1] for row in rows} == hosts
    assert "What to do next" in page_of(mixed_report)
    assert lines.printing.startswith(f"hetero launch {file} --hosts fast=fast-0 slow=slow-0 --print -- --")


def test_what_measures_comes_with_its_lines() -> None:
    report = mixed_report()
    commands = tuple((f"measure {i}", f"again {i}") for i, _ in enumerate(report.certainty.measurements))
    text = "".join(read(html_page(mixed_report(commands=commands))).sections["launch"])
    assert commands
    assert all("\n".join(lines) in text for lines in commands)


def test_colours_can_show_device_types_where_there_are_several() -> None:
    """Without a script: a choice that the style follows."""
    page = page_of(mixed_report)
    svgs = dict(re.findall(r'<figure class="(of-replicas|of-devices)" tabindex="0">(<svg.*?</svg>)', page, re.DOTALL))
    assert set(svgs) == {"of-replicas", "of-devices"}
    assert "A100-40: 4 of 4 at work" in page
    assert "V100-16: 2 of 4 at work" in page
    choices = {value for tag, key, value in read(page).attributes if (tag, key) == ("input", "id")}
    assert choices == {"by-replica", "by-device"}
    assert {f"#{each}:checked" in page for each in choices} == {True}
    assert not any(
        "<input" in page_of(each) or 'class="of-devices' in page_of(each) for each in (long_report, cpu_report)
    )


def test_stages_in_turns_are_one_row_and_the_order_is_told() -> None:
    reader = read(page_of(interleaved_report))
    first, second, *_ = cells(reader, "plan")
    assert first[2:6] == ["0,2", "emb + 0-1 | 3-4", "A100-40", "0,2"]
    assert first[11:13] == ["3 | 2", "-"]
    assert second[2:4] == ["1,3", "2 | 5 + head"]
    said = "Idle GPUs: none. Order: replicas 0-1: stages 0,2 | 1,3 in turns; replica 2: gpipe."
    assert said in reader.sections["plan"]
    assert "in turns share a row" in page_of(interleaved_report)
    assert "in turns share a row" not in page_of(mixed_report)


def test_a_split_backward_is_told_beside_the_depth() -> None:
    page = page_of(split_report)
    assert "<th>in<br>flight<br>+delay</th>" in page
    assert "<td>1+2</td>" in page
    assert "<th>in<br>flight</th>" in page_of(mixed_report)


def test_the_shares_of_the_step_add_up() -> None:
    bars = re.findall(r'<span class="bar">(.*?)</span>', page_of(mixed_report))
    assert len(bars) == 2
    for bar in bars:
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
        assert len(widths) > 1
        assert sum(widths) == pytest.approx(100, abs=0.05)


def test_every_part_of_the_memory_is_named_and_told() -> None:
    report = mixed_report()
    reader = read(page_of(mixed_report))
    names = [field.name.replace("_", " ") for field in fields(MemoryBreakdown)]
    assert reader.rows["memory"][0] == ["replicas", "stage", *names, "total"]
    assert cells(reader, "memory")[0][2:-1] == [
        f"{num_bytes / 2**30:.2f}" for num_bytes in report.rows[0].memory.named().values()
    ]


def test_what_hosts_hold_is_told_where_they_hold_something() -> None:
    report = offloaded_report()
    (taken,) = host_memory_of_nodes(report.plan, report.cluster).values()
    parts = [f"{num_bytes / 2**30:.2f}" for num_bytes in taken.named().values()]
    told = read(page_of(offloaded_report)).rows["memory"]
    assert told[-2:] == [["node type", "nodes", *taken.named(), "in all"], ["slow", "1", *parts, "0.0 of 64"]]
    assert "node type" not in read(page_of(mixed_report)).rows["memory"][-2]


def test_unknown_capacities_are_called_unknown() -> None:
    reader = read(page_of(cpu_report))
    assert cells(reader, "plan")[0][-1].endswith(" of ?")
    assert "1 replica" in reader.text
    assert "every layer's time was measured" in " ".join(reader.text)
    assert cells(reader, "basis")[0][3:] == [*["measured"] * 4, "synthetic, fp32, by nobody"]


def test_the_headline_has_speed_up_bound_and_gap() -> None:
    text = " ".join(read(page_of(compared_report)).text)
    assert "2.00 ×" in text
    assert "as long takes a step of “uniform, fast”: " in text
    assert "; 3.00 × over all GPUs" in text
    assert "gap 5.0%" in text
    assert "1,234 templates" in text
    assert "stopped by its time limit" in text


def test_the_comparison_has_every_yardstick() -> None:
    rows = cells(read(page_of(compared_report)), "comparison")
    assert [(row[0], row[3]) for row in rows[:3]] == [
        ("this plan", "1.00 ×"), ("uniform", "3.00 ×"), ("uniform, fast", "2.00 ×"),
    ]  # fmt: skip
    assert rows[3] == ["harp", f"does not fit: {SHORT}"]


def test_the_page_says_how_far_the_step_may_be_off() -> None:
    """And what the devices make of their peak, which other plans it was compared with, and what to measure."""
    report = mixed_report()
    rival = Rival("a uniform plan", 1.02, 1.08)
    certainty = dataclasses.replace(report.certainty, rivals=(rival,))
    text = " ".join(read(html_page(mixed_report(certainty=certainty))).text)
    step = certainty.step
    assert f"nine of ten such steps take {range_of(step)} s" in text
    assert "Model FLOPs utilization" in text
    assert "A100-40 " in text
    assert "Against a uniform plan: 1.020x, which cannot be told apart below 1.080x" in text
    assert "which would narrow its range of" in text
    assert certainty.measurements
    for measurement in certainty.measurements:
        assert measurement.what in text


@pytest.mark.slow
def test_an_order_that_is_not_certain_has_a_question_mark() -> None:
    rivals = (Rival("uniform", 3.0, 1.1), Rival("uniform, fast", 2.0, 2.5))
    reader = read(html_page(compared_report(rivals=rivals)))
    assert [row[3] for row in cells(reader, "comparison")[:3]] == ["1.00 ×", "3.00 ×", "2.00 × ?"]
    assert "? is for an order that the error of the prediction may turn round." in " ".join(reader.text)
    assert "may turn round" not in " ".join(read(html_page(compared_report(rivals=rivals[:1]))).text)


def test_a_yardstick_that_ran_out_of_time_is_not_said_not_to_fit() -> None:
    late = Yardstick(name="harp", best=None, timed_out=True)
    assert cells(read(html_page(mixed_report(others=(late,)))), "comparison")[1] == ["harp", "not found in time"]


def test_nonsense_in_a_price_is_told() -> None:
    """Far faster than anybody has seen a V100."""
    model = llama_model(hidden_size=4096, kv_channels=512)
    costs = cost_model(model, [profile(model, device="V100-16", block_s=(1e-6, 2e-6))])
    spec = cluster(("slow", "V100-16", 1, 1))
    made = plan(model, [replica(stage(layers=(0, 6), ranks=(0,), device="V100-16"))])
    simulation = simulate(made, spec, costs)
    nonsense = dataclasses.replace(mixed_report(), simulation=simulation, costs=costs, cluster=spec)
    nonsense = dataclasses.replace(nonsense, memory=plan_memory(made, costs))
    text = " ".join(read(html_page(nonsense)).text)
    assert re.search(
        r"V100-16 in fp32 computes at \d+% of its peak, above the 30% to 82% which was measured there", text
    )


def test_a_plan_from_elsewhere_has_no_bound_and_no_comparison() -> None:
    text = " ".join(read(page_of(mixed_report)).text)
    assert "Bound of the search" not in text
    assert "uniform" not in text
    assert "Made by hetero simulate." in text


def test_estimates_are_called_estimates() -> None:
    reader = read(page_of(mixed_report))
    text = " ".join(reader.text)
    assert "Simulated, not measured" in text
    assert "some times rest on estimates" in text
    (slow, fast) = cells(reader, "basis")
    assert slow[:3] == ["V100-16", "1", "1"]
    assert slow[3].startswith("estimate: ")
    assert slow[5] == "-", "it has no head"
    assert fast[7] == "none of this model's layers"
    assert "Plan format 5, report format 1." in text


def test_hostile_names_are_text() -> None:
    name = "<script>alert(1)</script>\"'&{{ 7 * 7 }}"
    page = html_page(compared_report(cluster_name=name, model_name="</title><b>"))
    assert "<script" not in page
    assert "{{" in page, "it is not run as a template either"
    text = " ".join(read(page).text)
    assert f"</title><b> on {name}" in text


@pytest.mark.parametrize("make", [compared_report, fleet_report])
def test_the_page_loads_nothing(make: Callable[[], Report]) -> None:
    page = page_of(make)
    reader = read(page)
    loading = [(tag, key, value) for tag, key, value in reader.attributes if key in ("src", "href", "xlink:href")]
    assert all(value.startswith("#") for _, _, value in loading)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _, _ in reader.attributes}
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    addresses = {value for _, key, value in reader.attributes if "://" in value and not key.startswith("xmlns")}
    assert addresses == set()


@pytest.mark.slow
def test_the_same_report_gives_the_same_page() -> None:
    assert html_page(compared_report()) == page_of(compared_report)
