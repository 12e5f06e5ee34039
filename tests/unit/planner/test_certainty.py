"""What the planner says of the certainty of its plan: against other plans, and what to measure."""

import dataclasses
import math
import re
from functools import cache
from unittest import mock

import pytest

from hetero.cost.layers.confidence import LayerBasis
from hetero.cost.prediction_range import Shift, StepRange
from hetero.cost.runtime_model import HETERO
from hetero.cost.wanted_profile import wanted_profile
from hetero.data.cost_models import model_costs
from hetero.planner.certainty import MOST_MEASUREMENTS, Measurement, Rival, RunnerUp, certainty_of
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import Yardstick, best_uniform, yardsticks
from hetero.report.tables.certainty import LINKS_COMMAND, commands_for, narrows, rival_in_words
from hetero.report.tables.planner_result import comparison_table
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.unit.planner.clusters import OPT_350M, opt_model

STATED = Link(bandwidth_gb_per_s=5.0, latency_us=10)


def problem(*devices: str, precision: str = "bf16", layers: int = 24, **overrides: object) -> Problem:
    """A node of two of each device, between which links are stated and not measured."""
    spec = ClusterSpec(
        node_types=tuple(NodeType(name=name, device=name, gpus_per_node=2, inside_node=STATED) for name in devices),
        links=Links(between_nodes=STATED),
    )
    model = dataclasses.replace(OPT_350M, num_layers=layers)
    costs = model_costs(model, seq_length=2048, precision=precision, data_sheets=True, where=spec)  # type: ignore[arg-type]  # of the test's own table
    return Problem(**{"cluster": spec, "costs": costs, "global_batch_size": 32, **overrides})  # type: ignore[arg-type]  # likewise


@cache
def one_type() -> tuple[Problem, PlanResult]:
    """A question of one node type and its answer, found once for all tests: nobody may change it."""
    question = problem("H100")
    return question, plan_cluster(question, deadline=Deadline(1.0, CountedWork()))


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_a_planned_step_has_a_range_rivals_and_measurements() -> None:
    question = problem("H100", "A100-80")
    result = plan_cluster(question, deadline=Deadline(2.0, CountedWork()))
    certainty = certainty_of(result.simulation, question.topology, question.costs, result.runners_up)
    step = certainty.step
    assert step.low_s < result.simulation.step_s < step.high_s
    assert {source.device for source in step.shifts if isinstance(source, LayerBasis)} <= {"H100", "A100-80"}
    assert {rival.name for rival in certainty.rivals} <= {"the next best plan of other stages", "a uniform plan"}
    assert certainty.rivals, "some other plan was looked at"
    for rival in certainty.rivals:
        assert rival.ratio >= 1 - 1e-3
    widths = [measurement.settled.width for measurement in certainty.measurements]
    assert 0 < len(widths) <= MOST_MEASUREMENTS
    assert widths == sorted(widths)
    assert all(width < step.width for width in widths)


@pytest.mark.slow
def test_a_profile_of_the_device_that_decides_narrows_the_range_most() -> None:
    """What it names are the tp and the microbatches of the plan."""
    question, result = one_type()
    first, *_ = certainty_of(result.simulation, question.topology, question.costs).measurements
    stage = result.plan.replicas[0].stages[0]
    assert first.profile is not None
    assert (first.profile.device, first.profile.layers) == ("H100", "transformer_engine")
    assert (stage.tp in first.profile.tps, stage.micro_batch_size in first.profile.micro_batch_sizes) == (True, True)
    assert f"tp {stage.tp} with microbatches of {stage.micro_batch_size}" in first.what
    assert "block and head" in first.what.replace("embedding and ", "").replace("block and embedding and", "block and")
    left = [source for source in first.settled.shifts if isinstance(source, LayerBasis)]
    assert left == []


def test_a_plan_of_measured_layers_and_links_asks_for_nothing() -> None:
    measured = Link(bandwidth_gb_per_s=((1_000_000, 5.0), (2_000_000, 6.0)), latency_us=0)
    spec = ClusterSpec(node_types=(NodeType(name="n", device="GH200", gpus_per_node=2, inside_node=measured),))
    model = dataclasses.replace(opt_model(24, 1024, 16), tied_embeddings=False)
    as_profiled = dataclasses.replace(HETERO, implementation=None)
    costs = model_costs(model, seq_length=2048, precision="fp32", runtime=as_profiled, where=spec)
    question = Problem(cluster=spec, costs=costs, global_batch_size=8)
    # A search among whole plans would come to microbatches that nobody has measured.
    with mock.patch("hetero.planner.improve.passes.PASSES", ()):
        result = plan_cluster(question, deadline=Deadline(1.0, CountedWork()))
    certainty = certainty_of(result.simulation, question.topology, question.costs)
    assert certainty.step.shifts == {}
    assert certainty.measurements == ()


@pytest.mark.parametrize(
    ("ratio", "certain_from", "is_certain", "said"),
    [
        (1.2, 1.1, True, "against X: 1.200x, certain from 1.100x on"),
        (1.05, 1.1, False, "against X: 1.050x, which cannot be told apart below 1.100x: run both, or measure"),
        (0.8, 1.1, True, "against X: 0.800x, certain from 1.100x on"),
    ],
)
def test_an_order_is_certain_beyond_the_error_of_the_ratio(
    ratio: float, certain_from: float, is_certain: bool, said: str
) -> None:
    rival = Rival("X", ratio, certain_from)
    assert rival.is_certain == is_certain
    assert rival_in_words(rival) == said


def test_a_plan_cannot_be_told_apart_from_itself() -> None:
    question, result = one_type()
    itself = RunnerUp("itself", result.simulation, 1.0)
    (rival,) = certainty_of(result.simulation, question.topology, question.costs, [itself]).rivals
    assert not rival.is_certain


def test_measurements_come_with_what_to_type() -> None:
    whole = StepRange(1.0, {"between nodes": Shift(-math.log(2), math.log(2))})
    links = Measurement("the links", None, whole.without(["between nodes"]))
    question, result = one_type()
    wanted = wanted_profile(result.plan, question.costs, device="H100")
    assert commands_for(links, lambda _: ()) == (LINKS_COMMAND,)
    assert commands_for(Measurement("the layers", wanted, whole), lambda each: (each.device,)) == ("H100",)
    assert narrows(links, whole).startswith("the links: 0.49")


def test_a_yardstick_without_time_is_not_said_not_to_fit() -> None:
    """Nothing was proven of it: its plans were not looked at."""
    question = problem("H100")
    late, in_time = (yardsticks(question, limit_s=limit_s)[0] for limit_s in (1e-9, 30.0))
    assert (late.best, late.timed_out, late.why_none) == (None, True, "not found in time")
    assert in_time.best is not None
    none = best_uniform(question, limit_s=1e-9)
    assert (none.best, none.timed_out) == (None, True)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=1)
def test_a_yardstick_of_which_nothing_fits_is_said_not_to() -> None:
    """Each says what its closest plan is short of: grids by their footprint, shapes without a balance, and plans whose
    shared optimizer only their memory check counts."""
    for shared in (False, True):
        question = problem("RTX-2080Ti", precision="fp32", layers=400, distributed_optimizer=shared)
        for none in (best_uniform(question, limit_s=60.0), *yardsticks(question, limit_s=60.0)):
            assert (none.best, none.timed_out) == (None, False)
            assert none.closest is not None, none.name
            short = f"does not fit: the closest is short of {none.closest.missing_bytes / 2**30:.1f} GiB: "
            assert re.fullmatch(short + r"\d+ layers? at tp \d take [\d.]+ of 11 GiB of a RTX-2080Ti", none.why_none)


def test_a_yardstick_without_a_shape_is_not_said_to_be_too_large() -> None:
    """One layer makes no pipeline, and three samples have no equal parts for two or four replicas."""
    question = problem("H100", "A100-80", layers=1, global_batch_size=3)
    found = {each.name: each.why_none for each in yardsticks(question, limit_s=60.0) if each.best is None}
    assert found == dict.fromkeys(("uniform", "autohet", "harp"), "no such plan is possible")


def test_the_comparison_marks_what_is_not_certain() -> None:
    question, result = one_type()
    others = [
        Yardstick(name="near", best=result.scored),
        Yardstick(name="far", best=result.scored),
        Yardstick(name="late", best=None, timed_out=True),
    ]
    rivals = [Rival("near", 1.0, 1.1), Rival("far", 2.0, 1.1)]
    table = comparison_table(result, others, question.cluster, rivals)
    cells = {row[0]: row for row in zip(*(column.cells for column in table.columns), strict=True)}
    assert cells["near"][3] == "1.00x ?"
    assert cells["far"][3] == "1.00x"
    assert cells["late"][-1] == "not found in time"
