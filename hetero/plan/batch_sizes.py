"""Says how many samples each step of a run takes, also where the global batch changes while the run goes on."""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict

from hetero.serialization import STRICT


class BatchChange(NamedTuple):
    """A size of the global batch, and the sample of the run (counted from 0) from which on steps have it."""

    first_sample: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampup:
    """Lets the global batch grow from ``start`` by ``increment`` until it is whole, evenly over ``samples`` samples.

    Megatron-LM's ``--rampup-batch-size``. The samples that a run has consumed decide: with n increments up to the whole
    batch, a step after c samples takes ``start + increment * floor(c * n / samples)`` of them, at most the whole batch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    flag: ClassVar[str] = "--rampup-batch-size"

    start: int
    increment: int
    samples: int

    def __str__(self) -> str:
        """As the flag has it."""
        return f"{self.start} {self.increment} {self.samples}"

    def changes(self, full: int) -> list[BatchChange]:
        """Return all sizes up to ``full``, in order."""
        increments = (full - self.start) // self.increment
        # In whole numbers, where Megatron-LM divides: a size begins at the first sample that is not below.
        return [
            BatchChange(-(-k * self.samples // increments), self.start + k * self.increment)
            for k in range(increments + 1)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """Gives the global batch another size from certain tokens of the run on: ``--step-batch-size-schedule``.

    A step after c samples has the size of the last entry that begins at or before sample c. An entry begins at whole
    samples: its tokens are divided by the sequence length and rounded down, as in megatron-core.

    entries: tokens before the first step of a size, and that size in samples; by ascending tokens, the first at 0.
    seq_length: tokens of a sample.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    flag: ClassVar[str] = "--step-batch-size-schedule"

    entries: tuple[tuple[int, int], ...]
    seq_length: int = 1

    def __str__(self) -> str:
        """As the flag has it, quoted for a shell."""
        return f"'{' '.join(f'{tokens}:{size}' for tokens, size in self.entries)}'"

    @property
    def largest(self) -> int:
        """The largest size, for which a plan is made."""
        return max(size for _, size in self.entries)

    def changes(self, full: int) -> list[BatchChange]:
        """Return all sizes in order, whatever ``full`` is."""
        return [BatchChange(tokens // self.seq_length, size) for tokens, size in self.entries]


VaryingBatch = BatchRampup | BatchSchedule
"""What changes the global batch while a run goes on."""


def by_flag(varying: VaryingBatch | None) -> dict[str, VaryingBatch | None]:
    """Return for each flag that changes the batch its value in a run, ``None`` where it is not given."""
    return {kind.flag: varying if isinstance(varying, kind) else None for kind in (BatchSchedule, BatchRampup)}


class _Stretch(NamedTuple):
    """Steps of one size, one after the other: the first of them and its first sample, both counted from 0."""

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How many samples each step takes, and which is the first of them; steps count from 0.

    full: the global batch of the plan, and of every step whose batch does not change.
    varying_batch: what changes the batch. No size is above ``full``, and a ramp-up reaches it by whole increments.
    """

    full: int
    varying_batch: VaryingBatch | None = None

    def size(self, step: int) -> int:
        """Samples of a step."""
        return self._stretch(step).size

    def first_sample(self, step: int) -> int:
        """Samples of all steps before."""
        stretch = self._stretch(step)
        return stretch.first_sample + (step - stretch.first_step) * stretch.size

    def num_steps(self, samples: int) -> int:
        """How many whole steps so many samples are."""
        stretches = _stretches(self.full, self.varying_batch)
        at = bisect.bisect_right(stretches, samples, key=attrgetter("first_sample")) - 1
        return stretches[at].first_step + (samples - stretches[at].first_sample) // stretches[at].size

    @property
    def smaller(self) -> tuple[int, ...]:
        """The sizes of steps that are smaller than the whole batch, ascending."""
        return tuple(sorted({stretch.size for stretch in _stretches(self.full, self.varying_batch)} - {self.full}))

    def _stretch(self, step: int) -> _Stretch:
        stretches = _stretches(self.full, self.varying_batch)
        return stretches[bisect.bisect_right(stretches, step, key=attrgetter("first_step")) - 1]


@lru_cache(maxsize=64)
def _stretches(full: int, varying_batch: VaryingBatch | None) -> Sequence[_Stretch]:
    """All of them, in order; the last has no end."""
    changes = [BatchChange(0, full)] if varying_batch is None else varying_batch.changes(full)
    stretches, step, sample = [], 0, 0
    for change, later in itertools.pairwise(changes):
        if (steps := -(-(later.first_sample - sample) // change.size)) > 0:
            stretches.append(_Stretch(step, sample, change.size))
            step, sample = step + steps, sample + steps * change.size
    return (*stretches, _Stretch(step, sample, changes[-1].size))
