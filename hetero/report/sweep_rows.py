"""The rows of a sweep: what was asked, what was planned and predicted, and how that differs from another sweep's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from pydantic import ConfigDict

from hetero.printable_fields import AnyText
from hetero.serialization import STRICT

LEAST_CHANGE = 0.01
"""Relative: steps that differ by less count as equal between two sweeps. A heuristic: a search that its time limit ends
does not find the same plan every time."""

MILLION = 10**6


class SweepPlace(NamedTuple):
    """What tells the rows of one sweep apart, and finds the same one in another sweep."""

    cluster: str
    model: str
    global_batch_size: int
    seq_length: int
    precision: str
    objective: str

    def __str__(self) -> str:
        goal = "" if self.objective == "time" else f", by {self.objective}"
        return f"{self.cluster}, {self.model}, batch {self.global_batch_size}, {self.precision}{goal}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepRow:
    """One combination of a sweep with its outcome; seconds and bytes are predicted unless a field says otherwise.

    key: digest of all inputs and of the version.
    why: what was short, where there is no plan.
    step_low_s, step_high_s: nine of ten such steps take so long.
    gap: of the search, as ``PlanResult.gap``.
    finished: the search ended by itself, and not by its time limit.
    uniform_name, uniform_step_s: the fastest uniform plan; ``None`` if there is none, or none was found in its time.
    price_per_hour: of the devices that work, in the currency of the cluster file; ``None`` without prices.
    emulated_step_s: mean of the steps that processes on this machine did at the pace of the cluster.
    why_not_emulated: what kept the plan from that, if it was asked for.
    job: the batch script, or what Slurm called the job that was submitted.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    key: str
    version: str
    cluster: str
    model: str
    num_devices: int
    global_batch_size: int
    seq_length: int
    precision: str
    objective: str
    why: AnyText = ""
    step_s: float | None = None
    step_low_s: float | None = None
    step_high_s: float | None = None
    samples_per_s: float | None = None
    bubble_share: float | None = None
    mfu: float | None = None
    confidence: str = ""
    gap: float | None = None
    finished: bool = False
    planning_s: float | None = None
    idle_devices: int = 0
    shape: str = ""
    uniform_name: str = ""
    uniform_step_s: float | None = None
    price_per_hour: float | None = None
    emulated_step_s: float | None = None
    why_not_emulated: AnyText = ""
    job: str = ""

    @property
    def place(self) -> SweepPlace:
        return SweepPlace(
            cluster=self.cluster,
            model=self.model,
            global_batch_size=self.global_batch_size,
            seq_length=self.seq_length,
            precision=self.precision,
            objective=self.objective,
        )

    @property
    def speedup(self) -> float | None:
        """How many times as long the fastest uniform plan's step is; ``None`` without one of the two plans."""
        if self.step_s is None or self.uniform_step_s is None:
            return None
        return self.uniform_step_s / self.step_s

    @property
    def s_per_million_tokens(self) -> float | None:
        if self.step_s is None:
            return None
        return MILLION * self.step_s / (self.global_batch_size * self.seq_length)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """In the currency of the cluster file."""
        seconds = self.s_per_million_tokens
        return None if seconds is None or self.price_per_hour is None else seconds * self.price_per_hour / 3600

    @property
    def emulation_error(self) -> float | None:
        """By how much the prediction is above the emulated step, relative to that."""
        if self.step_s is None or self.emulated_step_s is None:
            return None
        return self.step_s / self.emulated_step_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """All rows of a sweep, in the order of its file; what a later sweep is compared with."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    title: str
    mode: str
    version: str
    rows: tuple[SweepRow, ...]


ChangeKind = Literal["faster", "slower", "fits now", "fits no more", "new", "gone"]


@dataclass(frozen=True, slots=True)
class SweepChange:
    """A combination whose outcome is another one than in an earlier sweep."""

    kind: ChangeKind
    place: SweepPlace
    before_s: float | None
    after_s: float | None


def changes(before: Sequence[SweepRow], after: Sequence[SweepRow]) -> tuple[SweepChange, ...]:
    """What is different: in the order of ``after``, then what is gone in that of ``before``."""
    earlier = {row.place: row for row in before}
    found = [_change(earlier.get(row.place), row) for row in after]
    there = {row.place for row in after}
    gone = [SweepChange("gone", row.place, row.step_s, None) for row in before if row.place not in there]
    return tuple([each for each in found if each is not None] + gone)


def _change(before: SweepRow | None, after: SweepRow) -> SweepChange | None:
    if before is None:
        return SweepChange("new", after.place, None, after.step_s)
    old_s, new_s = before.step_s, after.step_s
    kind: ChangeKind | None = None
    if old_s is None or new_s is None:
        kind = "fits now" if new_s is not None else "fits no more" if old_s is not None else None
    elif abs(new_s / old_s - 1) >= LEAST_CHANGE:
        kind = "faster" if new_s < old_s else "slower"
    return None if kind is None else SweepChange(kind, after.place, old_s, new_s)
