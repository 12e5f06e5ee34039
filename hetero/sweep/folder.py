"""Keeps a sweep in a folder: rows and plans as they come, by their keys, and the tables of the whole sweep.

    rows/KEY.json       the outcome of a combination, written when it is there
    plans/KEY.json      its plan
    emulated/KEY.json   what its emulation took
    jobs/KEY.sbatch     its batch script; KEY.json beside it says what Slurm called the job
    sweep.json          all rows in the order of the sweep file: what a later sweep is compared with
    sweep.csv, sweep.parquet, sweep.html

A key says which inputs an outcome is of, so that whatever lies there may be used again.
"""

import csv
import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

from pydantic import ConfigDict

from hetero.extras import is_installed
from hetero.output_files import make_folder, write_bytes
from hetero.plan.ir import Plan
from hetero.printable_fields import AnyText
from hetero.report.sweep_rows import SweepResult, SweepRow
from hetero.serialization import STRICT, load, save

T = TypeVar("T")

DERIVED = ("speedup", "s_per_million_tokens", "cost_per_million_tokens", "emulation_error")
"""Columns of the tables that follow from the fields of a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEmulation:
    """What the emulation of a plan took: mean seconds of a step, or why there was none."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    step_s: float | None = None
    why_none: AnyText = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredJob:
    """What Slurm called the job of a plan."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    job_id: str


class SweepFolder:
    """The folder of a sweep.

    Raises:
        ConfigError: it cannot be made, or may not be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("rows", "plans", "emulated", "jobs"):
            make_folder(path / name, asked_by="--out")

    def row(self, key: str) -> SweepRow | None:
        """The stored outcome of a combination; ``None`` if there is none, or its plan is not there."""
        row = self._stored(SweepRow, self.path / "rows" / f"{key}.json")
        return row if row is None or row.step_s is None or self.plan_file(key).exists() else None

    def keep(self, row: SweepRow, plan: Plan | None) -> None:
        """Store an outcome: the plan first, so that a row is there only with its plan."""
        if plan is not None:
            save(plan, self.plan_file(row.key))
        save(row, self.path / "rows" / f"{row.key}.json")

    def plan_file(self, key: str) -> Path:
        return self.path / "plans" / f"{key}.json"

    def script_file(self, key: str) -> Path:
        return self.path / "jobs" / f"{key}.sbatch"

    def emulation(self, key: str) -> StoredEmulation | None:
        return self._stored(StoredEmulation, self.path / "emulated" / f"{key}.json")

    def keep_emulation(self, key: str, emulation: StoredEmulation) -> None:
        save(emulation, self.path / "emulated" / f"{key}.json")

    def job(self, key: str) -> StoredJob | None:
        return self._stored(StoredJob, self.path / "jobs" / f"{key}.json")

    def keep_job(self, key: str, job: StoredJob) -> None:
        save(job, self.path / "jobs" / f"{key}.json")

    def write_tables(self, result: SweepResult) -> list[Path]:
        """Write the whole sweep as JSON, CSV and, where pyarrow is installed, Parquet."""
        written = [self.path / "sweep.json", self.path / "sweep.csv"]
        save(result, written[0])
        write_bytes(written[1], csv_bytes(result.rows))
        if is_installed("pyarrow"):
            written.append(self.path / "sweep.parquet")
            write_bytes(written[-1], parquet_bytes(result.rows))
        return written

    def _stored(self, cls: type[T], path: Path) -> T | None:
        return load(cls, path) if path.exists() else None


def table_columns(rows: Sequence[SweepRow]) -> dict[str, list[Any]]:
    """The columns of the tables by name: the fields of a row, then what follows from them."""
    names = [*(field.name for field in dataclasses.fields(SweepRow)), *DERIVED]
    return {name: [getattr(row, name) for row in rows] for name in names}


def csv_bytes(rows: Sequence[SweepRow]) -> bytes:
    """The rows as CSV with a line of names; what is not known is empty."""
    columns = table_columns(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().encode("utf-8")


def parquet_bytes(rows: Sequence[SweepRow]) -> bytes:
    """The rows as Parquet, with the same columns as the CSV and a type for each, also for one that is empty."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"str": pa.string(), "int": pa.int64(), "bool": pa.bool_(), "float": pa.float64()}
    declared = {name: str(getattr(kind, "__name__", kind)) for name, kind in get_type_hints(SweepRow).items()}
    fields = [(name, types[declared.get(name, "float").removesuffix(" | None")]) for name in table_columns(rows)]
    written = io.BytesIO()
    pq.write_table(pa.table(table_columns(rows), schema=pa.schema(fields)), written)
    return written.getvalue()
