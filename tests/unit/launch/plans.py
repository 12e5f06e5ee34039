"""A small plan on two unlike nodes, and their cluster."""

import dataclasses
from pathlib import Path

from hetero.plan.ir import Plan
from hetero.plan.provenance import PlanPrediction, PlanProvenance
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage

LINK = Link(bandwidth_gb_per_s=10, latency_us=10)
CLUSTER = ClusterSpec(
    node_types=(
        NodeType(name="fast", device="cpu", gpus_per_node=2, inside_node=LINK),
        NodeType(name="slow", device="cpu", gpus_per_node=1),
    ),
    links=Links(between_nodes=LINK),
)
OWN_FLAGS = ["--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer", "--train-iters", "2"]
"""What a user adds."""

UNEVEN = plan(
    llama_model(padded_vocab_size=64),
    [replica(stage(layers=(0, 4), ranks=(0, 1), tp=2), stage(layers=(4, 6), ranks=(2,)))],
)
"""Ranks 0 and 1 on the first node, rank 2 on the second."""


def made_for(cluster: ClusterSpec = CLUSTER) -> Plan:
    """The plan with its provenance."""
    prediction = PlanPrediction(step_s=1.25, step_low_s=1.1, step_high_s=1.5, bubble_share=0.25)
    provenance = PlanProvenance(command="hetero plan --cluster c.yaml", cluster=cluster, prediction=prediction)
    return dataclasses.replace(UNEVEN, provenance=provenance)


def written(folder: Path, plan: Plan | None = None) -> str:
    """A file with the plan."""
    save(made_for() if plan is None else plan, folder / "plan.json")
    return str(folder / "plan.json")
