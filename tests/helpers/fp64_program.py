"""``pretrain_gpt.py`` as agents start it in tests: in double precision, and only as many steps as the test has allowed.

The precision has no flag: the planner is asked for plans in fp64. The steps are in a file that ``STEPS_FILE`` names;
one that ``SLOWNESS_FILE`` names says how much longer the forwards of each node take, and one that ``HOLD_FILE`` names
in which of :data:`HELD` ranks wait.
"""

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_gpt
from hetero.checkpoint import writer
from hetero.distributed.process_exit import bounded_exit
from hetero.elastic.planning_problem import PlanningProblem
from hetero.elastic.records import ASSIGNMENT_VARIABLE, DESCRIBE_VARIABLE, RankAssignment
from hetero.runtime.session import TrainingSession
from hetero.runtime.stage import StageModel
from hetero.serialization import load, save
from megatron.pretrain.evaluation import Evaluation
from megatron.pretrain.stopping import Stop

STEPS_FILE = "HETERO_TEST_STEPS_FILE"
SLOWNESS_FILE = "HETERO_TEST_SLOWNESS_FILE"
"""JSON: by name of a node, the seconds by which a forward is longer for each sample and layer."""
HOLD_FILE = "HETERO_TEST_HOLD_FILE"
"""A key of :data:`HELD`, or nothing. Who waits there says so in ``held`` in the same folder."""

HELD: dict[str, tuple[Any, str]] = {"save": (writer, "write_shard"), "evaluation": (Evaluation, "loss")}
"""Functions before which ranks can be held."""


def main() -> int:
    code = pretrain_gpt.main(sys.argv[1:])
    if code == 0 and (path := os.environ.get(DESCRIBE_VARIABLE)) is not None:
        problem = load(PlanningProblem, Path(path))
        double: dict[str, Any] = {"precision": "fp64", "arithmetic": "fp64"}
        profiles = tuple(dataclasses.replace(each, **double) for each in problem.profiles)
        save(dataclasses.replace(problem, precision="fp64", profiles=profiles), Path(path))
    return code


def wait_for_leave(path: Path, stop: Stop, step: int) -> None:
    """Until ``step`` is allowed, or the rank is asked to stop after it."""
    while not stop.wanted and step > int(path.read_text() or 0):
        time.sleep(0.005)


def with_limit(path: Path) -> int:
    """Train, and stand still before each step that is not allowed yet, but the first one of an epoch."""
    last: list[tuple[Stop, int]] = []
    has_stepped: list[bool] = []
    is_last, step = Stop.is_last, TrainingSession.step

    def noting(self: Stop, number: int) -> bool:
        last[:] = [(self, number)]
        return is_last(self, number)

    def waiting(self: TrainingSession, *args: Any, **options: Any) -> Any:
        if last and has_stepped:
            stop, number = last[0]
            wait_for_leave(path, stop, number + 1)
        has_stepped[:] = [True]
        return step(self, *args, **options)

    with mock.patch.object(Stop, "is_last", noting), mock.patch.object(TrainingSession, "step", waiting):
        return main()


def slowed(path: Path, node: str) -> contextlib.AbstractContextManager[object]:
    """Forwards take longer while the block lasts, as on a slower device."""
    forward = StageModel.forward

    def slower(self: StageModel, input_SBH: Any, batch: Any) -> Any:
        samples = input_SBH.shape[1] if input_SBH is not None else batch.tokens_BS.shape[0]
        seconds = json.loads(path.read_text()).get(node, 0.0)
        time.sleep(seconds * samples * len(self.module.decoder.layers))
        return forward(self, input_SBH, batch)

    return mock.patch.object(StageModel, "forward", slower)


@contextlib.contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold ranks before a function while the file ``path`` names it."""

    def held(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def waiting(*args: Any, **options: Any) -> Any:
            while path.read_text() == name:
                path.with_name("held").write_text(name)
                time.sleep(0.005)
            return function(*args, **options)

        return waiting

    with contextlib.ExitStack() as patches:
        for name, (owner, function) in HELD.items():
            patches.enter_context(mock.patch.object(owner, function, held(name, getattr(owner, function))))
        yield


def held_as_the_test_says() -> contextlib.AbstractContextManager[object]:
    """Of a rank of an agent whose test holds ranks."""
    path = os.environ.get(HOLD_FILE)
    return contextlib.nullcontext() if path is None else holding(Path(path))


def slowed_as_the_test_says() -> contextlib.AbstractContextManager[object]:
    """Of a rank of an agent; others are as fast as they are."""
    path, assignment = os.environ.get(SLOWNESS_FILE), os.environ.get(ASSIGNMENT_VARIABLE)
    if path is None or assignment is None:
        return contextlib.nullcontext()
    return slowed(Path(path), load(RankAssignment, Path(assignment)).node)


if __name__ == "__main__":
    with bounded_exit(), slowed_as_the_test_says(), held_as_the_test_says():
        limit = os.environ.get(STEPS_FILE)
        sys.exit(main() if limit is None else with_limit(Path(limit)))
