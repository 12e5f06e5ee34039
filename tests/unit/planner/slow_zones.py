"""Zones with slow links between them, and data parallelism over all of them."""

import dataclasses

from hetero.plan.ir import Plan
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodeType, ZonePair
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, profile

MODEL = gpt2_model(num_layers=6, tied_embeddings=False)
GRADIENTS_GB = 4 * 2 * (64 * 32 + 6 * 8544) / 1e9
NODE = Link(bandwidth_gb_per_s=1.0, latency_us=0.0)


def zones(count: int, *, gpus_per_node: int = 2, nodes_per_zone: int = 1, seconds: float = 1.0) -> ClusterSpec:
    """Between zones the gradients of two models take so many seconds, inside next to nothing."""
    types = tuple(
        NodeType(
            name=f"node-{z}",
            device="A100-40",
            gpus_per_node=gpus_per_node,
            count=nodes_per_zone,
            zone=f"zone-{z}",
            inside_node=NODE,
        )
        for z in range(count)
    )
    slow = Link(bandwidth_gb_per_s=GRADIENTS_GB / seconds, latency_us=0.0)
    pairs = tuple(
        ZonePair(zones=(f"zone-{a}", f"zone-{b}"), link=slow) for a in range(count) for b in range(a + 1, count)
    )
    return ClusterSpec(node_types=types, links=Links(between_nodes=NODE, zone_pairs=pairs))


def problem(spec: ClusterSpec, **options: object) -> Problem:
    costs = cost_model(MODEL, [profile(MODEL, block_s=(0.01, 0.02), micro_batch_sizes=(1, 2, 4, 8))])
    fields = {"global_batch_size": 8, **options}
    return Problem(cluster=spec, costs=costs, **fields)  # type: ignore[arg-type]


def data_parallel(ranks: int) -> Plan:
    made = plan(MODEL, [replica(stage(layers=(0, 6), ranks=range(ranks), dp=ranks, device="A100-40"), num_samples=8)])
    return dataclasses.replace(made, global_batch_size=8)
