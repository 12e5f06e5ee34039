"""Few heavy layers on equal devices, which may be cut in half."""

import dataclasses

from hetero.plan.ir import Plan
from hetero.planner.problem import Problem
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile


def model_of(num_layers: int) -> ModelSpec:
    """A layer weighs 0.8 GB with Adam's state. One head, so that tensor parallelism cannot cut it."""
    return gpt2_model(
        num_layers=num_layers,
        hidden_size=2048,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=2048,
        ffn_hidden_size=8192,
        padded_vocab_size=1024,
        tied_embeddings=False,
    )


def question(num_layers: int, num_devices: int, *, memory_gib: int = 40, batch: int = 32) -> Problem:
    """Equal devices with fast links: a block takes 3 s per sample, embedding and head nearly nothing."""
    model = model_of(num_layers)
    spec = nodes(1, gpus_per_node=num_devices, gb_per_s=50.0)
    spec = dataclasses.replace(spec, node_types=(dataclasses.replace(spec.node_types[0], memory_gib=memory_gib),))
    costs = cost_model(model, [profile(model, ends_s=(0.01, 0.05))])
    return Problem(cluster=spec, costs=costs, global_batch_size=batch)


def pipeline(problem: Problem, *cuts: float, num_replicas: int = 1) -> Plan:
    """Stages of one rank each between ``cuts``, every replica alike."""
    edges = [0, *cuts, problem.model.num_layers]
    replicas = [
        replica(
            *(
                stage(layers=(edges[s], edges[s + 1]), ranks=(r * (len(cuts) + 1) + s,), device="A100-40")
                for s in range(len(cuts) + 1)
            ),
            num_samples=problem.global_batch_size // num_replicas,
        )
        for r in range(num_replicas)
    ]
    return plan(problem.model, replicas)
