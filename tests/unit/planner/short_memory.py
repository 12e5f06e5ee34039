"""Llama-7B in bf16 on two cards of 24 GiB beside a host: 6 bytes of each parameter fit the cards, 18 do not."""

from typing import Any

from hetero.plan.ir import Plan
from hetero.plan.offload import OnHost
from hetero.planner.problem import Problem
from hetero.planner.replica.least_memory import LeastMemoryPipeline
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from tests.helpers.models import llama_model
from tests.helpers.synthetic_profiles import cost_model, profile

LLAMA_7B = llama_model(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=32,
    kv_channels=128,
    ffn_hidden_size=11008,
    vocab_size=32000,
    padded_vocab_size=32000,
    max_position_embeddings=2048,
)
SEQ_LENGTH = 2048


def host(**changes: Any) -> HostProfile:
    """Figures of nobody's host: an update of the whole model takes 3.4 s, its copies 1.1 s."""
    copy = Link(bandwidth_gb_per_s=24.0, latency_us=10.0)
    rates = (UpdateRate(threads=1, elements_per_s=2e8), UpdateRate(threads=16, elements_per_s=2e9))
    described = {"source": "a test", "memory_gib": 512, "updates": rates, "to_device": copy, "to_host": copy}
    return HostProfile(**{**described, **changes})


def least_memory_plan(asked: Problem) -> Plan:
    """All optimizer state on the host, all layers computed again."""
    made = LeastMemoryPipeline(asked, StageOptionTable(asked, hosts=OnHost.OPTIMIZER)).plan()
    assert made is not None
    return made


def problem(*, memory_gib: int = 24, batch: int = 16, described: HostProfile | None = None, **options: Any) -> Problem:
    """Layers of 20 ms and 40 ms for a sample."""
    link = Link(bandwidth_gb_per_s=12.0, latency_us=20.0)
    node = NodeType(
        name="desktop",
        device="A100-40",
        gpus_per_node=2,
        memory_gib=memory_gib,
        inside_node=link,
        host=host() if described is None else described,
    )
    measured = profile(
        LLAMA_7B,
        block_s=(0.02, 0.04),
        ends_s=(0.001, 0.002),
        update_s=0.01,
        seq_length=SEQ_LENGTH,
        precision="bf16",
        arithmetic="bf16",
        tps=(1, 2),
    )
    costs = cost_model(LLAMA_7B, [measured], seq_length=SEQ_LENGTH, precision="bf16")
    cluster = ClusterSpec(node_types=(node,), links=Links())
    asked = {"cluster": cluster, "costs": costs, "global_batch_size": batch, "distributed_optimizer": True}
    return Problem(**{**asked, **options})
