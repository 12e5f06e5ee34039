"""Makes a rank take as long as an emulated device would: real work, then sleep until that device would be done."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal

from hetero.cost.cost_model import CostModel, StageCost
from hetero.cost.simulation.copy_link import CopyLink
from hetero.cost.simulation.gradient_ready import share_of_backward, share_of_forward
from hetero.distributed.timing import Collective, HostSpan, Start, Timing, TransferDirection, Waitable
from hetero.emulation.cluster.device_memory import DeviceMemory
from hetero.emulation.cluster.emulated_clock import EmulatedClock
from hetero.emulation.cluster.link_model import (
    WORLD,
    CollectiveKey,
    LinkModel,
    MessageKey,
    TensorParallelKey,
    collective_key,
)
from hetero.emulation.cluster.real_time_check import kept_time_scale
from hetero.emulation.cluster.shared_timetable import Appointment, Occupation, SharedTimetable
from hetero.emulation.records import Arrival, BucketCollective, Compute, StepRecord
from hetero.plan.gradient_groups import Bucket
from hetero.plan.ir import Stage
from hetero.plan.reshard import Transfer
from hetero.schedule.actions import FETCHES, UPDATE, Action, ActionKind
from hetero.schedule.program import Point, QueuedAction

COPIES: Mapping[ActionKind, Literal["out", "in"]] = {
    **dict.fromkeys((ActionKind.OUT_A, ActionKind.ADD_G, ActionKind.OUT_G, ActionKind.GATHER_OUT), "out"),
    **dict.fromkeys((ActionKind.IN_A, ActionKind.IN_G, ActionKind.IN_P, ActionKind.GATHER_IN), "in"),
    **dict.fromkeys(FETCHES.values(), "in"),
}
"""What is copied between a device and its host, and which way."""

WarmUp = tuple[float, float]
"""Of the first step of a rank: processor seconds of its real work, and emulated seconds of computing."""


@dataclass(slots=True)
class _Step:
    """A :class:`StepRecord` in the making. No sum of gradients is launched before ``launched_s``."""

    start_s: float
    wall_s: float
    launched_s: float = 0.0
    update_s: float = 0.0
    computes: list[Compute] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    collectives: list[BucketCollective] = field(default_factory=list)

    def pause(self, seconds: float) -> None:
        """This time is none of the step's, on either clock."""
        self.start_s += seconds
        self.wall_s += seconds

    def finished(self, *, end_s: float, wall_s: float, lateness_s: float) -> StepRecord:
        return StepRecord(
            start_s=self.start_s,
            end_s=end_s,
            update_s=self.update_s,
            wall_s=wall_s - self.wall_s,
            lateness_s=lateness_s,
            computes=tuple(self.computes),
            arrivals=tuple(self.arrivals),
            collectives=tuple(self.collectives),
        )


@dataclass(slots=True)
class RunningCompute:
    """A compute that is under way; it ends later if weights come late."""

    action: Action
    start_s: float
    seconds: float
    end_s: float

    def at_s(self, share: float) -> float:
        """When so much of it is over."""
        return self.start_s + (self.end_s - self.start_s) * share

    def passed_s(self, share: float) -> float:
        """When so much of its work is done; it has waited for all that this needs."""
        return self.end_s - (1.0 - share) * self.seconds

    def had_to_wait(self, until_s: float, *, share: float) -> None:
        """What it needs once ``share`` of its work is done was there at ``until_s``: the rest comes then."""
        self.end_s = max(self.end_s, until_s + (1.0 - share) * self.seconds)


@dataclass(frozen=True, slots=True)
class Device:
    """The described device of a working rank: its stages, and what they take.

    stages: by index, those that it holds.
    computes: of a step, in order.
    update_s: of what it updates itself, for all its stages.
    """

    stages: Mapping[int, Stage]
    costs: Mapping[int, StageCost]
    tp_group: tuple[int, ...]
    memory: DeviceMemory
    computes: Sequence[Action]
    update_s: float

    @property
    def busy_s(self) -> float:
        """Seconds of all its computes in one step, and of the update."""
        return sum(self.costs[stage].seconds_of(kind) for stage, kind, _ in self.computes) + self.update_s


class EmulatedTiming(Timing):
    """Lets a rank take as long as the described device and its links would, and records what it did when.

    The first step runs as fast as this machine can and tells whether it can keep up; all later ones are emulated.

    Args:
        device: ``None`` on an idle rank.
        all_gather: collective over the world; what every rank gives, by rank.
    """

    def __init__(
        self,
        *,
        rank: int,
        device: Device | None,
        costs: CostModel,
        link_model: LinkModel,
        timetable: SharedTimetable,
        clock: EmulatedClock,
        all_gather: Callable[[WarmUp], Sequence[WarmUp]],
    ) -> None:
        self._rank = rank
        self._device = device
        self._costs = costs
        self._link_model = link_model
        self._timetable = timetable
        self._clock = clock
        self._all_gather = all_gather
        self._meetings = 0
        self._running: RunningCompute | None = None
        self._tp_meetings = 0
        self._outside = False
        self._worked_s = 0.0
        self._hosts_free_s: dict[ActionKind, float] = {}
        self._links = {way: CopyLink() for way in ("out", "in")}
        self._links_lock = Lock()
        self._gathers_launched_s = 0.0
        stages = device.stages if device is not None else {}
        self._copies = {s: link_model.block_copies(stage, rank) for s, stage in stages.items()}
        self._step = _Step(0.0, 0.0)
        self.steps: list[StepRecord] = []

    @property
    def time_scale(self) -> float:
        """Wall seconds per emulated second; known once the first step is over."""
        return self._clock.scale

    @property
    def _as_fast_as_it_can(self) -> bool:
        """In the first step, and outside of steps."""
        return self._meetings == 0 or self._outside

    @contextlib.contextmanager
    def compute(self, action: Action) -> Iterator[None]:
        if action == UPDATE:
            yield
            self._update()
            return
        if self._outside:
            yield
            return
        assert self._device is not None, "an idle rank computes nothing"
        self._device.memory.before(action)
        if not self._as_fast_as_it_can:
            self._wait_for_tensor_parallel_ranks()
        start_s, seconds = self._clock.at_s, self._device.costs[action.stage].seconds_of(action.kind)
        self._running = running = RunningCompute(action, start_s, seconds, start_s + seconds)
        worked_s = time.process_time()
        yield
        self._worked_s += time.process_time() - worked_s
        self._running = None
        self._device.memory.after(action)
        if not self._as_fast_as_it_can:
            self._clock.advance(running.end_s)
            self._step.computes.append(Compute(*action, running.start_s, running.end_s, running.seconds))

    def _update(self) -> None:
        if self._device is not None:
            self._step.update_s = self._device.update_s
            self._clock.advance(self._clock.at_s + self._device.update_s)

    def transfer(
        self, direction: TransferDirection, messages: Sequence[Transfer], number: int, start: Start
    ) -> Sequence[Waitable]:
        if self._as_fast_as_it_can or not messages:
            return start()
        keys = [MessageKey(direction, message.sender, message.receiver, number) for message in messages]
        for key, message in zip(keys, messages, strict=True):
            takes = self._link_model.message(key, message)
            self._timetable.come(key, self._meetings, ready_s=self._clock.at_s, takes=takes)
        works = start()
        if messages[0].sender == self._rank:
            return works
        return [_Arrivals(self, keys, works)]

    def collective(
        self,
        queued: QueuedAction,
        operation: Collective,
        bucket: Bucket,
        start: Start,
        *,
        ready_s: float | None = None,
    ) -> Sequence[Waitable]:
        if self._as_fast_as_it_can:
            return start()
        if queued.action.kind == ActionKind.REDUCE:
            # All ranks launch their sums in one order, and this one's turn came no sooner than the last one's. A thread
            # that launches them says when its own could begin: the backward that it was part of may be over by now.
            own_s = self.reached_s(queued) if ready_s is None else ready_s
            ready_s = self._step.launched_s = max(self._step.launched_s, own_s)
            self._clock.sleep_until(ready_s)
        elif ready_s is not None:
            # In a thread that launches one after the other.
            ready_s = self._gathers_launched_s = max(self._gathers_launched_s, ready_s)
        else:
            ready_s = self._clock.at_s
        key = collective_key(operation, bucket)
        takes = self._link_model.collective(operation, bucket)
        self._timetable.come(key, self._meetings, ready_s=ready_s, takes=takes)
        return [_Done(self, key, self._meetings, queued, bucket.position, start())]

    def now_s(self) -> float:
        return self._clock.at_s

    def reached_s(self, queued: QueuedAction) -> float:
        return max(map(self._passed_s, queued.after), default=self._clock.at_s)

    def wait_beside(self, works: Sequence[Waitable]) -> float:
        return max((work.wait_beside() if isinstance(work, _Done) else _waited(work) for work in works), default=0.0)

    @contextlib.contextmanager
    def host(self, kind: ActionKind, bucket: Bucket, *, after_s: float) -> Iterator[HostSpan]:
        """Copies out, updates and copies in are a queue each, and copies share a link each way; a thread is as late as
        its queue, but for the last."""
        span = HostSpan()
        if self._as_fast_as_it_can:
            yield span
            return
        queue = ActionKind.HOST_UPDATE if kind == ActionKind.PREVIEW else kind
        start_s = max(self._hosts_free_s.get(queue, 0.0), after_s)
        seconds = self._link_model.host_s(kind, bucket, self._rank)
        span.end_s = self._hosts_free_s[queue] = self._over_s(kind, start_s, seconds)
        yield span
        if kind != ActionKind.IN_P:
            self._clock.sleep_until(span.end_s)

    def host_came(self, queued: QueuedAction, at_s: float) -> None:
        if not self._as_fast_as_it_can:
            self._clock.advance(at_s)
            self._weights_came(queued, at_s)

    def block_end_s(self, position: float | None) -> float:
        running = self._running
        if running is None or self._as_fast_as_it_can:
            return self._clock.at_s
        if position is None:
            return running.end_s
        return running.passed_s(self._copies[running.action.stage][position].shares(running.action.kind)[1])

    def copy_block(self, kind: ActionKind, stage: int, position: float, *, after_s: float) -> float:
        """In a thread beside the rank, which waits for nobody: only the rank itself is as late as its copies."""
        if self._as_fast_as_it_can:
            return 0.0
        block = self._copies[stage][position]
        queue = ActionKind.IN_W_F if kind in FETCHES.values() else kind
        start_s = max(self._hosts_free_s.get(queue, 0.0), after_s)
        sum_s = block.sum_s if kind == ActionKind.ADD_G else 0.0
        end_s = self._hosts_free_s[queue] = self._over_s(kind, start_s, block.seconds_of(kind) - sum_s) + sum_s
        return end_s

    def _over_s(self, kind: ActionKind, start_s: float, seconds: float) -> float:
        """When something is over that may begin at ``start_s``, and is on a link to the host if it is a copy."""
        way = COPIES.get(kind)
        if way is None:
            return start_s + seconds
        with self._links_lock:
            return self._links[way].copy(start_s, seconds)

    def block_waited(self, position: float, until_s: float) -> None:
        running = self._running
        if running is not None and not self._as_fast_as_it_can:
            share, _ = self._copies[running.action.stage][position].shares(running.action.kind)
            running.had_to_wait(until_s, share=share)

    def _passed_s(self, point: Point) -> float:
        """When the described device passes a point; the real backward is over in no time."""
        running = self._running
        if running is None:
            return self._clock.at_s
        if running.action != point.action:
            # It has been passed before, and somebody else's turn came first.
            return running.start_s
        assert self._device is not None, "an idle rank computes nothing"
        if point.position is None:
            return running.end_s
        stage = self._device.stages[point.action.stage]
        return running.at_s(share_of_backward(self._costs, stage, point.position, point.action.kind))

    def meet(self) -> None:
        """Wait at the end of a step's gradients until all ranks are there, and record the step."""
        if self._meetings == 0:
            self._finish_warm_up()
        self._meetings += 1
        self._timetable.come(WORLD, self._meetings, ready_s=self._clock.at_s, takes=_NOTHING)
        self._clock.advance(self._timetable.appointment(WORLD, self._meetings).end_s)
        at_s, wall_s = self._clock.at_s, self._clock.wall_s()
        if self._meetings > 1:
            self.steps.append(self._step.finished(end_s=at_s, wall_s=wall_s, lateness_s=self._clock.lateness_s))
        self._clock.lateness_s = 0.0
        self._step = _Step(at_s, wall_s)

    @contextlib.contextmanager
    def outside_steps(self) -> Iterator[None]:
        """Emulate nothing inside; afterwards the emulated time goes on from the wall clock's on all ranks."""
        if self._as_fast_as_it_can:
            yield
            return
        self._outside = True
        before_s = self._clock.at_s
        yield
        self._outside = False
        self._meetings += 1
        self._timetable.come(WORLD, self._meetings, ready_s=max(before_s, self._clock.wall_s()), takes=_NOTHING)
        self._clock.at_s = self._timetable.appointment(WORLD, self._meetings).end_s
        self._step.pause(self._clock.at_s - before_s)

    def _wait_for_tensor_parallel_ranks(self) -> None:
        """Wait until the last of the tensor-parallel ranks has its input: then their compute begins."""
        assert self._device is not None
        if len(self._device.tp_group) > 1:
            self._tp_meetings += 1
            key = TensorParallelKey(self._device.tp_group)
            self._timetable.come(key, self._tp_meetings, ready_s=self._clock.at_s, takes=_NOTHING)
            self._clock.advance(self._timetable.appointment(key, self._tp_meetings).end_s)

    def appointment(self, key: MessageKey | CollectiveKey, *, number: int | None = None) -> Appointment:
        """When something of this step starts and ends; the rank's own time moves to its end."""
        found = self.appointment_beside(key, self._meetings if number is None else number)
        self._clock.advance(found.end_s)
        return found

    def appointment_beside(self, key: MessageKey | CollectiveKey, number: int) -> Appointment:
        """When something of the step with this number starts and ends, for a thread beside the rank."""
        return self._timetable.appointment(key, number)

    def arrived(self, key: MessageKey) -> None:
        """A message is really here; it counts as received when the described link has brought it."""
        found = self.appointment(key)
        direction = key.direction
        self._step.arrivals.append(Arrival(direction.boundary, direction.kind, key.number, found.start_s, found.end_s))

    def done(self, key: CollectiveKey, number: int, queued: QueuedAction, position: float) -> None:
        """A collective is really done; it counts as done when the described links have carried it."""
        found = self.appointment(key, number=number)
        ran = BucketCollective(queued.action.kind, key.ranks, position, found.start_s, found.end_s)
        self._step.collectives.append(ran)
        self._weights_came(queued, found.end_s)

    def _weights_came(self, queued: QueuedAction, at_s: float) -> None:
        """A forward that waited for weights in its middle has the rest of its layers still before it."""
        running = self._running
        if running is None or self._device is None:
            return
        for point in queued.before:
            if point.action == running.action and point.position is not None:
                stage = self._device.stages[point.action.stage]
                running.had_to_wait(at_s, share=share_of_forward(self._costs, stage, point.position))

    def _finish_warm_up(self) -> None:
        """Compare this machine's work with the emulated one, and start the clock; collective over the world.

        Raises:
            ConfigError: this machine cannot keep up with the time scale that was asked for; on every rank.
        """
        own = self._worked_s, self._device.busy_s if self._device is not None else 0.0
        self._clock.scale = kept_time_scale(
            self._all_gather(own), num_cores=len(os.sched_getaffinity(0)), asked=self._clock.asked_scale
        )
        self._clock.at_s = self._clock.wall_s()


class _Arrivals:
    """Messages of one slice on their way to this rank."""

    def __init__(self, timing: EmulatedTiming, keys: Sequence[MessageKey], works: Sequence[Waitable]) -> None:
        self._timing = timing
        self._keys = keys
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        for key in self._keys:
            self._timing.arrived(key)

    def is_completed(self) -> bool:
        return False


class _Done:
    """A collective under way, for the ``number``-th time."""

    def __init__(
        self,
        timing: EmulatedTiming,
        key: CollectiveKey,
        number: int,
        queued: QueuedAction,
        position: float,
        works: Sequence[Waitable],
    ) -> None:
        self._timing = timing
        self._key = key
        self._number = number
        self._queued = queued
        self._position = position
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._timing.done(self._key, self._number, self._queued, self._position)

    def wait_beside(self) -> float:
        """In a thread beside the rank; returns when it is over."""
        for work in self._works:
            work.wait()
        return self._timing.appointment_beside(self._key, self._number).end_s

    def is_completed(self) -> bool:
        return False


def _waited(work: Waitable) -> float:
    work.wait()
    return 0.0


_NOTHING = Occupation(seconds=0.0)
