"""Reads which combinations of versions were run, with what result, and which are known to break.

``tried_versions.yaml`` is the one list of them: ``hetero doctor``, the start of a training and docs/install.md say what
it has.
"""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.installed_versions import COMPONENTS, DISTRIBUTIONS, NAMES, Component, InstalledVersions
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT, load

PATH = Path(__file__).with_name("tried_versions.yaml")

RunKind = Literal["whole suite", "part of the suite", "second lane", "bits", "mocked TransformerEngine", "GPU"]

RUN_KINDS: Mapping[RunKind, str] = {
    "whole suite": "every test of the repository that needs no GPU",
    "part of the suite": "the tests that the command names",
    "second lane": "the tests that are marked `newest_stack`: layouts, checkpoints, flags, quick start and the like",
    "bits": "65 trainings whose losses, gradients and weights are compared bit by bit with those of other combinations",
    "mocked TransformerEngine": "tests with TransformerEngine's own Python, whose CUDA extension is replaced by torch",
    "GPU": "training and tests on the device that is named",
}
"""What each kind of run is."""

CPU = "CPU"

PREFERENCE: tuple[Component, ...] = ("apex", "python", "transformer_engine", "torch", "megatron_core")
"""What the nearest combination may differ in, the least important component first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedRun:
    """One thing that was run with a combination.

    device: ``CPU``, or the name of the GPU.
    date: year-month-day.
    command: as it is typed, in the root of the repository.
    result: what came of it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: RunKind
    device: str
    date: str
    command: AnyText
    result: AnyText

    def __post_init__(self) -> None:
        _check_date(self.date)
        _check_texts(self, "device", "command", "result")

    def __str__(self) -> str:
        return f"{self.kind} on {self.device}, {self.date}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedVersions(InstalledVersions):
    """A combination of versions that was run, and what was run."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    runs: tuple[TriedRun, ...]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\d+\.\d+", self.python):
            raise ConfigError(f"python {self.python!r}: must be major and minor version, such as 3.12")
        for component in COMPONENTS:
            version = self.version_of(component)
            if version is not None and _parsed(version) is None:
                raise ConfigError(f"{component} {version!r}: is no version; write it as pip does, such as 2.15.0")
        if not self.runs:
            raise ConfigError(f"{self}: has no runs; say what was run, or leave the combination out")


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakingVersions:
    """Versions that are known not to work together.

    versions: by component, the specifier of those that break, such as ``>=0.17``; all of them have to match.
    because: what breaks.
    fix: what to do, an order to the user.
    date: when it was seen, year-month-day; ``command`` shows it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    versions: Mapping[Component, str]
    because: AnyText
    fix: AnyText
    date: str
    command: AnyText

    def __post_init__(self) -> None:
        if not self.versions:
            raise ConfigError("versions: names no component, so that everything would break; name those that do")
        for component, specifier in self.versions.items():
            if not _is_specifier(specifier):
                raise ConfigError(f"versions.{component} {specifier!r}: is no specifier; write one such as >=0.17")
        _check_date(self.date)
        _check_texts(self, "because", "fix", "command")

    def __str__(self) -> str:
        return ", ".join(f"{NAMES[component]} {specifier}" for component, specifier in self.versions.items())

    def matches(self, installed: InstalledVersions) -> bool:
        """Return whether ``installed`` is a combination that breaks."""
        return all(
            (version := _parsed(installed.version_of(component))) is not None
            and SpecifierSet(specifier).contains(version, prereleases=True)
            for component, specifier in self.versions.items()
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionVerdict:
    """What is known of a combination.

    said: for the user, without the combination's own name.
    fix: what to do; empty for a combination that was tried.
    """

    kind: Literal["tried", "not tried", "known to break"]
    said: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionTable:
    """Everything that was tried, and what is known to break."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    tried: tuple[TriedVersions, ...]
    breaking: tuple[BreakingVersions, ...] = ()

    def __post_init__(self) -> None:
        if not self.tried:
            raise ConfigError("tried: is empty; list at least one combination that was run")
        seen: set[tuple[str | None, ...]] = set()
        for tried in self.tried:
            if tried.combination in seen:
                raise ConfigError(f"{tried}: is listed twice; put its runs into one entry")
            seen.add(tried.combination)
            for breaking in self.breaking:
                if breaking.matches(tried):
                    raise ConfigError(f"{tried}: was tried and breaks by {breaking}; correct one of the two")

    def judge(self, installed: InstalledVersions, *, on_gpu: bool = False) -> VersionVerdict:
        """Say what is known of ``installed``: of the combination, not of each version by itself.

        Args:
            on_gpu: whether it is for GPUs, so that it matters if the combination has only run on a CPU.
        """
        for breaking in self.breaking:
            if breaking.matches(installed):
                return VersionVerdict(kind="known to break", said=f"because {breaking.because}", fix=breaking.fix)
        for tried in self.tried:
            if tried.combination == installed.combination:
                cpu_only = on_gpu and all(run.device == CPU for run in tried.runs)
                said = "; ".join(map(str, tried.runs)) + ("; not on a GPU" if cpu_only else "")
                return VersionVerdict(kind="tried", said=said)
        nearest = min(self.tried, key=lambda tried: _distance(tried, installed))
        runs = "; ".join(map(str, nearest.runs))
        return VersionVerdict(
            kind="not tried",
            said=f"{self._what_is_new(installed)}; the nearest combination that was: {nearest} ({runs})",
            fix=_install(nearest, installed),
        )

    def _what_is_new(self, installed: InstalledVersions) -> str:
        unknown = [
            f"{NAMES[component]} {version}"
            for component in COMPONENTS
            if (version := installed.version_of(component)) is not None
            and all(tried.version_of(component) != version for tried in self.tried)
        ]
        if unknown:
            return f"no run had {' or '.join(unknown)}"
        return "each of these versions was tried, but not together"


@cache
def shipped_versions() -> VersionTable:
    """Read the table that ships with the package."""
    return load(VersionTable, PATH)


def _distance(tried: InstalledVersions, installed: InstalledVersions) -> tuple[object, ...]:
    """Order combinations: the fewest other versions, then the least important ones, then the closest numbers."""
    other = [tried.version_of(component) != installed.version_of(component) for component in PREFERENCE]
    gaps = [_gap(tried.version_of(component), installed.version_of(component)) for component in reversed(PREFERENCE)]
    return sum(other), *reversed(other), *gaps


def _gap(one: str | None, other: str | None) -> int:
    """How far two versions are apart; one that is missing or no version is farther than any other."""
    first, second = _parsed(one), _parsed(other)
    if first is None or second is None:
        return 0 if one == other else 10**9
    numbers = zip((*first.release, 0, 0, 0), (*second.release, 0, 0, 0), (10**6, 10**3, 1), strict=False)
    return sum(abs(a - b) * weight for a, b, weight in numbers)


def _install(nearest: InstalledVersions, installed: InstalledVersions) -> str:
    """Return how to get from ``installed`` to ``nearest``."""
    steps = []
    if nearest.python != installed.python:
        steps.append(f"make the environment with Python {nearest.python}")
    wanted, unwanted = [], []
    for component, name in DISTRIBUTIONS.items():
        version = nearest.version_of(component)
        if version == installed.version_of(component):
            continue
        if version is None:
            unwanted.append(name)
        else:
            wanted.append(f"{name}=={version}")
    steps += [f"pip uninstall {' '.join(unwanted)}"] if unwanted else []
    steps += [f"pip install {' '.join(wanted)}"] if wanted else []
    return "; ".join(steps)


def _parsed(text: str | None) -> Version | None:
    """Return the version that ``text`` is, ``None`` if it is none: builds of one's own are called as one likes."""
    try:
        return None if text is None else Version(text)
    except InvalidVersion:
        return None


def _is_specifier(text: str) -> bool:
    try:
        return len(SpecifierSet(text)) > 0
    except InvalidSpecifier:
        return False


def _check_date(text: str) -> None:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"date {text!r}: is no date; write year-month-day, such as 2026-11-27") from None


def _check_texts(record: object, *fields: str) -> None:
    for field in fields:
        if not getattr(record, field).strip():
            raise ConfigError(f"{field}: is empty; say what it was")
