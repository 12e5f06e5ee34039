"""Writes the report of a GPU run in Markdown, to paste into an issue. It is complete after every stage."""

import datetime
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis
from hetero.errors import ConfigError
from hetero.serialization import from_json
from tests.gpu_stages.outcomes import TestOutcome, load_outcomes
from tests.gpu_stages.results import StageResult, errors_file, in_order, load_results, outcomes_file, output_file
from tests.gpu_stages.stages import list_stages
from tests.gpu_stages.target import Target

FILE = "report.md"

MAX_OUTPUT_LINES = 30
"""Of a stage in the report, the last ones; the whole output is in the folder."""


def write_report(folder: Path, target: Target) -> None:
    """Write ``report.md`` of the results in ``folder``."""
    results = in_order(load_results(folder), list_stages(target, str(folder)))
    written = folder / f"{FILE}.new"
    written.write_text("\n".join(report(folder, results)) + "\n", encoding="utf-8")
    written.replace(folder / FILE)


def report(folder: Path, results: Sequence[StageResult]) -> Iterator[str]:
    """Yield the lines of the page: host, stages, then what each stage printed or which tests it ran."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    devices = sorted({result.device for result in results})
    commits = sorted({result.commit for result in results if result.commit})
    yield f"## GPU report, {today}, {' and '.join(devices)}, commit {' and '.join(commits) or 'unknown'}"
    yield ""
    diagnosis = _diagnosis(output_file(folder, "doctor"))
    if diagnosis is not None:
        yield from (line for facts in diagnosis.hosts for line in _host(facts))
        yield ""
    yield "| stage | what it shows | result | s | limit | |"
    yield "|---|---|---|--:|--:|---|"
    for result in results:
        cells = (
            result.name,
            result.shows,
            result.outcome,
            f"{result.seconds:.1f}",
            f"{result.limit_s:g}",
            "; ".join(filter(None, (result.detail, f"commit {result.commit}" if len(commits) > 1 else ""))),
        )
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""
    outcomes = {
        result.name: load_outcomes(path)
        for result in results
        if result.outcome != "not run" and (path := outcomes_file(folder, result.name)).exists()
    }
    yield from _tests([outcome for tests in outcomes.values() for outcome in tests])
    if diagnosis is not None:
        yield from _findings(diagnosis)
    for result in results:
        if result.outcome != "not run" and result.name not in outcomes and result.name != "doctor":
            yield from _output(folder, result)


def _tests(outcomes: Sequence[TestOutcome]) -> Iterator[str]:
    if not outcomes:
        return
    counted = Counter(outcome.outcome for outcome in outcomes)
    yield f"**Tests:** {', '.join(f'{count} {outcome}' for outcome, count in sorted(counted.items()))}"
    yield ""
    yield "| test | outcome | s | |"
    yield "|---|---|--:|---|"
    for test in outcomes:
        yield f"| {_cell(test.name)} | {test.outcome} | {test.seconds:.1f} | {_cell(test.detail)} |"
    yield ""


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    findings = [finding for finding in diagnosis.findings if finding.severity != "ok"]
    if not findings:
        return
    yield "**`hetero doctor`:**"
    yield ""
    for finding in findings:
        yield f"* {finding.severity}: {finding.subject}: {finding.found} -> {finding.todo}"
    yield ""


def _output(folder: Path, result: StageResult) -> Iterator[str]:
    """Yield what a stage printed; of one that did not pass also the end of its standard error."""
    yield f"**{result.name}:** {result.shows}"
    yield ""
    lines = _last_lines(output_file(folder, result.name))
    tables = any(line.startswith("|") for line in lines)
    yield from lines if tables or not lines else ("```", *lines, "```")
    yield ""
    errors = _last_lines(errors_file(folder, result.name))
    if result.outcome != "passed" and errors:
        yield from ("```", *errors, "```", "")


def _last_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()[-MAX_OUTPUT_LINES:]


def _diagnosis(path: Path) -> Diagnosis | None:
    """Return what the doctor printed, None if it did not get to its end."""
    if not path.exists():
        return None
    try:
        return from_json(Diagnosis, path.read_text(encoding="utf-8"), source=str(path))
    except ConfigError:
        return None


def _host(facts: HostFacts) -> Iterator[str]:
    torch = facts.torch
    counted = Counter(gpu.name for gpu in facts.gpus)
    yield f"* {facts.os}; Python {facts.python}; driver {facts.driver or 'none'}, CUDA up to {facts.driver_cuda or '-'}"
    yield f"* GPUs: {', '.join(f'{count} x {name}' for name, count in counted.items()) or 'none'}"
    if torch is not None:
        yield f"* torch {torch.version}, CUDA {torch.cuda}, cuDNN {torch.cudnn}, NCCL {torch.nccl}"
    packages = ("megatron-core", "transformer-engine", "flash-attn", "apex")
    yield "* " + ", ".join(f"{name} {facts.packages.get(name, '-')}" for name in packages)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
