"""Searches in several processes at once, each with another seed, and takes the best plan of all.

What a search among whole plans finds in a time depends on what it draws: the plans of different seeds are up to a tenth
apart. A machine with more cores can have several draws in the same time. A sibling is a fork that does all that its
parent does; only its plans come back, and the parent scores them itself. With a count of work for a time limit each
counts its own, so that the same seed and number of processes give the same plan.
"""

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, score_if_legal

MOST_PLANS = 4
"""Plans that a sibling hands over, the best first. A heuristic: where rings are open, another one may be chosen."""

SEEDS = 1 << 31
"""Seeds are below."""

MOST_PROCESSES = 256
"""A heuristic: each takes a core and some hundred MB."""

USUAL_PROCESSES = 4
"""So many at most search at once if nobody says how many. A heuristic: more take memory that a login node may lack."""

PlanSearch = Callable[[Problem], Sequence[ScoredPlan]]


def usual_processes() -> int:
    """So many search at once if nobody says how many: one on each core that there is for this process, up to
    :data:`USUAL_PROCESSES`."""
    return min(USUAL_PROCESSES, len(os.sched_getaffinity(0)))


class Siblings:
    """Forks that search for plans of one problem.

    failed: the exit codes of those that ended without an answer.
    """

    def __init__(self, problem: Problem) -> None:
        self.failed: list[int] = []
        self._problem = problem
        self._running: list[tuple[multiprocessing.context.ForkProcess, Connection]] = []

    def start(self, search: PlanSearch, *, number: int) -> None:
        """Fork so many, each of which calls ``search`` with a seed of its own."""
        context = multiprocessing.get_context("fork")
        for i in range(number):
            own = dataclasses.replace(self._problem, seed=(self._problem.seed + 1 + i) % SEEDS)
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_hand_over, args=(search, own, sender), daemon=True)
            process.start()
            sender.close()
            self._running.append((process, receiver))

    def plans(self) -> list[ScoredPlan]:
        """What they found, when all have ended; what one would have found that ended without an answer is missing."""
        found: dict[Plan, None] = {}
        for process, receiver in self._running:
            try:
                answer = receiver.recv()
            except EOFError:
                process.join()
                self.failed.append(process.exitcode or 0)
                continue
            if isinstance(answer, Exception):
                raise answer
            found |= dict.fromkeys(answer)
        scored = (score_if_legal(plan, self._problem) for plan in found)
        return [each for each in scored if each is not None]

    def end(self) -> None:
        """End those that still run."""
        for process, receiver in self._running:
            process.terminate()
            process.join()
            receiver.close()


@contextlib.contextmanager
def siblings(problem: Problem, search: PlanSearch, *, number: int) -> Iterator[Siblings]:
    """So many siblings, of which none is left afterwards.

    Raises:
        ConfigError: that is below 0, or too many.
    """
    if not 0 <= number < MOST_PROCESSES:
        raise ConfigError(
            f"the planner's processes are {number + 1}, must be at least 1 and at most {MOST_PROCESSES} (--processes)"
        )
    forked = Siblings(problem)
    try:
        forked.start(search, number=number)
        yield forked
    finally:
        forked.end()


def _hand_over(search: PlanSearch, problem: Problem, sender: Connection) -> None:
    try:
        sender.send([each.plan for each in search(problem)[:MOST_PLANS]])
    except PlanError:
        sender.send([])  # What does not fit, or was not found in time, its parent says.
    except Exception as error:  # noqa: BLE001 - raised again by the parent
        sender.send(error)
