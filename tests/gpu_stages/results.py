"""Results of a GPU run's stages, kept in one JSON file that is complete after every stage."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_stages.stages import Stage

FILE = "results.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """How a stage ended.

    outcome: "passed", "failed", "over its limit", or "not run".
    detail: why, in a line.
    began: date and time in UTC, ISO 8601.
    commit: of this repository, "" where it is not known.
    device: as CUDA names it, or "cpu".
    """

    name: str
    shows: str
    outcome: str
    began: str
    commit: str
    device: str
    detail: str = ""
    seconds: float = 0.0
    limit_s: float = 0.0


def load_results(folder: Path) -> list[StageResult]:
    """Return the results in ``folder``, none if it has none."""
    path = folder / FILE
    return [StageResult(**each) for each in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def save_result(folder: Path, result: StageResult) -> None:
    """Add ``result`` to those in ``folder``, in place of an earlier one of the same stage.

    A stage that was not run leaves what an earlier run has shown.
    """
    earlier = load_results(folder)
    if result.outcome == "not run" and any(each.name == result.name and each.outcome != "not run" for each in earlier):
        return
    others = [each for each in earlier if each.name != result.name]
    saved = [dataclasses.asdict(each) for each in (*others, result)]
    # Whole at any time: a machine may be taken away in the middle of it.
    written = folder / f"{FILE}.new"
    written.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    written.replace(folder / FILE)


def output_file(folder: Path, stage: str) -> Path:
    """Return the file that has the standard output of ``stage``."""
    return folder / f"{stage}.out"


def errors_file(folder: Path, stage: str) -> Path:
    """Return the file that has the standard error of ``stage``."""
    return folder / f"{stage}.err"


def outcomes_file(folder: Path, stage: str) -> Path:
    """Return the file that has a line for each test of ``stage``."""
    return folder / f"{stage}.jsonl"


def in_order(results: Sequence[StageResult], stages: Sequence[Stage]) -> list[StageResult]:
    """Return ``results`` in the order of ``stages``."""
    places = {stage.name: place for place, stage in enumerate(stages)}
    return sorted(results, key=lambda result: places.get(result.name, len(places)))
