"""A sweep goes on where it was stopped, and plans nothing twice."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick
from hetero.report.sweep_rows import SweepResult, SweepRow
from hetero.serialization import load
from hetero.sweep.combinations import read_sweep
from hetero.sweep.folder import SweepFolder
from hetero.sweep.run import SweepStatus, run_sweep
from tests.unit.sweep.small import SWEEP, Planning, row, write_small


def swept(sweep: Path, folder: Path, *, fresh: bool = False) -> tuple[list[SweepStatus], tuple[SweepRow, ...]]:
    _, combinations = read_sweep(sweep)
    said: list[SweepStatus] = []
    return said, run_sweep(combinations, SweepFolder(folder), jobs=1, fresh=fresh, report=said.append)


@pytest.mark.slow
def test_what_is_stored_is_not_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning, out = Planning(monkeypatch), tmp_path / "out"
    said, rows = swept(write_small(tmp_path), out)
    assert planning.batches == [4, 8]
    assert [(each.done, each.total, each.left_s == 0) for each in said] == [(1, 2, False), (2, 2, True)]
    assert [row.price_per_hour for row in rows] == [4.0, 4.0], "only devices that work are paid for"
    plan = load(Plan, SweepFolder(out).plan_file(rows[0].key))
    validate(plan)
    assert plan.provenance is not None
    assert plan.provenance.prediction.step_s == rows[0].step_s

    assert swept(write_small(tmp_path), out) == ([], rows)
    said, more = swept(write_small(tmp_path, SWEEP.replace("[4, 8]", "[8, 12]")), out)
    assert planning.batches == [4, 8, 12]
    assert more[0] == rows[1]
    assert [(each.done, each.stored, each.total) for each in said] == [(2, 1, 2)]
    swept(write_small(tmp_path), out, fresh=True)
    assert planning.batches == [4, 8, 12, 4, 8]


def test_a_row_without_its_plan_is_planned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one whose plan was deleted: the folder would have nothing to launch."""
    planning, out = Planning(monkeypatch), tmp_path / "out"
    _, rows = swept(write_small(tmp_path), out)
    SweepFolder(out).plan_file(rows[1].key).unlink()
    swept(write_small(tmp_path), out)
    assert planning.batches == [4, 8, 8]


def test_a_killed_sweep_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning, out = Planning(monkeypatch), tmp_path / "out"
    _, combinations = read_sweep(write_small(tmp_path))

    def die(_: SweepStatus) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(combinations, SweepFolder(out), jobs=1, fresh=False, report=die)
    assert planning.batches == [4]
    said, rows = swept(write_small(tmp_path), out)
    assert planning.batches == [4, 8]
    assert [(each.done, each.stored) for each in said] == [(2, 1)]
    assert all(row.step_s is not None for row in rows)


def test_a_combination_that_does_not_fit_says_what_was_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planning = Planning(monkeypatch)
    counted = planning._plan

    def refuse(problem: Problem, *, yardsticks: Sequence[Yardstick]) -> PlanResult:
        if problem.global_batch_size == 4:
            raise PlanError("short of 3 GiB")
        return counted(problem, yardsticks=yardsticks)

    monkeypatch.setattr("hetero.sweep.evaluate.plan_cluster", refuse)
    _, rows = swept(write_small(tmp_path), tmp_path / "out")
    assert [(row.step_s is None, row.why) for row in rows] == [(True, "short of 3 GiB"), (False, "")]
    assert swept(write_small(tmp_path), tmp_path / "out") == ([], rows)


def test_what_is_too_large_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the planner's own words: OPT-30B on two pairs of GPUs."""
    Planning(monkeypatch)
    text = SWEEP.replace("./six-layers.yaml", "opt-30b").replace("[4, 8]", "[4]")
    _, (only,) = swept(write_small(tmp_path, text), tmp_path / "out")
    assert only.step_s is None
    assert "GiB" in only.why


def test_tables_have_the_same_columns(tmp_path: Path) -> None:
    rows = (row(price_per_hour=36.0, emulated_step_s=2.5), row("b", step_s=None, why="too small, by far"))
    written = SweepFolder(tmp_path).write_tables(SweepResult(title="t", mode="simulate", version="1", rows=rows))
    assert [path.name for path in written] == ["sweep.json", "sweep.csv", "sweep.parquet"]
    assert load(SweepResult, written[0]).rows == rows
    lines = list(csv.DictReader(io.StringIO(written[1].read_text(encoding="utf-8"))))
    table = pq.read_table(written[2])
    assert table.column_names == list(lines[0])
    assert lines[0]["speedup"] == "1.5"
    assert lines[1]["why"] == "too small, by far"
    assert lines[1]["speedup"] == ""
    first, second = table.to_pylist()
    # 2 s for 64 samples of 1,000 tokens, at 36 an hour.
    assert first["s_per_million_tokens"] == pytest.approx(31.25)
    assert first["cost_per_million_tokens"] == pytest.approx(0.3125)
    assert first["emulation_error"] == pytest.approx(-0.2)
    assert (second["step_s"], second["cost_per_million_tokens"], second["finished"]) == (None, None, False)


@pytest.mark.slow
def test_no_speed_up_is_below_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no time for the search, its plan is the uniform one."""

    def planned(problem: Problem, *, yardsticks: Sequence[Yardstick]) -> PlanResult:
        return plan_cluster(problem, yardsticks=yardsticks, deadline=Deadline(1e-9, CountedWork()))

    monkeypatch.setattr("hetero.sweep.evaluate.plan_cluster", planned)
    _, rows = swept(write_small(tmp_path), tmp_path / "out")
    assert [row.speedup for row in rows] == [1.0, 1.0]


def test_a_combination_that_cannot_be_planned_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a uniform plan nor for any other."""
    monkeypatch.delattr("hetero.sweep.evaluate.best_uniform")
    path = write_small(tmp_path)
    model = tmp_path / "six-layers.yaml"
    model.write_text(model.read_text(encoding="utf-8").replace("num_layers: 6", "num_layers: 2000"), encoding="utf-8")
    _, rows = swept(path, tmp_path / "out")
    assert all(row.why.startswith("planner: the model does not fit: ") for row in rows)
