"""Clusters and models of the planner's tests: published links, small counts, and plans by counted work."""

from hetero.data import shipped_links
from hetero.data.cost_models import model_costs
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodePair
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model


def opt_model(num_layers: int, hidden: int, heads: int) -> ModelSpec:
    """The shapes of the shipped profiles: OPT-350M is (24, 1024, 16), GPT-Neo-2.7B (32, 2560, 20)."""
    return gpt2_model(
        num_layers=num_layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads,
        kv_channels=hidden // heads,
        ffn_hidden_size=4 * hidden,
        vocab_size=50272,
        padded_vocab_size=50304,
        max_position_embeddings=2048,
    )


OPT_350M = opt_model(24, 1024, 16)
GPT_NEO = opt_model(32, 2560, 20)
OPT_30B = opt_model(48, 7168, 56)


def cluster(*nodes: tuple[str, int, int] | tuple[str, int, int, str]) -> ClusterSpec:
    """``(device, GPUs per node, nodes[, zone])`` per node type, with the published links between them."""
    links = shipped_links()
    types = [
        links.node_type(device, gpus_per_node=gpus, count=count, zone=zone[0] if zone else "us-central1")
        for device, gpus, count, *zone in nodes
    ]
    known = {t.device for t in types}
    pairs = tuple(
        pair
        for pair in links.pairs
        if set(pair.node_types) <= known and len({t.zone for t in types if t.device in pair.node_types}) == 1
    )
    own = tuple(
        NodePair(node_types=(t.name, t.name), link=link)
        for t in types
        if (link := links.of(t.device).between_nodes) is not None
    )
    zones = {t.zone for t in types}
    return ClusterSpec(
        node_types=tuple(types),
        links=Links(node_pairs=pairs + own, zone_pairs=tuple(z for z in links.zones if set(z.zones) <= zones)),
    )


def problem(spec: ClusterSpec, model: ModelSpec, batch: int, **options: object) -> Problem:
    costs = model_costs(model, seq_length=2048, precision="fp32")
    return Problem(cluster=spec, costs=costs, global_batch_size=batch, **options)  # type: ignore[arg-type]


def planned(question: Problem, *, effort_s: float = 2.0) -> PlanResult:
    """The planner's answer after so many seconds of counted work: the same on every machine, however busy."""
    return plan_cluster(question, deadline=Deadline(effort_s, CountedWork()))
