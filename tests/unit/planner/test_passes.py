"""Every pass over finished plans, row by row: legal plans that fit and are not worse, with time or without."""

from functools import cache

import pytest

from hetero.cost.memory import plan_memory
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.validate import validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.passes import PASSES, Improvement, ImprovementPass, improved
from hetero.planner.problem import Problem
from hetero.planner.scoring import EstimatedPlan, ScoredPlan, Shortlist, bytes_over_capacity, goal_value
from hetero.planner.time_shares import TimeShare
from tests.helpers.commands import ROOT
from tests.unit.planner import few_layers, line, short_memory, slow_zones, unlike_devices
from tests.unit.planner.line import score_of


@cache
def problems() -> dict[str, tuple[Problem, Shortlist]]:
    """Of each pass at least one that it makes better."""
    pipelines = line.line_problem(batch=8)
    whole, halves = (score_of(line.uniform(batch=8, pp=pp), pipelines) for pp in (4, 2))
    uneven = unlike_devices.mixed_problem()
    zones = slow_zones.problem(slow_zones.zones(2, gpus_per_node=4))
    cut = few_layers.question(6, 4)
    by_hand = few_layers.pipeline(cut, 2, 3, 4)
    short = short_memory.problem()
    return {
        "a line": (pipelines, Shortlist(whole, (whole, halves))),
        "unlike devices": (uneven, Shortlist(score_of(unlike_devices.halves(uneven), uneven))),
        "short memory": (short, Shortlist(score_of(short_memory.least_memory_plan(short), short))),
        "two zones": (zones, Shortlist(score_of(slow_zones.data_parallel(8), zones))),
        "six layers on four devices": (
            cut,
            Shortlist(score_of(by_hand, cut), (), (EstimatedPlan(score_of(by_hand, cut).step_s, lambda: by_hand),)),
        ),
    }


@cache
def result(pass_name: str, name: str, limit_s: float) -> ScoredPlan:
    """What a pass makes of a problem by so much counted work: the same every time, and found once for all tests."""
    problem, shortlist = problems()[name]
    (row,) = (row for row in PASSES if row.name == pass_name)
    return row.improve(shortlist, problem, Deadline(limit_s, CountedWork()))


def check(found: ScoredPlan, problem: Problem, shortlist: Shortlist) -> None:
    validate(found.plan)
    check_plan_on_cluster(found.plan, problem.cluster)
    assert found.memory == plan_memory(found.plan, problem.costs)
    assert bytes_over_capacity(found.plan, problem, found.memory) == {}
    assert found == score_of(found.plan, problem), "its prediction is the simulator's of this very plan"
    assert goal_value(found, problem) <= goal_value(shortlist.best, problem)


@pytest.mark.slow
@pytest.mark.parametrize("row", PASSES, ids=lambda row: row.name)
@pytest.mark.parametrize("name", problems())
@pytest.mark.parametrize("limit_s", [0.01, 0.5])
def test_a_plan_is_legal_and_fits_and_is_not_worse(row: ImprovementPass, name: str, limit_s: float) -> None:
    problem, shortlist = problems()[name]
    check(result(row.name, name, limit_s), problem, shortlist)


@pytest.mark.parametrize("row", PASSES, ids=lambda row: row.name)
@pytest.mark.parametrize("name", problems())
def test_without_time_the_plan_stays(row: ImprovementPass, name: str) -> None:
    problem, shortlist = problems()[name]
    assert row.improve(shortlist, problem, Deadline(0.0)) is shortlist.best


@pytest.mark.parametrize("row", PASSES, ids=lambda row: row.name)
def test_every_pass_has_a_plan_that_it_makes_better(row: ImprovementPass) -> None:
    found = {
        name: result(row.name, name, 0.5).step_s < shortlist.best.step_s for name, (_, shortlist) in problems().items()
    }
    assert any(found.values()), found


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_all_passes_take_the_best_of_each() -> None:
    problem, shortlist = problems()["a line"]
    found = improved(shortlist, problem, Deadline(2.0, CountedWork()))
    check(found, problem, shortlist)
    alone = [row.improve(shortlist, problem, Deadline(0.2, CountedWork())).step_s for row in PASSES]
    assert found.step_s <= min(alone)


def test_the_page_has_both_tables() -> None:
    """docs/planner.md lists the steps and the passes with their shares of the time as they are."""
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    for row in PASSES:
        assert f"| {row.name} | {row.changes} | {row.share:.0%} |" in page
    for step in TimeShare:
        assert f"| {step.name.lower().replace('_', ' ')} | {step.purpose} | {step.share:.0%} |" in page


def test_passes_that_had_too_little_time_are_run_again_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, shortlist = problems()["unlike devices"]
    run = []

    def improve(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
        run.append(deadline.is_over())
        return shortlist.best

    row = ImprovementPass(name="one that looks at the time", changes="nothing", share=1.0, improve=improve)
    monkeypatch.setattr("hetero.planner.improve.passes.PASSES", (row,))
    improvement = Improvement(problem)
    for limit_s in (0.0, 1.0, 2.0):
        improvement.improve(shortlist, Deadline(limit_s, CountedWork()))
    assert run == [True, False]
    assert improvement.best is shortlist.best


def test_the_best_plan_of_all_rungs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, shortlist = problems()["a line"]
    better, worse = sorted(shortlist.others, key=lambda each: goal_value(each, problem))
    monkeypatch.setattr("hetero.planner.improve.passes.PASSES", ())
    improvement = Improvement(problem)
    for start in (better, worse):
        improvement.improve(Shortlist(start), Deadline(1.0, CountedWork()))
        assert improvement.best is better
    assert improvement.plans[0] is better
