import dataclasses

import pytest

from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.distributed.found_devices import check_devices
from hetero.elastic.planning_problem import PlanningProblem, present_cluster
from hetero.elastic.replanning import PlanTable, plan_for, predicted_step_s
from hetero.elastic.stragglers import (
    Reclassification,
    StragglerSettings,
    StragglerWatch,
    busy_of_ranks,
    ratio_of_ranks,
    slower_type,
    with_slower_type,
)
from hetero.serialization import from_json, to_json
from hetero.spec.found_device import FoundDevice
from tests.unit.elastic.test_replanning import ALL, four_replicas, on_ranks, problem

SETTINGS = StragglerSettings(threshold=1.3, recovered=1.1, for_s=10.0, window=3, retry_s=50.0)


def watch(**factors: float) -> StragglerWatch:
    return StragglerWatch(SETTINGS, factors=factors, now_s=0.0)


def after(
    watched: StragglerWatch, *, start_s: float = 0.0, seconds: int = 20, **ratios: float
) -> list[tuple[str, float]]:
    """What is changed within so many steps of a second: nodes and their factors."""
    found = []
    for second in range(seconds):
        watched.observe(ratios)
        found += [(each.node, each.factor) for each in watched.judge(start_s + second)]
    return found


def test_a_node_that_is_slower_for_some_time_is_demoted_by_its_factor() -> None:
    watched = watch()
    assert after(watched, seconds=12, a=1.0, b=1.0, c=1.7) == []
    watched.observe({"a": 1.0, "b": 1.0, "c": 1.7})
    assert watched.judge(12.0) == [Reclassification(node="c", factor=1.75, slowness=1.7)]
    assert watched.factors == {"c": 1.75}
    # Under the same plan nothing changes any more, and under the one that knows it the ratio is about 1.
    assert after(watched, start_s=13, a=1.0, b=1.0, c=1.7) == []
    assert after(watch(c=1.75), a=1.0, b=1.0, c=1.7 / 1.75) == []


def test_a_prediction_that_is_off_everywhere_demotes_nobody() -> None:
    assert after(watch(), a=3.0, b=3.1, c=2.9) == []
    assert after(watch(), a=0.2, b=0.3) == [("b", 1.5)]


def test_a_few_slow_steps_demote_nobody() -> None:
    watched = watch()
    for second in range(60):
        watched.observe({"a": 1.0, "b": 1.0, "c": 9.0 if second % 3 == 0 else 1.0})
        assert watched.judge(second) == []
    assert after(watched, start_s=60, seconds=8, a=1.0, b=1.0, c=2.0) == []
    assert after(watched, start_s=68, seconds=3, a=1.0, b=1.0, c=1.0) == []
    # The time begins anew.
    assert after(watched, start_s=71, seconds=9, a=1.0, b=1.0, c=2.0) == []


def test_a_node_that_recovers_is_promoted() -> None:
    watched = watch(c=2.0)
    assert after(watched, seconds=12, a=1.0, b=1.0, c=0.5) == []
    assert after(watched, start_s=12, seconds=20, a=1.0, b=1.0, c=0.5) == [("c", 1.0)]
    assert watched.factors == {}


def test_one_that_recovers_before_another_plan_was_worth_it_is_promoted_too() -> None:
    watched = watch()
    assert after(watched, a=1.0, b=1.0, c=2.0) == [("c", 2.0)]
    assert after(watched, start_s=20, a=1.0, b=1.0, c=1.0) == [("c", 1.0)]


def test_a_node_that_gets_slower_still_is_demoted_again_and_a_little_is_no_matter() -> None:
    assert after(watch(c=2.0), a=1.0, b=1.0, c=1.1) == []
    assert after(watch(c=2.0), a=1.0, b=1.0, c=1.5) == [("c", 3.0)]


def test_a_node_that_was_left_without_work_is_tried_again() -> None:
    watched = watch(c=8.0)
    assert after(watched, seconds=50, a=1.0, b=1.0) == []
    assert after(watched, start_s=50, seconds=3, a=1.0, b=1.0) == [("c", 1.0)]
    assert after(watch(c=8.0), seconds=90, a=1.0, b=1.0, c=1.0) == []


def test_one_node_alone_is_no_straggler() -> None:
    assert after(watch(), a=5.0) == []


def simulated() -> Simulation:
    asked = problem()
    costs = asked.on(asked.cluster).costs
    return simulate(four_replicas(), Topology(asked.cluster), costs)


def test_the_slowest_rank_of_a_node_counts() -> None:
    predicted = busy_of_ranks(simulated())
    assert sorted(predicted) == list(range(6))
    measured = {rank: seconds * (1.5 if rank == 3 else 1.0) for rank, seconds in predicted.items()}
    by_node = [{rank: measured[rank] for rank in each.ranks} for each in on_ranks(ALL)]
    assert [ratio_of_ranks(predicted, each) for each in by_node] == pytest.approx([1.0, 1.5, 1.0, 1.0])
    assert ratio_of_ranks(predicted, {4: 0.0, 9: 1.0}) is None
    assert ratio_of_ranks(predicted, {4: 0.0, 5: predicted[5]}) == 1.0


def demoted() -> PlanningProblem:
    return with_slower_type(problem(), "fast", 2.0)


def test_a_straggler_is_a_node_type_of_its_own() -> None:
    asked = demoted()
    assert [each.name for each in asked.cluster.node_types] == ["fast", "fast-slower-2", "slow"]
    assert with_slower_type(asked, "fast", 2.0) is asked
    assert from_json(PlanningProblem, to_json(asked), source="a test") == asked
    straggler = dataclasses.replace(ALL[1], node_type=slower_type("fast", 2.0))
    assert asked.counts_of([ALL[0], straggler, *ALL[2:]]) == {"fast": 1, "fast-slower-2": 1, "slow": 2}
    links = present_cluster(asked.cluster, {"fast": 1, "fast-slower-2": 2}).links
    assert {frozenset(pair.node_types) for pair in links.node_pairs} == {
        frozenset({"fast"}),
        frozenset({"fast", "fast-slower-2"}),
        frozenset({"fast-slower-2"}),
    }
    assert slower_type("fast", 1.0) == "fast"


@pytest.mark.slow
def test_a_straggler_is_given_less_to_do() -> None:
    asked = demoted()
    whole = predicted_step_s(asked, ALL[:2], PlanTable())
    straggler = dataclasses.replace(ALL[1], node_type="fast-slower-2")
    slower = predicted_step_s(asked, [ALL[0], straggler], PlanTable())
    assert whole is not None
    assert slower is not None
    # Two nodes of one speed against one and a half: not as slow as if the straggler had its half.
    assert 1.2 < slower / whole < 1.8


def test_the_plan_of_a_straggler_runs_on_the_device_that_it_is() -> None:
    made = plan_for(demoted(), {"fast": 1, "fast-slower-2": 1}, time_limit_s=1.0)
    assert {stage.device for _, _, stage in made.stages()} == {"A100-40", "A100-40-slower-2"}
    a100 = FoundDevice(cuda_name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), memory_bytes=40 * 2**30)
    check_devices(made, [a100] * 4)


def test_a_device_without_profiles_is_slower_by_its_data_sheet() -> None:
    asked = with_slower_type(problem(data_sheets=True, profiles=()), "slow", 1.5)
    sheet, slower = (asked.cluster.device_types.of(name).data_sheet for name in ("V100-16", "V100-16-slower-1.5"))
    assert sheet is not None
    assert slower is not None
    assert slower.fp16_tflops == sheet.fp16_tflops / 1.5
    assert slower.memory_gb_per_s == sheet.memory_gb_per_s / 1.5
    assert slower.bf16_tflops is None
