"""A training run that somebody measured, and rows of tables of such runs."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.cost.runtime_model import RuntimeModel
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from hetero.spec.profile import Arithmetic

CsvRow = dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStage:
    """What was measured on one stage: seconds of a step, and bytes of its fullest device.

    all_reduce_s: of the sum of its gradients; ``None`` where nobody else holds them.
    update_s: of the optimizer, with what it waits for the other stages.
    """

    forward_s: float
    backward_s: float
    all_reduce_s: float | None
    update_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRun:
    """One plan, where and by what it ran, and what it was measured to take: the means of its repetitions.

    runtime: what ran it.
    peak_bytes: of the fullest device; ``None`` where nobody measured it.
    arithmetic: of fp32 products, where it is known and no profile of these layers says it.
    stages: where stages were measured one by one.
    """

    family: str
    label: str
    plan: Plan
    cluster: ClusterSpec
    runtime: RuntimeModel
    step_s: float
    peak_bytes: float | None = None
    arithmetic: Arithmetic | None = None
    stages: Sequence[MeasuredStage] = ()

    @property
    def question(self) -> tuple[str, ModelSpec, int, int, int]:
        """What a run answers: runs of one question differ in their plans alone."""
        return self.family, self.plan.model, self.plan.seq_length, self.plan.global_batch_size, self.plan.world_size


def csv_rows(path: Path) -> list[CsvRow]:
    """The rows of a table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def label_of(row: CsvRow, *more: str) -> str:
    """What every table says of a plan, and ``more``."""
    words = f"{row['gpus']} GPUs, batch {row['global_batch']}, mbs {row['micro_batch']}"
    return ", ".join([f"{words}, pp {row['pp']} dp {row['dp']} tp {row['tp']}", *more])


def integers(row: CsvRow, *names: str) -> tuple[int, ...]:
    """The cells of these columns."""
    return tuple(int(row[name]) for name in names)
