"""Time that runs out means a worse plan or an error that says so, and never that a model does not fit."""

import dataclasses
import random

import pytest

from hetero.cost.capacity import capacity_bytes
from hetero.cost.cost_model import CostModel
from hetero.cost.memory import plan_memory
from hetero.cost.network import Topology
from hetero.cost.simulation.simulated_plan import KnownParts
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.data.cost_models import model_costs
from hetero.errors import PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import CountedWork, Deadline, Timer, WallTime
from hetero.planner.initial_plan import InitialPlans, initial_plans
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.exhaustive import exhaustive_best
from hetero.planner.replica.feasibility import check_model_fits
from hetero.planner.replica.least_memory import LeastMemoryPipeline
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.scoring import scoring_s, usual_s
from hetero.planner.time_shares import TimeShare
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.model import ModelSpec
from tests.helpers.commands import ROOT
from tests.unit.planner.clusters import GPT_NEO, OPT_350M, cluster, opt_model, planned, problem
from tests.unit.planner.random_problems import random_problem

SMALL = cluster(("A100-40", 2, 1), ("V100-16", 2, 1))
LARGE = ROOT / "scripts/presets/clusters/four_types_4096.yaml"


def check(question: Problem, plan: Plan) -> None:
    """What every answer has to be, whatever time there was."""
    validate(plan)
    check_plan_on_cluster(plan, question.cluster)
    for (r, s), parts in plan_memory(plan, question.costs).items():
        capacity = capacity_bytes(plan.replicas[r].stages[s], question.cluster)
        assert capacity is not None
        assert parts.total <= capacity


def first(question: Problem) -> Plan | None:
    """What there is once there is anything."""
    found = initial_plans(
        question, StageOptionTable(question), SyncTiers(question), Deadline(100.0), enough=Deadline(0.1)
    ).best
    return found.plan if found is not None else None


LIMITS_S = (1e-4, 3e-3, 0.01, 0.03, 0.1, 0.3)
"""Of counted work, and in some problems of time that passes."""


def drawn(seed: int) -> Problem:
    """A small problem; with the seeds below, models of 1 to 24 layers of which some do not fit any more."""
    chance = random.Random(seed)
    gpus = tuple(chance.choice((1, 2)) for _ in range(chance.choice((1, 2))))
    num_layers, batch = chance.choice((1, 2, 3, 6, 24, 100, 140)), chance.choice((1, 2, 7, 16))
    question = random_problem(seed, gpus=gpus, num_layers=num_layers, batch=batch)
    return dataclasses.replace(question, time_limit_s=chance.choice(LIMITS_S))


def outcome(question: Problem, timer: Timer) -> str:
    """``plan``, ``does not fit`` or ``time ran out``, each found to be true."""
    try:
        result = plan_cluster(question, deadline=Deadline(question.time_limit_s, timer))
    except PlanError as error:
        said = str(error)
    else:
        check(question, result.plan)
        return "plan"
    if said.startswith("planner: the model does not fit: "):
        every = exhaustive_best(question, sizes=(1, 2), samples=(1, 2, 4, 8, 16))
        assert every.cover == (), f"there is a plan, but {said}"
        return "does not fit"
    assert said.startswith(f"planner: time ran out: no plan was found within {question.time_limit_s:g} s")
    assert "raise the time limit (--time-limit, at a launch --hetero-plan-time-limit)" in said
    return "time ran out"


@pytest.mark.slow
@pytest.mark.rotates("seeds", every=2, turn=1)
@pytest.mark.parametrize("start", [0, 60, 120, 180])
def test_every_outcome_is_true_whatever_the_time(start: int) -> None:
    outcomes = [outcome(drawn(seed), CountedWork()) for seed in range(start, start + 60)]
    assert set(outcomes) == {"plan", "does not fit", "time ran out"}


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_every_outcome_is_true_of_time_that_passes() -> None:
    assert {outcome(drawn(seed), WallTime()) for seed in range(240, 270)} >= {"plan", "does not fit"}


@pytest.mark.slow
def test_the_verdict_that_a_model_does_not_fit_needs_no_search() -> None:
    """Over sizes around the limit: the pipeline of least memory fits, or no plan does."""
    verdicts = set()
    for seed in range(12):
        for num_layers in (40, 80, 120, 160):
            question = random_problem(seed, gpus=(2, 1), num_layers=num_layers, batch=2)
            plan = LeastMemoryPipeline(question, StageOptionTable(question, num_gradient_groups=1)).plan()
            if plan is not None:
                check(question, plan)
                check_model_fits(question)
            else:
                assert exhaustive_best(question, sizes=(1, 2), samples=(1, 2)).cover == ()
            verdicts.add(plan is not None)
    assert verdicts == {True, False}


EDGES = {
    "one layer": (SMALL, opt_model(1, 1024, 16), 16),
    "one layer on sixteen devices": (cluster(("A100-40", 8, 1), ("V100-16", 8, 1)), opt_model(1, 1024, 16), 16),
    "two layers": (SMALL, opt_model(2, 1024, 16), 16),
    "one device": (cluster(("A100-40", 1, 1)), opt_model(1, 1024, 16), 3),
    "hidden size 1": (SMALL, opt_model(4, 1, 1), 16),
    "one sample": (SMALL, opt_model(4, 1024, 16), 1),
    "a prime batch": (SMALL, opt_model(4, 1024, 16), 97),
    "three heads, which no tp divides": (SMALL, opt_model(4, 192, 3), 16),
    "fewer samples than devices": (cluster(("A100-40", 8, 2)), opt_model(4, 1024, 16), 3),
}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Each plan that was simulated."""
    plans: list[Plan] = []

    def counted(plan: Plan, topology: Topology, costs: CostModel, known: KnownParts, *, within_s: float) -> Simulation:
        plans.append(plan)
        return simulate(plan, topology, costs, known, within_s=within_s)

    monkeypatch.setattr("hetero.planner.scoring.simulate", counted)
    return plans


LARGE_BATCHES = {"round": 100_000, "prime": 100_003, "huge": 1_000_000}


FAST_EDGES = ("one layer", "fewer samples than devices")


@pytest.mark.parametrize(
    ("spec", "model", "batch"),
    [
        pytest.param(
            *edge,
            id=name,
            marks=() if name in FAST_EDGES else [pytest.mark.slow, pytest.mark.rotates("edges", every=2, turn=0)],
        )
        for name, edge in EDGES.items()
    ],
)
def test_edges(spec: ClusterSpec, model: ModelSpec, batch: int) -> None:
    """Those of one layer or two ended in ``min() arg is an empty sequence``."""
    question = problem(spec, model, batch)
    result = planned(question)
    check(question, result.plan)
    assert 0 <= result.gap <= 1
    assert result.score is not None, "the search had nothing to choose from"


@pytest.mark.slow
@pytest.mark.rotates("batches", every=2, turn=1)
@pytest.mark.parametrize("batch", LARGE_BATCHES.values(), ids=LARGE_BATCHES)
def test_large_batches(batch: int, simulated: list[Plan]) -> None:
    """They ended in the same, after four times the limit: each simulation of so many microbatches takes seconds."""
    question = problem(SMALL, opt_model(4, 1024, 16), batch)
    result = planned(question, effort_s=5)
    assert simulated, "nothing was simulated"
    assert max(map(scoring_s, simulated)) <= 5
    assert sum(map(usual_s, simulated)) <= 1.1 * 5
    check(question, result.plan)


def test_sequences_of_one_token() -> None:
    costs = model_costs(opt_model(2, 1024, 16), seq_length=1, precision="fp32")
    question = Problem(cluster=SMALL, costs=costs, global_batch_size=4)
    check(question, planned(question).plan)


def test_a_batch_that_takes_too_long_to_replay_is_no_model_that_does_not_fit() -> None:
    with pytest.raises(PlanError, match=r"time ran out: no plan was found within 0\.2 s"):
        planned(problem(SMALL, opt_model(4, 1024, 16), 10**7, time_limit_s=0.2), effort_s=0.2)


def without_search(question: Problem, monkeypatch: pytest.MonkeyPatch) -> PlanResult:
    """The planner where its time is over as soon as it has a first plan."""

    def and_time_is_over(
        problem: Problem,
        stage_options: StageOptionTable,
        sync_tiers: SyncTiers,
        deadline: Deadline,
        *,
        enough: Deadline,
    ) -> InitialPlans:
        found = initial_plans(problem, stage_options, sync_tiers, deadline, enough=enough)
        over: Deadline | None = deadline
        while over is not None:
            over.limit_s, over = 0.0, over.whole
        return found

    monkeypatch.setattr("hetero.planner.construction.initial_plans", and_time_is_over)
    return planned(question)


@pytest.mark.parametrize(
    ("spec", "model", "batch"),
    [
        (SMALL, opt_model(12, 1024, 16), 16),
        (cluster(("A100-40", 8, 1), ("V100-16", 8, 1)), GPT_NEO, 256),
        # No node type holds it alone.
        (cluster(("A100-40", 1, 1), ("V100-16", 2, 1)), opt_model(20, 2560, 20), 4),
    ],
)
def test_the_initial_plan_is_the_answer_if_time_is_over_then(
    spec: ClusterSpec, model: ModelSpec, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = problem(spec, model, batch)
    result = without_search(question, monkeypatch)
    check(question, result.plan)
    assert result.score is None
    assert not result.finished
    assert result.bound_s == result.lower_bound_s <= result.simulation.step_s
    assert result.gap == pytest.approx(1 - result.lower_bound_s / result.simulation.step_s)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_more_time_makes_no_worse_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    question = problem(cluster(("A100-40", 4, 1), ("V100-16", 4, 1)), opt_model(12, 1024, 16), 64)
    searched = planned(question)
    assert searched.simulation.step_s <= without_search(question, monkeypatch).simulation.step_s


def test_an_initial_plan_keeps_the_budget() -> None:
    types = tuple(dataclasses.replace(t, price_per_hour=10.0) for t in SMALL.node_types)
    spec = dataclasses.replace(SMALL, node_types=types)
    plan = first(problem(spec, opt_model(6, 1024, 16), 8, budget_per_hour=10))
    assert plan is not None
    assert len({stage.device for _, _, stage in plan.stages()}) == 1
    assert first(problem(spec, opt_model(6, 1024, 16), 8, budget_per_hour=0.1)) is None


@pytest.mark.slow
def test_four_thousand_devices_have_an_initial_plan_after_one_simulation(simulated: list[Plan]) -> None:
    """They were told that the model does not fit, with limits up to 8 s. This one leaves no time for another
    simulation, and not even for one of all devices: as many are planned for as there is time."""
    question = problem(load(ClusterSpec, LARGE), OPT_350M, 16384)
    deadline = Deadline(0.5, CountedWork())
    enough = TimeShare.INITIAL_PLAN.of(deadline)
    found = initial_plans(question, StageOptionTable(question), SyncTiers(question), deadline, enough=enough).best
    assert found is not None
    assert len(simulated) == 1
    assert 0.2 < scoring_s(simulated[0]) < 0.5
    check(question, found.plan)
