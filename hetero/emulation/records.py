"""Plain data that an emulated run writes down. All seconds are emulated ones."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from hetero.plan.ir import Plan
from hetero.schedule.actions import ActionKind
from hetero.serialization import STRICT


@dataclass(frozen=True, slots=True)
class Compute:
    """A forward, backward or W of ``stage`` as it ran.

    busy_s: of the time between its start and its end, without what it waited for weights in the middle.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    stage: int
    kind: ActionKind
    number: int
    start_s: float
    end_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """A slice, or this rank's part of it, as it travelled.

    boundary: the stage before it.
    kind: SEND_F from that stage, SEND_B back to it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    boundary: int
    kind: ActionKind
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class BucketCollective:
    """A collective on a bucket as it ran.

    kind: REDUCE of gradients, or GATHER of weights.
    position: the lowest layer in the bucket.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    kind: ActionKind
    ranks: tuple[int, ...]
    position: float
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What a rank did from one meeting of all ranks, before their updates, to the next.

    update_s: of the update, with which this time begins.
    wall_s: from meeting to meeting on the wall clock.
    lateness_s: by how much the wall clock was behind the emulated one at most.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    start_s: float
    end_s: float
    update_s: float
    wall_s: float
    lateness_s: float
    computes: tuple[Compute, ...]
    arrivals: tuple[Arrival, ...]
    collectives: tuple[BucketCollective, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedRun:
    """Steps of ``plan`` on an emulated cluster.

    ranks: every rank's steps after the first, which only warms up.
    losses: of all steps, of the small model that really computed.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    plan: Plan
    time_scale: float
    ranks: tuple[tuple[StepRecord, ...], ...]
    losses: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Mean seconds of a step by the wall clock, in emulated seconds."""
        steps = self.ranks[0]
        return sum(step.wall_s for step in steps) / len(steps)

    @property
    def emulated_step_s(self) -> float:
        """The same by the ranks' own clocks, which a machine that is late does not slow down."""
        steps = self.ranks[0]
        return (steps[-1].end_s - steps[0].start_s) / len(steps)

    @property
    def lateness_s(self) -> float:
        """By how much this machine was late at most."""
        return max(step.lateness_s for steps in self.ranks for step in steps)
