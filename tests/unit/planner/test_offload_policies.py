"""Plans by the rules of others, and that the planner's are no worse."""

import dataclasses

import pytest

from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.listed.listed_plans import best_plan
from hetero.planner.listed.offload_policies import autohete_plans, zero_offload_plans
from hetero.spec.cluster import ClusterSpec, Links
from tests.unit.planner.clusters import planned
from tests.unit.planner.short_memory import problem

ONE_CARD = dataclasses.replace(problem(memory_gib=48).cluster.node_types[0], gpus_per_node=1)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [4, 16])
def test_the_planner_is_at_least_as_good_as_the_policies(batch: int) -> None:
    asked = problem(batch=batch, cluster=ClusterSpec(node_types=(ONE_CARD,), links=Links()))
    zero, auto = (
        best_plan(listing(asked), asked, Deadline(5.0, CountedWork()))
        for listing in (zero_offload_plans, autohete_plans)
    )
    assert zero is not None
    assert auto is not None
    assert {stage.offload.overlap for _, _, stage in zero.plan.stages()} == {False}
    assert planned(asked, effort_s=1.0).simulation.step_s <= auto.step_s < zero.step_s
