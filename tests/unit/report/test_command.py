"""``--report`` and ``--figure`` from the command line."""

from pathlib import Path

import pytest

from hetero.cli import main
from hetero.report.figure_names import FIGURE_NAMES, OVERVIEW
from hetero.report.figures.catalogue import DRAWINGS
from hetero.serialization import save
from tests.unit.report.samples import MIXED, MODEL, mixed_report


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Paths of a cluster, a model and a plan."""
    paths = {name: tmp_path / f"{name}.json" for name in ("cluster", "model", "plan")}
    save(MIXED, paths["cluster"])
    save(MODEL, paths["model"])
    save(mixed_report().plan, paths["plan"])
    return {name: str(path) for name, path in paths.items()}


def plan_command(files: dict[str, str], *more: str) -> list[str]:
    return [
        "plan", "--cluster", files["cluster"], "--model", files["model"], "--global-batch-size", "8",
        "--seq-length", "16", "--time-limit", "4", "--data-sheets", *more,
    ]  # fmt: skip


def simulate_command(files: dict[str, str], *more: str) -> list[str]:
    return ["simulate", files["plan"], "--cluster", files["cluster"], "--data-sheets", *more]


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_plan_compares_and_writes_the_page(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, picture = tmp_path / "out.html", tmp_path / "out.svg"
    assert main(plan_command(files, "--report", str(page), "--figure", str(picture))) == 0
    out = capsys.readouterr().out
    assert "The same cluster, planned in other manners" in out
    assert f"report written to {page}\nfigure (overview) written to {picture}\n" in out
    text = page.read_text(encoding="utf-8")
    assert "<h1>model on cluster</h1>" in text
    assert 'id="comparison"' in text
    assert picture.read_text(encoding="utf-8").startswith("<?xml")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_simulate_writes_page_and_figures(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, timeline, memory = tmp_path / "out.htm", tmp_path / "t.PNG", tmp_path / "m.pdf"
    figures = ["--figure", f"timeline={timeline}", "--figure", f"memory={memory}"]
    assert main(simulate_command(files, "--report", str(page), *figures)) == 0
    assert "<h1>plan.json on cluster</h1>" in page.read_text(encoding="utf-8")
    assert timeline.read_bytes().startswith(b"\x89PNG")
    assert memory.read_bytes().startswith(b"%PDF")
    assert f"figure (timeline) written to {timeline}" in capsys.readouterr().out


def test_every_figure_can_be_asked_for() -> None:
    assert set(FIGURE_NAMES) == {OVERVIEW, *DRAWINGS}


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--report", "out.txt", "--report out.txt: ends in '.txt', must end in .html or .htm"),
        ("--report", "out", "--report out: ends in '', must end in .html or .htm"),
        ("--report", "absent/out.html", "--report absent/out.html: there is no folder absent; make it first"),
        ("--report", "folder.html", "--report folder.html: is a folder; name a file in it"),
        ("--figure", "out.gif", "--figure out.gif: ends in '.gif', must end in .svg or .pdf or .png"),
        ("--figure", "timeline=out", "--figure out: ends in '', must end in .svg or .pdf or .png"),
        (
            "--figure",
            "timline=out.svg",
            "--figure timline=out.svg: 'timline' must be one of overview, cluster, timeline, memory, comparison (did "
            "you mean 'timeline'?)",
        ),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_bad_output_is_refused_before_anything_is_computed(
    command: str,
    option: str,
    value: str,
    message: str,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    monkeypatch.delattr("hetero.planner.plan_cluster.plan_cluster")
    monkeypatch.delattr("hetero.commands.plan.simulate")
    make = {"plan": plan_command, "simulate": simulate_command}[command]
    assert main(make(files, option, value)) == 2
    assert capsys.readouterr().err == f"hetero: {message}\n"


def test_only_plan_compares(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.svg"
    assert main(simulate_command(files, "--figure", f"comparison={path}")) == 2
    assert "only hetero plan compares" in capsys.readouterr().err


def test_a_disk_that_refuses_is_a_mistake_of_the_user(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.svg.partial").mkdir()
    assert main(simulate_command(files, "--figure", str(tmp_path / "out.svg"))) == 2
    assert "out.svg: cannot be written: Is a directory" in capsys.readouterr().err
