"""Two devices, one four times as fast as the other."""

from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(num_layers=8, tied_embeddings=False)
FAST = {"A100-40": 4.0, "V100-16": 1.0}


def mixed_problem(gpus_per_node: tuple[int, int] = (1, 1)) -> Problem:
    """Two nodes, the devices of one four times as fast as those of the other."""
    link = Link(bandwidth_gb_per_s=100.0, latency_us=0.0)
    types = [
        NodeType(name=d.lower(), device=d, gpus_per_node=gpus, count=1, inside_node=link)
        for d, gpus in zip(FAST, gpus_per_node, strict=True)
    ]
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
