"""Plans in fp8: every stage that can computes in it, and the others go on in bf16; devices of one's own."""

import dataclasses

import pytest

from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs, plan_costs
from hetero.errors import PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner.plan_cluster import PlanResult
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import best_uniform
from hetero.serialization import from_json, to_json
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.unit.planner.clusters import opt_model, planned

MODEL = opt_model(6, 1024, 16)
LINK = Link(bandwidth_gb_per_s=100.0, latency_us=10)
OURS = dataclasses.replace(SHIPPED_DEVICES.of("H100"), name="ours", cuda_name=None)


def cluster(*devices: str) -> ClusterSpec:
    """One Hopper GPU, or four of Ampere, which have as much to do."""
    types = tuple(
        NodeType(name=device, device=device, gpus_per_node=4 if device == "A100-40" else 1, inside_node=LINK)
        for device in devices
    )
    described = (OURS,) if "ours" in devices else ()
    return ClusterSpec(devices=described, node_types=types, links=Links(between_nodes=LINK))


def problem(spec: ClusterSpec, *, fp8: bool = True) -> Problem:
    costs = model_costs(MODEL, seq_length=2048, precision="bf16", data_sheets=True, where=spec)
    return Problem(cluster=spec, costs=costs, global_batch_size=16, fp8=fp8)


def plan(spec: ClusterSpec, *, fp8: bool = True) -> PlanResult:
    return planned(problem(spec, fp8=fp8), effort_s=0.5)


def in_fp8(found: Plan) -> dict[str, set[bool]]:
    """By device, whether its stages compute in fp8."""
    return {
        device: {stage.fp8 for _, _, stage in found.stages() if stage.device == device}
        for device in {stage.device for _, _, stage in found.stages()}
    }


@pytest.mark.slow
def test_stages_that_can_do_so_and_the_others_do_not() -> None:
    found = plan(cluster("H100", "A100-40"))
    validate(found.plan)
    assert in_fp8(found.plan) == {"H100": {True}, "A100-40": {False}}
    assert found.simulation.step_s < plan(cluster("H100", "A100-40"), fp8=False).simulation.step_s
    assert found.bound_s <= found.score.step_s * (1 + 1e-9)


def test_without_asking_no_stage_does() -> None:
    assert in_fp8(plan(cluster("H100"), fp8=False).plan) == {"H100": {False}}


def test_so_do_the_plans_to_compare_with() -> None:
    best = best_uniform(problem(cluster("H100")))
    assert best.best is not None
    assert in_fp8(best.best.plan) == {"H100": {True}}


def test_where_no_device_can_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"planner: fp8 is asked for, but device A100-40 has compute capability 8\.0"):
        plan(cluster("A100-40"))


@pytest.mark.slow
def test_a_described_device_travels_with_its_plan() -> None:
    """The devices that it brings along are enough to price it on the cluster's links as when it was made."""
    spec = cluster("ours", "A100-40")
    found = plan(spec)
    assert found.plan.devices == (OURS,)
    read = from_json(Plan, to_json(found.plan), source="plan.json")
    validate(read)
    check_plan_on_cluster(read, spec)
    links_alone = dataclasses.replace(spec, devices=read.devices)
    assert simulate(read, spec, plan_costs(read, links_alone, data_sheets=True)).step_s == found.simulation.step_s
    theirs = {"ours": "theirs", "A100-40": "A100-40"}
    renamed_types = tuple(dataclasses.replace(each, device=theirs[each.device]) for each in spec.node_types)
    twin = dataclasses.replace(spec, devices=(dataclasses.replace(OURS, name="theirs"),), node_types=renamed_types)
    renamed = {
        r: replica.with_each_stage(device=[theirs[stage.device] for stage in replica.stages])
        for r, replica in enumerate(found.plan.replicas)
    }
    same = dataclasses.replace(found.plan.with_replicas(renamed), devices=twin.devices)
    assert simulate(same, twin, plan_costs(same, twin, data_sheets=True)).step_s == found.simulation.step_s
    assert plan(cluster("H100", "A100-40")).plan.devices == ()
