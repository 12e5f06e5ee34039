"""Writes one report of what a GPU showed, in Markdown, to paste into an issue.

    python -m tests.gpu.report --doctor doctor.json --junit junit.xml [--bench bench.txt] [--measure cuda]

``scripts/test_gpu.sh`` calls it.
"""

import argparse
import datetime
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from hetero.doctor.facts import HostFacts
from hetero.doctor.findings import Diagnosis
from hetero.serialization import from_json
from hetero.units import GIB


@dataclass(frozen=True, slots=True)
class TestOutcome:
    """What came of one test. ``detail``: why it failed or was skipped, in a line."""

    __test__ = False

    name: str
    outcome: str
    seconds: float
    detail: str = ""


def outcomes(junit: str) -> list[TestOutcome]:
    """From the XML that pytest writes."""
    found = []
    for case in ElementTree.fromstring(junit).iter("testcase"):
        problem = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        outcome = (
            {"failure": "FAILED", "error": "ERROR", "skipped": "skipped"}[problem.tag]
            if problem is not None
            else "passed"
        )
        detail = (problem.get("message") or "").strip().splitlines()[:1] if problem is not None else []
        file = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        found.append(
            TestOutcome(f"{file}::{case.get('name')}", outcome, float(case.get("time", "0")), "".join(detail)[:200])
        )
    return found


def report(diagnosis: Diagnosis, tests: Sequence[TestOutcome], *, today: datetime.date, more: Sequence[str]) -> str:
    """The whole page. ``more``: further sections, as they are."""
    counted = Counter(test.outcome for test in tests)
    lines = [
        f"## GPU report, {today.isoformat()}",
        "",
        *(line for facts in diagnosis.hosts for line in _host(facts)),
        "",
        f"**Tests:** {', '.join(f'{count} {outcome}' for outcome, count in sorted(counted.items())) or 'none ran'}",
        "",
        "| test | outcome | s | |",
        "|---|---|--:|---|",
        *(f"| {_cell(test.name)} | {test.outcome} | {test.seconds:.1f} | {_cell(test.detail)} |" for test in tests),
        "",
    ]
    findings = [finding for finding in diagnosis.findings if finding.severity != "ok"]
    if findings:
        lines += ["**`hetero doctor`:**", ""]
        lines += [f"* {each.severity}: {each.subject}: {each.found} -> {each.todo}" for each in findings]
        lines += [""]
    return "\n".join([*lines, *more])


def measured_section(device: str) -> Iterator[str]:
    """Train a model in the device's precisions, and lay step time and memory beside their prediction."""
    # Only here is anything trained.
    from tests.gpu.measured_step import Workload, measured_step  # noqa: PLC0415
    from tests.helpers.gpu_ranks import device_type_here, run_on  # noqa: PLC0415

    kind = device_type_here(device)
    yield f"**One rank on {kind.name}**, Llama-style, 12 layers, hidden 1024, sequence 1024, 4 microbatches of 4:"
    yield ""
    yield "| precision | recompute | step s | predicted s | torch reserved GiB | predicted GiB |"
    yield "|---|---|--:|--:|--:|--:|"
    for precision in ("fp16", "bf16"):
        if precision not in kind.precisions:
            continue
        for recompute in ("none", "full"):
            workload = Workload(precision=precision, recompute=recompute)  # type: ignore[arg-type]  # two of its values
            try:
                (found,) = run_on(device, measured_step, 1, device, workload, timeout_s=300)
            except AssertionError as error:
                yield f"| {precision} | {recompute} | {_cell(str(error).splitlines()[-1][:200])} | | | |"
                continue
            predicted = f"{found.predicted_s:.3f}" if found.predicted_s is not None else "-"
            memory = f"{found.peak_bytes / GIB:.2f} | {found.predicted_bytes / GIB:.2f}"
            yield f"| {precision} | {recompute} | {found.step_s:.3f} | {predicted} | {memory} |"
    yield ""


def main(argv: Sequence[str]) -> int:
    """Print the page; exit code 1 if a test has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--doctor", type=Path, required=True)
    parser.add_argument("--junit", type=Path, required=True)
    parser.add_argument("--bench", type=Path, help="what tests.bench.bench_uniform has printed")
    parser.add_argument("--measure", metavar="DEVICE", help="measure steps on cuda or cpu, too")
    args = parser.parse_args(argv)
    diagnosis = from_json(Diagnosis, args.doctor.read_text(encoding="utf-8"), source=str(args.doctor))
    tests = outcomes(args.junit.read_text(encoding="utf-8"))
    more = list(measured_section(args.measure)) if args.measure else []
    if args.bench is not None and args.bench.exists():
        more += [
            "**Beside stock megatron-core:**",
            "",
            "```",
            args.bench.read_text(encoding="utf-8").rstrip(),
            "```",
            "",
        ]
    print(report(diagnosis, tests, today=datetime.datetime.now(tz=datetime.UTC).date(), more=more))
    return int(any(test.outcome in ("FAILED", "ERROR") for test in tests))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
