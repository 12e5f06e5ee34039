"""A line of four equal devices, for improvers of pipelines."""

from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, score_plan
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(num_layers=8, tied_embeddings=False)


def line_problem(*, batch: int, **options: object) -> Problem:
    """Links that cost next to nothing."""
    link = Link(bandwidth_gb_per_s=1e6, latency_us=0.0)
    node = NodeType(name="node", device="A100-40", gpus_per_node=1, count=4, inside_node=link)
    cluster = ClusterSpec(node_types=(node,), links=Links(between_nodes=link))
    costs = cost_model(MODEL, [profile(MODEL)])
    return Problem(**{"cluster": cluster, "costs": costs, "global_batch_size": batch, **options})  # type: ignore[arg-type]


def uniform(*, batch: int, **shape: object) -> Plan:
    arguments = {"model": MODEL, "world_size": 4, "micro_batch_size": 1, "global_batch_size": batch, "seq_length": 16}
    return uniform_plan(UniformLayout(**{**arguments, "device": "A100-40", **shape}))  # type: ignore[arg-type]


def score_of(plan: Plan, problem: Problem) -> ScoredPlan:
    found = score_plan(plan, problem)
    assert found is not None
    return found
