"""Searches in several processes: the best of all seeds, and what is said of processes that end without an answer."""

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

import pytest

from hetero.errors import ConfigError, PlanError
from hetero.planner.construction import Construction
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, goal_value
from hetero.planner.siblings import MOST_PROCESSES, siblings, usual_processes
from tests.unit.planner.clusters import cluster, opt_model, problem
from tests.unit.planner.random_problems import random_problem

EFFORT_S = 0.4


def question(seed: int = 7) -> Problem:
    return problem(cluster(("A100-40", 2, 1), ("V100-16", 2, 1)), opt_model(6, 1024, 16), 12, seed=seed)


def planned(asked: Problem, processes: int = 1) -> ScoredPlan:
    return plan_cluster(asked, deadline=Deadline(EFFORT_S, CountedWork()), processes=processes).scored


def test_the_plan_is_the_best_of_all_seeds() -> None:
    alone = [planned(question(seed)) for seed in (7, 8, 9)]
    together = planned(question(), processes=3)
    assert goal_value(together, question()) == min(goal_value(each, question()) for each in alone)
    assert together.plan == planned(question(), processes=3).plan


def test_what_does_not_fit_is_said_as_by_one_process() -> None:
    asked = random_problem(3, gpus=(1, 1), num_layers=400, batch=4)
    said = []
    for processes in (1, 2):
        with pytest.raises(PlanError) as raised:
            planned(asked, processes=processes)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_process_that_is_killed_is_told() -> None:
    def killed(asked: Problem) -> Sequence[ScoredPlan]:
        os.kill(os.getpid(), signal.SIGKILL)
        return ()

    with siblings(question(), killed, number=2) as others:
        assert others.plans() == []
    assert others.failed == [-signal.SIGKILL] * 2


def test_a_process_that_is_killed_loses_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others found is planned with, and the answer says what is missing."""
    parent, search = os.getpid(), Construction.go_on

    def killed_in_siblings(construction: Construction, rung: Deadline) -> Shortlist | None:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return search(construction, rung)

    alone = planned(question())
    monkeypatch.setattr(Construction, "go_on", killed_in_siblings)
    found = plan_cluster(question(), deadline=Deadline(EFFORT_S, CountedWork()), processes=3)
    assert found.plan == alone.plan
    assert (found.processes, found.failed_processes) == (3, (-9, -9))


def test_an_error_of_a_process_is_raised() -> None:
    def wrong(asked: Problem) -> Sequence[ScoredPlan]:
        raise ZeroDivisionError(f"with seed {asked.seed}")

    with siblings(question(), wrong, number=1) as others, pytest.raises(ZeroDivisionError, match="with seed 8"):
        others.plans()


def test_none_is_left_when_the_first_one_fails() -> None:
    def waits(asked: Problem) -> Sequence[ScoredPlan]:
        signal.pause()
        return ()

    with suppress(ZeroDivisionError), siblings(question(), waits, number=2) as others:
        running = [process for process, _ in others._running]
        raise ZeroDivisionError
    assert [process.exitcode for process in running] == [-signal.SIGTERM] * 2


@pytest.mark.parametrize("processes", [0, MOST_PROCESSES + 1])
def test_a_number_that_cannot_be_meant_is_refused(processes: int) -> None:
    with pytest.raises(ConfigError, match=f"processes are {processes}, must be at least 1 and at most 256"):
        planned(question(), processes=processes)


@pytest.mark.parametrize(("cores", "usual"), [(1, 1), (3, 3), (64, 4)])
def test_one_searches_on_each_core_but_no_more_than_four(
    monkeypatch: pytest.MonkeyPatch, cores: int, usual: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert usual_processes() == usual
