"""A sweep of a small model on four GPUs, whose searches end after so much work and not after so many seconds."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick
from hetero.report.sweep_rows import SweepRow

ROOT = Path(__file__).parents[3]

CLUSTER = """\
node_types:
  - name: fast
    device: A100-40
    gpus_per_node: 2
    price_per_hour: 4
    inside_node: {bandwidth_gb_per_s: 200, latency_us: 10}
  - name: slow
    device: V100-16
    gpus_per_node: 2
    price_per_hour: 2
    inside_node: {bandwidth_gb_per_s: 60, latency_us: 10}
links:
  between_nodes: {bandwidth_gb_per_s: 2, latency_us: 30}
"""

SWEEP = """\
title: Small
settings: {time_limit_s: 2}
grids:
  - clusters: [./four.yaml]
    models: [./six-layers.yaml]
    global_batch_sizes: [4, 8]
"""


def write_small(folder: Path, sweep: str = SWEEP) -> Path:
    """The sweep file, beside the files that it names."""
    model = (ROOT / "hetero/data/models/opt-350m.yaml").read_text(encoding="utf-8")
    (folder / "four.yaml").write_text(CLUSTER, encoding="utf-8")
    (folder / "six-layers.yaml").write_text(model.replace("num_layers: 24", "num_layers: 6"), encoding="utf-8")
    path = folder / "small.yaml"
    path.write_text(sweep, encoding="utf-8")
    return path


ANSWERS: dict[tuple[object, ...], PlanResult] = {}
"""By question, for tests that ask the same one: what the sweep makes of the answer is theirs."""


class Planning:
    """Notes the batches that are planned, and plans by counted work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        monkeypatch.setattr("hetero.sweep.evaluate.plan_cluster", self._plan)
        monkeypatch.setattr(
            "hetero.sweep.evaluate.best_uniform", lambda problem, limit_s: Yardstick(name="uniform", best=None)
        )

    def _plan(self, problem: Problem, *, yardsticks: Sequence[Yardstick]) -> PlanResult:
        self.batches.append(problem.global_batch_size)
        asked = (problem.cluster, problem.model, problem.global_batch_size, problem.precision, problem.goal)
        if asked not in ANSWERS:
            ANSWERS[asked] = plan_cluster(problem, yardsticks=yardsticks, deadline=Deadline(0.3, CountedWork()))
        return ANSWERS[asked]


def row(cluster: str = "a", **changes: object) -> SweepRow:
    """A row with a plan."""
    known: dict[str, object] = {
        "key": "0123456789abcdef",
        "version": "1",
        "cluster": cluster,
        "model": "m",
        "num_devices": 16,
        "global_batch_size": 64,
        "seq_length": 1000,
        "precision": "fp32",
        "objective": "time",
        "step_s": 2.0,
        "step_low_s": 1.5,
        "step_high_s": 2.5,
        "bubble_share": 0.1,
        "confidence": "measured",
        "gap": 0.01,
        "uniform_name": "uniform",
        "uniform_step_s": 3.0,
        "planning_s": 1.0,
    }
    return SweepRow(**{**known, **changes})  # type: ignore[arg-type]
