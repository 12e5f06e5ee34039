"""Whatever the planner returns is legal and trains like one process.

Over random clusters of up to six devices: their kinds, speeds, memories, nodes, links, and global batch. The model is
a tiny one, so that the ranks can be processes here; the planner prices it by profiles with the drawn speeds.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hetero.cost.memory import plan_memory
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.validate import validate
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.units import GIB
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_profiles import cost_model, profile
from tests.helpers.training import one_process, train
from tests.unit.planner.clusters import planned

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

NUM_STEPS = 2
TOLERANCE = 1e-9
DEVICES = ("A100-40", "V100-16", "RTX-3090")
MODELS = (gpt2_model(), llama_model())


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """A question to the planner about a cluster of unlike devices."""
    model = draw(st.sampled_from(MODELS))
    kinds = draw(st.lists(st.sampled_from(DEVICES), min_size=2, max_size=3, unique=True))
    left = 6
    node_types, profiles = [], []
    for kind in kinds:
        gpus_per_node = draw(st.sampled_from([n for n in (1, 2, 4) if n <= max(1, left)]))
        count = draw(st.integers(1, max(1, left // gpus_per_node // len(kinds))))
        left -= gpus_per_node * count
        bandwidth = draw(st.sampled_from((0.001, 1.0, 100.0)))
        node_types.append(
            NodeType(
                name=kind.lower(),
                device=kind,
                gpus_per_node=gpus_per_node,
                count=count,
                inside_node=Link(bandwidth_gb_per_s=bandwidth, latency_us=10.0),
            )
        )
        speed = draw(st.sampled_from((0.5, 1.0, 1.7, 3.0)))
        profiles.append(profile(model, name=kind, device=kind, block_s=(0.01 / speed, 0.02 / speed)))
    cluster = ClusterSpec(
        node_types=tuple(node_types),
        links=Links(
            between_nodes=Link(bandwidth_gb_per_s=draw(st.sampled_from((0.0005, 0.01, 10.0))), latency_us=50.0)
        ),
    )
    return Problem(
        cluster=cluster,
        costs=cost_model(model, profiles),
        global_batch_size=draw(st.sampled_from((4, 6, 8, 12))),
    )


@pytest.mark.rotates("parts", every=3, turn=1)
@pytest.mark.parametrize("part", range(3))
def test_every_plan_is_legal_and_trains_like_one_process(part: int) -> None:
    """Of twelve problems, in three parts."""

    @seed(part)
    @settings(max_examples=4, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problem=problems())
    def of_a_problem(problem: Problem) -> None:
        assert_its_plan_trains_like_one_process(problem)

    of_a_problem()


def assert_its_plan_trains_like_one_process(problem: Problem) -> None:
    plan = planned(problem).plan
    validate(plan)
    check_plan_on_cluster(plan, problem.cluster)
    for (r, s), parts in plan_memory(plan, problem.costs).items():
        device = problem.cluster.device_of_rank(plan.replicas[r].stages[s].ranks[0])
        assert device.memory_gib is not None
        assert parts.total <= device.memory_gib * GIB
    plan = dataclasses.replace(plan, precision="fp64")
    traces = run_ranks(train, plan.world_size, plan, NUM_STEPS)
    assert_same_training(plan, traces, one_process(plan, NUM_STEPS), tolerance=TOLERANCE)
