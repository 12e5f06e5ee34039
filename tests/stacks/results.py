"""What was seen on each stack: kept as JSON, compared and printed as tables."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.stacks.environments import Stack

DIGITS = 16
"""Of a digest in hexadecimal."""

MAX_NAMES = 6
"""Trainings that a cell of the table names; of more it says how many there are."""

Report = Mapping[str, str]
"""Digests by what was computed; in place of a digest an error's first line."""


def report_lines(report: Report) -> str:
    """Return ``report`` as a stack prints it: a value, two spaces and a name on each line."""
    return "\n".join(f"{value}  {name}" for name, value in report.items())


def parse_report(output: str) -> dict[str, str]:
    """Return the report that a stack has printed, among other lines."""
    pairs = (line.split("  ", 1) for line in output.splitlines() if "  " in line)
    return {name: value for value, name in pairs}


def first_line(message: str) -> str:
    """Return the first line of ``message`` that says something, with single spaces."""
    return next((" ".join(line.split()) for line in message.splitlines() if line.strip()), "")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one stack computed, or why it did not.

    torch_build: torch's own version, which says whether it is a build for CPUs or for which CUDA.
    date: year-month-day.
    seconds: that the trainings took.
    tests: the last line of pytest, where tests were asked for.
    """

    stack: Stack
    date: str
    command: str
    torch_build: str = ""
    seconds: float = 0.0
    bits: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    tests: str | None = None

    def __str__(self) -> str:
        build = self.torch_build or self.stack.torch
        return f"Python {self.stack.python}, torch {build}, megatron-core {self.stack.megatron_core}"

    def differing(self, reference: "Result") -> list[str]:
        """Return the trainings that are not those of ``reference``, bit for bit."""
        names = {**reference.bits, **self.bits}
        return [name for name in names if self.bits.get(name) != reference.bits.get(name)]


@dataclass
class Results:
    """Results in the order in which they came, and what stacks read of each other's checkpoints.

    readings: by writer and reader; the report of a stack that reads its own is what the others are compared with.
    """

    by_stack: dict[Stack, Result] = field(default_factory=dict)
    readings: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> "Results":
        """Return what ``path`` holds, so that a long comparison can be made in parts."""
        if path is None or not path.exists():
            return cls()
        saved = json.loads(path.read_text(encoding="utf-8"))
        made = [Result(**{**each, "stack": Stack(**each["stack"])}) for each in map(_without_row, saved["results"])]
        readings = {(each["writer"], each["reader"]): each["report"] for each in saved["readings"]}
        return cls({result.stack: result for result in made}, readings)

    def save(self, path: Path) -> None:
        """Write all as JSON; ``row`` of each result is its row in ``hetero/data/tried_versions.yaml``."""
        saved = {
            "results": [{**dataclasses.asdict(each), "row": self.row(each)} for each in self.by_stack.values()],
            "readings": [
                {"writer": writer, "reader": reader, "report": report}
                for (writer, reader), report in self.readings.items()
            ],
        }
        path.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")

    @property
    def reference(self) -> Result | None:
        """The first result that has bits: all others are compared with it."""
        return next((result for result in self.by_stack.values() if result.bits), None)

    def verdict(self, result: Result) -> str:
        """Return in a few words how the bits of ``result`` compare with those of the reference."""
        reference = self.reference
        if result.error is not None or reference is None:
            return f"error: {result.error}"
        differing = result.differing(reference)
        if not differing:
            return "reference" if result is reference else "equal"
        names = ", ".join(differing) if len(differing) <= MAX_NAMES else f"{len(differing)} of {len(reference.bits)}"
        return f"differs: {names}"

    def row(self, result: Result) -> dict[str, Any]:
        """Return the entry of this stack for ``hetero/data/tried_versions.yaml``."""
        verdict = self.verdict(result)
        if verdict == "equal":
            verdict = f"the {len(result.bits)} trainings have the bits of {self.reference}"
        elif verdict == "reference":
            verdict = f"the {len(result.bits)} trainings that others are compared with"
        run = {"kind": "bits", "device": "CPU", "date": result.date, "command": result.command, "result": verdict}
        return {
            "python": result.stack.python,
            "megatron_core": result.stack.megatron_core,
            "torch": result.stack.torch,
            "runs": [run],
        }

    def unlike_readings(self, writer: str, reader: str) -> dict[str, str]:
        """Return what ``reader`` does not read as ``writer`` itself does, with what it reads instead."""
        own, other = self.readings[writer, writer], self.readings[writer, reader]
        return {name: other.get(name, "nothing") for name in own if other.get(name) != own[name]}

    def are_equal(self) -> bool:
        """Return whether all stacks train the same bits and read the same from each other's checkpoints."""
        bits = all(self.verdict(result) in ("reference", "equal") for result in self.by_stack.values())
        return bits and not any(self.unlike_readings(*pair) for pair in self.readings)


def bits_table(results: Results) -> str:
    """Return the table of stacks in Markdown."""
    lines = ["| Python | torch | megatron-core | Triton | bits | tests | seconds |", "|---|---|---|---|---|---|---|"]
    for result in results.by_stack.values():
        stack = result.stack
        cells = (
            *(stack.python, result.torch_build or stack.torch, stack.megatron_core),
            "uninstalled" if stack.without_triton else "as torch brings it",
            *(results.verdict(result), result.tests or "", f"{result.seconds:.0f}"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def readings_table(results: Results) -> str:
    """Return the table of who read whose checkpoints in Markdown."""
    lines = ["| written by | read by | not as the writer reads it |", "|---|---|---|"]
    for writer, reader in results.readings:
        unlike = results.unlike_readings(writer, reader)
        lines.append(f"| {writer} | {reader} | {'; '.join(f'{k}: {v}' for k, v in unlike.items()) or 'nothing'} |")
    return "\n".join(lines)


def _without_row(saved: dict[str, Any]) -> dict[str, Any]:
    """Leave out what follows from all results."""
    return {name: value for name, value in saved.items() if name != "row"}
