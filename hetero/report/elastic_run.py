"""The data of a page about an elastic run: who was there when, what trained, and what each change cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

NodeState = Literal["training", "present", "idle", "lost"]
"""``present``: there, while nobody trains; ``idle``: there, while others train; ``lost``: gone without a word."""

NODE_STATES: tuple[NodeState, ...] = ("training", "present", "idle", "lost")


PHASES = (
    "finish and commit the step",
    "end ranks",
    "ask nodes, plan",
    "agree on the epoch",
    "fork",
    "meet",
    "build",
    "restore",
    "first step",
)
"""Of a change of nodes, in the order in which they come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpan:
    """What a node was from one moment to another, in seconds from the start of the run."""

    node: str
    state: NodeState
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the run was at a moment.

    committed: last step known to be committed, 0 for none.
    """

    time_s: float
    step: int
    committed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochHistory:
    """What happened in an epoch; times in seconds from the start of the run.

    start_step: it went on after this step.
    plan: layers per stage, device and where the plan came from, in words; empty if no log has it.
    reason: why it was made.
    first_step_s: when all nodes had done a step; ``None`` if that never came.
    progress: in the order of time.
    """

    number: int
    nodes: tuple[str, ...]
    start_step: int
    plan: str
    reason: str
    begin_s: float
    first_step_s: float | None
    end_s: float
    progress: tuple[Progress, ...]

    @property
    def last_step(self) -> int:
        """The last that was done in it, or the one that it began after."""
        return max((each.step for each in self.progress), default=self.start_step)

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step from its first one on; ``None`` with fewer than two."""
        done = [each for each in self.progress if each.step > self.start_step]
        if len(done) < 2 or done[-1].step == done[0].step:
            return None
        return (done[-1].time_s - done[0].time_s) / (done[-1].step - done[0].step)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOfNodes:
    """The way from one epoch to the next.

    epoch: that followed.
    is_loss: something broke; else the ranks finished their step and committed it.
    begin_s: when it was noticed, in seconds from the start of the run.
    phases: by name of :data:`PHASES`, seconds from the end of the phase before; the first counts from ``begin_s``.
    repeated: steps that were done and have to be done again.
    """

    epoch: int
    reason: str
    is_loss: bool
    begin_s: float
    phases: Mapping[str, float]
    repeated: int

    @property
    def seconds(self) -> float:
        """From its notice to the first step."""
        return sum(self.phases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class RunNote:
    """Something else that a node has said, in seconds from the start of the run."""

    time_s: float
    node: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ElasticRun:
    """All that figure and page are made from.

    name: what the reader calls it.
    origin: where the times come from: ``measured``, ``emulated`` or ``simulated``, and of what.
    published: time and number of each step that went to the object store.
    ending: how the run ended, for people; empty if no log says so.
    """

    name: str
    origin: str
    seconds: float
    nodes: tuple[str, ...]
    spans: tuple[NodeSpan, ...]
    epochs: tuple[EpochHistory, ...]
    changes: tuple[ChangeOfNodes, ...]
    published: tuple[tuple[float, int], ...]
    notes: tuple[RunNote, ...]
    ending: str

    @property
    def steps(self) -> int:
        """Those that the run has in the end."""
        return self.epochs[-1].last_step if self.epochs else 0

    @property
    def committed(self) -> int:
        """The last step known to be committed."""
        return max((each.committed for epoch in self.epochs for each in epoch.progress), default=0)

    @property
    def repeated(self) -> int:
        """Steps that were done twice."""
        return sum(change.repeated for change in self.changes)

    @cached_property
    def training_share(self) -> float:
        """Share of the run's time, from its first step on, in which it trained; 0 before there is one."""
        firsts = [epoch.first_step_s for epoch in self.epochs if epoch.first_step_s is not None]
        if not firsts or self.seconds <= firsts[0]:
            return 0.0
        trained_s = sum(each.end_s - each.first_step_s for each in self.epochs if each.first_step_s is not None)
        return trained_s / (self.seconds - firsts[0])

    def phases(self) -> Sequence[str]:
        """Those of :data:`PHASES` that some change went through."""
        return [phase for phase in PHASES if any(phase in change.phases for change in self.changes)]
