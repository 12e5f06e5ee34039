"""Measures the profiles of one device within a budget of time: every point a few times, then every point more often.

Every measurement is in its file before the next one begins.
"""

import argparse
import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hetero.errors import ConfigError
from hetero.profiling.built_parts import BuiltParts
from hetero.profiling.compiled_shapes import compile_for_each_shape
from hetero.profiling.expected_times import ExpectedTimes
from hetero.profiling.measure_point import MeasuredPoint, PassBytes, Share, measure_point
from hetero.profiling.points import NUM_ESSENTIAL, ProfilePoint, described
from hetero.profiling.profile_file import ProfileFile
from hetero.profiling.profiled_plan import STAGE_OF
from hetero.profiling.requested_profiles import ProfiledDevice, RequestedProfile, requested_points, requested_profiles
from hetero.profiling.stage_part import world_of_rank_0

MOST_S = 3.0
"""Seconds that one point is repeated for at most: a heuristic, some hundred repetitions of a block on a GPU."""

_BUSY_S = 1.0
"""Between two looks at whether all has been measured."""

PointOfProfile = tuple[int, ProfilePoint]
"""The number of a profile, and a point of it."""


def measure_device(
    args: argparse.Namespace,
    on: ProfiledDevice,
    *,
    date: str,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Path]:
    """Measure what the flags of ``hetero profile run`` ask for, and return the profiles.

    Args:
        date: of today.
        say: takes a line of progress.

    Raises:
        ConfigError: the flags do not go with the model or the device, a file is of something else, or no block fits
            in the memory.
    """
    deadline_s = clock() + args.budget_seconds
    requested = list(requested_profiles(args, on, date=date))
    wanted = requested_points(args, requested[0].layers.profiled)
    world_size = _world_size(wanted)
    with world_of_rank_0(world_size=world_size), compile_for_each_shape():
        run = _DeviceRun(
            requested,
            wanted,
            BuiltParts(on.device, world_size=world_size),
            device=on.device,
            deadline_s=deadline_s,
            say=say,
            clock=clock,
        )
        total = len(wanted) * len(requested)
        say(
            f"{on.type.name} ({on.hardware}): {len(run.todo)} of {total} points are to be measured, the most telling "
            f"first, in {args.budget_seconds:g} s"
        )
        run.measure_each()
        run.measure_more_often()
    return run.written()


def keep_busy(
    args: argparse.Namespace,
    on: ProfiledDevice,
    *,
    date: str,
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Compute what others measure, until ``is_over``: devices that share power, memory or cores share them in training.

    Args:
        date: of today.
        is_over: is asked every second, about.

    Raises:
        ConfigError: the flags do not go with the model or the device.
    """
    profile = next(requested_profiles(args, on, date=date))
    wanted = requested_points(args, profile.layers.profiled)
    share, world_size = Share(seconds=_BUSY_S, longest_s=math.inf), _world_size(wanted)
    with world_of_rank_0(world_size=world_size):
        parts = BuiltParts(on.device, world_size=world_size)
        while not is_over():
            try:
                part = parts.take(profile.layers, wanted[0])
                measure_point(wanted[0], part, device=on.device, share=share, clock=clock)
            except torch.OutOfMemoryError:
                return


def _world_size(wanted: Sequence[ProfilePoint]) -> int:
    return len(STAGE_OF) * max(point.tp for point in wanted)


class _DeviceRun:
    """Measures points of several profiles in two rounds.

    todo: what the files do not have, the most telling first.
    """

    def __init__(
        self,
        requested: Sequence[RequestedProfile],
        wanted: Sequence[ProfilePoint],
        parts: BuiltParts,
        *,
        device: torch.device,
        deadline_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._requested = requested
        self._files = [ProfileFile(each.path, each.head) for each in requested]
        self._wanted = wanted
        self._parts = parts
        self._device = device
        self._deadline_s = deadline_s
        self._say = say
        self._clock = clock
        self._expected = ExpectedTimes()
        self._too_large: dict[tuple[int, str, str], float] = {}
        self._measured: dict[PointOfProfile, MeasuredPoint] = {}
        self.todo: list[PointOfProfile] = [
            (number, point) for point in wanted for number, file in enumerate(self._files) if file.left([point])
        ]

    @property
    def _left_s(self) -> float:
        return self._deadline_s - self._clock()

    def measure_each(self) -> None:
        """Measure each point, what no plan can do without for its share of the time, and the others a few times."""
        for done, task in enumerate(self.todo):
            number, point = task
            is_essential = point in self._wanted[:NUM_ESSENTIAL]
            if self._does_not_fit(task) or not (is_essential or self._is_in_time(task)):
                continue
            even_s = self._left_s / (len(self.todo) - done) - self._expected.preparation_s
            share = Share(
                seconds=max(0.0, min(MOST_S, even_s)) if is_essential else 0.0,
                longest_s=math.inf if is_essential else self._left_s,
            )
            try:
                found = self._visit(task, share)
            except torch.OutOfMemoryError as error:
                self._too_large[number, point.what, point.kind] = point.relative_cost
                label = self._requested[number].label
                self._say(f"{label}{point}: does not fit in the memory of the device, and is left out{_short(error)}")
                continue
            if found is not None:
                self._say_progress(f"[{done + 1}/{len(self.todo)}]", task, to_do=self.todo[done + 1 :])

    def measure_more_often(self) -> None:
        """Share out the time left among the points of this run, one part of the model after another."""
        tasks = list(self._measured)
        firsts = {(number, point.part): place for place, (number, point) in reversed(list(enumerate(tasks)))}
        tasks.sort(key=lambda task: firsts[task[0], task[1].part])
        for done, task in enumerate(tasks):
            before, left_s = self._measured[task], self._left_s
            seconds = min(MOST_S, left_s / (len(tasks) - done) - self._overhead_s(task))
            if seconds <= before.repetitions * before.repetition_s:
                continue
            try:
                found = self._visit(task, Share(seconds=seconds, longest_s=left_s), known=before.bytes)
            except torch.OutOfMemoryError:
                # It fitted before, on a device that others use as well: what was measured stays.
                continue
            if found is not None:
                self._say_progress(f"[{done + 1}/{len(tasks)} more often]", task, to_do=[])

    def written(self) -> list[Path]:
        """Say what is in each profile, and what is not, and why; return their paths.

        Raises:
            ConfigError: no block fits in the memory of the device.
        """
        needed_s = 0.0
        for number, (profile, file) in enumerate(zip(self._requested, self._files, strict=True)):
            if file.profile is None:
                raise ConfigError(
                    f"{profile.label}{self._wanted[0]}, and all that was tried beside it, does not fit in the "
                    "memory of the device; give a smaller --micro-batch-size or --seq-length, or a larger --tp"
                )
            left = file.left(self._wanted)
            self._say(f"{profile.path}: {len(self._wanted) - len(left)} of {len(self._wanted)} points")
            too_large = [point for point in left if self._does_not_fit((number, point))]
            too_late = [point for point in left if point not in too_large]
            if too_large:
                self._say(f"  do not fit in the memory of the device: {described(too_large)}")
            if too_late:
                needed_s += sum(self._expected.visit_s(number, point) for point in too_late)
                self._say(f"  there was no time for {described(too_late)}")
        if needed_s > 0:
            self._say(
                f"the same command goes on with what there was no time for; --budget-seconds {math.ceil(needed_s)} is "
                "about enough"
            )
        flags = " ".join(f"--profile {shlex.quote(str(each.path))}" for each in self._requested)
        self._say(f"hetero plan {flags} ...")
        return [each.path for each in self._requested]

    def _does_not_fit(self, task: PointOfProfile) -> bool:
        """Return whether ``task`` is as large as one that did not fit, or needs a block, none of which fits."""
        number, point = task
        if point.relative_cost >= self._too_large.get((number, point.what, point.kind), math.inf):
            return True
        return self._files[number].profile is None and point.what != "passes"

    def _is_in_time(self, task: PointOfProfile) -> bool:
        return 0 < self._left_s >= self._expected.least_s(*task)

    def _overhead_s(self, task: PointOfProfile) -> float:
        """Return the seconds of another visit that are no repetitions: of the warm-up, and to build the part again."""
        number, point = task
        has_part = self._parts.has(self._requested[number].layers, point)
        return 2 * self._measured[task].repetition_s + (0.0 if has_part else self._expected.preparation_s)

    def _visit(self, task: PointOfProfile, share: Share, known: PassBytes | None = None) -> MeasuredPoint | None:
        """Measure ``task``, alone on the device if other parts leave no room, and write what was found."""
        number, point = task
        start_s, has_room = self._clock(), True
        try:
            found = self._measure(task, share, known)
        except torch.OutOfMemoryError:
            has_room = False
            if not self._parts.forget_others(self._requested[number].layers, point):
                raise
        if not has_room:
            # Only here the traceback is gone, and with it what the first try had allocated.
            found = self._measure(task, share, known)
        if found is not None:
            self._measured[task] = found
            self._expected.learn(
                number,
                point,
                repetition_s=found.repetition_s,
                repetitions=found.repetitions,
                all_s=self._clock() - start_s,
            )
            self._files[number].add(found.measured, found.memory, attention=found.attention)
        return found

    def _measure(self, task: PointOfProfile, share: Share, known: PassBytes | None) -> MeasuredPoint | None:
        number, point = task
        start_s = self._clock()
        part = self._parts.take(self._requested[number].layers, point)
        left_s = share.longest_s - (self._clock() - start_s)
        share = share._replace(longest_s=left_s)
        return measure_point(point, part, device=self._device, share=share, clock=self._clock, known=known)

    def _say_progress(self, place: str, task: PointOfProfile, *, to_do: Sequence[PointOfProfile]) -> None:
        number, point = task
        label, said = self._requested[number].label, self._measured[task].said
        more_s = sum(self._expected.visit_s(*each) for each in to_do) + MOST_S * (len(self.todo))
        to_go_s = max(0.0, min(self._left_s, more_s))
        self._say(f"{place} {label}{point}: {said}; about {to_go_s:.0f} s to go")


def _short(error: torch.OutOfMemoryError) -> str:
    """Return what torch asked for and what was free: ``; Tried to allocate 2.00 GiB. GPU 0 has ... is free``."""
    found = re.search(r"Tried to allocate .*?(?:is free|$)", str(error), re.DOTALL)
    return "" if found is None else f"; {found[0].strip()}"
