"""No sum of the word embedding takes less than its bound, over whatever ranks, rings, domains and links."""

import dataclasses
import random

import pytest

from hetero.cost.network import Topology, all_reduce_cost
from hetero.planner.cover.embedding_sum import NodeEnds, embedding_sum_s, least_ring_s
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodePair, NodeType
from hetero.spec.link import Link
from tests.unit.planner.clusters import cluster, opt_model, problem

NODE = NodeEnds(sum_s=1.0, first_s=0.1, last_s=0.1, whole_s=0.5, received_s=0.0)


def test_as_many_nodes_as_its_samples_take() -> None:
    """15 seconds of first stages in a step of ten take two nodes, 80 of first and last ones take eight."""
    assert embedding_sum_s([NODE], batch=150, step_s=10.0, tied=False) == pytest.approx(1.0)
    assert embedding_sum_s([NODE], batch=400, step_s=10.0, tied=True) == pytest.approx(7 / 4)


def test_whichever_nodes_send_fastest() -> None:
    slower = NodeEnds(sum_s=3.0, first_s=0.1, last_s=0.1, whole_s=0.5, received_s=0.0)
    for nodes in ([NODE, slower], [slower, NODE]):
        assert embedding_sum_s(nodes, batch=150, step_s=10.0, tied=False) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("received_s", "tied", "least_s"),
    [
        (0.0, True, 0.0),  # Nothing that it does not compute takes any time to come.
        (0.25, False, 0.0),  # 20 samples computed, 40 gradients received: 60 of 50.
        (0.25, True, 1.0),  # 20 computed, 20 samples and gradients received: 40 of 50.
    ],
)
def test_a_node_that_may_have_all_of_it_sums_nothing(received_s: float, tied: bool, least_s: float) -> None:
    node = NodeEnds(sum_s=1.0, first_s=0.01, last_s=0.01, whole_s=0.5, received_s=received_s)
    assert embedding_sum_s([node], batch=50, step_s=10.0, tied=tied) == least_s


def on_random_nodes(chance: random.Random, question: Problem) -> Problem:
    """The same on up to three node types; more bandwidth for larger messages, or less."""

    def link(most: float) -> Link:
        sizes = sorted(chance.sample(range(1, 10**6), 3))
        return Link(bandwidth_gb_per_s=tuple((size, chance.uniform(0.1, most)) for size in sizes), latency_us=0.0)

    types = tuple(
        NodeType(
            name=f"t{n}",
            device="A100-40",
            gpus_per_node=gpus,
            nics_per_node=chance.randint(1, gpus),
            count=chance.randint(1, 4),
            inside_node=link(100.0),
        )
        for n, gpus in enumerate(chance.choices((1, 2, 3, 4), k=chance.randint(1, 3)))
    )
    names = [each.name for each in types]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i:]]
    links = Links(
        node_pairs=tuple(NodePair(node_types=pair, link=link(1.0)) for pair in pairs),
        ring_interfaces=chance.choice((None, "one", "all")),
    )
    return dataclasses.replace(question, cluster=ClusterSpec(node_types=types, links=links))


def test_no_all_reduce_is_faster() -> None:
    """R nodes take 2 (R - 1) / R of the least seconds in which one of them sends all bytes, flat or by domains."""
    question = problem(cluster(("A100-40", 1, 1)), opt_model(2, 256, 4), 8)
    for seed in range(200):
        chance = random.Random(seed)
        check_all_reduces(chance, on_random_nodes(chance, question))


def check_all_reduces(chance: random.Random, question: Problem) -> None:
    topology, num_bytes = Topology(question.cluster), chance.randint(10**4, 2 * 10**6)
    ranks = chance.sample(range(question.cluster.num_devices), chance.randint(1, question.cluster.num_devices))
    nodes = {topology.node(rank) for rank in ranks}
    types = [each for each in question.node_types if set(each.ranks) & set(ranks)]
    sum_s = min(least_ring_s(num_bytes - len(ranks), each, question) for each in types)
    share = 2 * (len(nodes) - 1) / len(nodes)
    for num_domains in range(min(4, len(ranks))):
        chance.shuffle(ranks)
        domains = [ranks[i :: num_domains + 1] for i in range(num_domains + 1)] if num_domains else []
        assert all_reduce_cost(num_bytes, ranks, domains, topology).seconds >= share * sum_s * (1 - 1e-9)
