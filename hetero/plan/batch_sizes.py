"""Says how many samples each step of a run takes, also where the global batch grows in its first part."""

import bisect
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict

from hetero.serialization import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRampup:
    """Lets the global batch grow from ``start`` by ``increment`` until it is whole, evenly over ``samples`` samples.

    Megatron-LM's ``--rampup-batch-size``. The samples that a run has consumed decide: with n increments up to the whole
    batch, a step after c samples takes ``start + increment * floor(c * n / samples)`` of them, at most the whole batch.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start: int
    increment: int
    samples: int

    def __str__(self) -> str:
        """As the flag has it."""
        return f"{self.start} {self.increment} {self.samples}"


class _Stretch(NamedTuple):
    """Steps of one size, one after the other: the first of them and its first sample, both counted from 0."""

    first_step: int
    first_sample: int
    size: int


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """How many samples each step takes, and which is the first of them; steps count from 0.

    full: the global batch of the plan, and of every step without a ramp-up.
    rampup: its ``increment`` divides the way from its ``start`` to ``full``, of which it is below.
    """

    full: int
    rampup: BatchRampup | None = None

    def size(self, step: int) -> int:
        """Samples of a step."""
        return self._stretch(step).size

    def first_sample(self, step: int) -> int:
        """Samples of all steps before."""
        stretch = self._stretch(step)
        return stretch.first_sample + (step - stretch.first_step) * stretch.size

    def num_steps(self, samples: int) -> int:
        """How many whole steps so many samples are."""
        stretches = _stretches(self.full, self.rampup)
        at = bisect.bisect_right(stretches, samples, key=attrgetter("first_sample")) - 1
        return stretches[at].first_step + (samples - stretches[at].first_sample) // stretches[at].size

    @property
    def smaller(self) -> tuple[int, ...]:
        """The sizes of steps that are smaller than the whole batch, ascending."""
        return tuple(each.size for each in _stretches(self.full, self.rampup)[:-1])

    def _stretch(self, step: int) -> _Stretch:
        stretches = _stretches(self.full, self.rampup)
        return stretches[bisect.bisect_right(stretches, step, key=attrgetter("first_step")) - 1]


@lru_cache(maxsize=64)
def _stretches(full: int, rampup: BatchRampup | None) -> tuple[_Stretch, ...]:
    """All of them, in order; the last has no end."""
    stretches, step, sample = [], 0, 0
    if rampup is not None:
        increments = (full - rampup.start) // rampup.increment
        for k in range(increments):
            size = rampup.start + k * rampup.increment
            # In whole numbers, where Megatron-LM divides: the next size begins at the first sample that is not below.
            end = -(-(k + 1) * rampup.samples // increments)
            if (steps := -(-(end - sample) // size)) > 0:
                stretches.append(_Stretch(step, sample, size))
                step, sample = step + steps, sample + steps * size
    return (*stretches, _Stretch(step, sample, full))
