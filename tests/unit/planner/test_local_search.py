"""Small changes to a finished plan: legal ones, the better ones kept, nothing lost."""

import dataclasses

import pytest

from hetero.plan.ir import Plan, Replica
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.planner.deadline import Deadline
from hetero.planner.improve.local_search import neighbours, search_locally
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, score_plan
from hetero.spec.cluster import ClusterSpec, Link, Links, NodeType
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(num_layers=8, tied_embeddings=False)
FAST = {"A100-40": 4.0, "V100-16": 1.0}


def mixed_problem() -> Problem:
    """Two nodes, one four times as fast as the other."""
    link = Link(bandwidth_gb_per_s=100.0, latency_us=0.0)
    types = [NodeType(name=d.lower(), device=d, gpus_per_node=1, count=1, inside_node=link) for d in FAST]
    profiles = [profile(MODEL, name=d, device=d, block_s=(1 / speed, 2 / speed)) for d, speed in FAST.items()]
    cluster = ClusterSpec(node_types=tuple(types), links=Links(between_nodes=link))
    return Problem(cluster=cluster, costs=cost_model(MODEL, profiles), global_batch_size=8)


def halves(problem: Problem) -> Plan:
    """Four layers on each, whatever their speed."""
    made = uniform_plan(
        UniformLayout(
            model=MODEL,
            world_size=2,
            pp=2,
            micro_batch_size=1,
            global_batch_size=8,
            seq_length=16,
            device="A100-40",
        )
    )
    return made.with_replica(0, made.replicas[0].with_stage(1, device="V100-16"))


def score_of(plan: Plan, problem: Problem) -> ScoredPlan:
    found = score_plan(plan, problem)
    assert found is not None
    return found


def test_layers_go_to_the_faster_device() -> None:
    problem = mixed_problem()
    start = score_of(halves(problem), problem)
    better = search_locally(start, problem, Deadline(30))
    fast, slow = better.plan.replicas[0].stages
    assert fast.num_layers + slow.num_layers == 8
    assert fast.num_layers > slow.num_layers
    assert better.step_s < 0.6 * start.step_s


def test_without_time_the_plan_stays() -> None:
    problem = mixed_problem()
    start = score_of(halves(problem), problem)
    assert search_locally(start, problem, Deadline(0)) is start


def test_samples_move_between_unlike_replicas_and_stay_whole() -> None:
    problem = mixed_problem()
    whole = halves(problem).replicas[0].stages[0]
    replicas = tuple(
        Replica(
            num_samples=4,
            stages=(dataclasses.replace(whole, end_layer=8, ranks=(rank,), device=device, in_flight=1),),
        )
        for rank, device in enumerate(FAST)
    )
    plan = dataclasses.replace(halves(problem), replicas=replicas)
    shares = {tuple(r.num_samples for r in each.replicas) for each in neighbours(plan)}
    assert {(3, 5), (5, 3)} <= shares
    assert all(sum(each) == 8 for each in shares)
    better = search_locally(score_of(plan, problem), problem, Deadline(30))
    assert better.plan.replicas[0].num_samples == pytest.approx(6.5, abs=0.6), "in proportion to four to one"


def test_replicas_of_one_shape_change_together() -> None:
    problem = mixed_problem()
    first = halves(problem).replicas[0]
    half = dataclasses.replace(first, num_samples=4)
    moved = half.with_each_stage(ranks=[(2,), (3,)])
    twice = dataclasses.replace(halves(problem), replicas=(half, moved))
    for plan in neighbours(twice):
        one, other = plan.replicas
        assert one.stages == other.on_ranks_of(one).stages
        assert sorted(plan.ranks()) == [0, 1, 2, 3]
