"""Clusters and models at the ends of what a file may say: planned and printed, or refused in one message of ours."""

import contextlib
import dataclasses
import json
import random
import re
from typing import get_args

import pytest

from hetero.cost.model_flops import utilizations
from hetero.data.cost_models import model_costs
from hetero.errors import HeteroError
from hetero.plan.ir import Precision
from hetero.planner.certainty import certainty_of
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import MAX_SEED, Problem
from hetero.planner.reference.yardsticks import uniform_yardsticks
from hetero.report.prediction_json import bounds_json, prediction_json
from hetero.report.tables.planner_result import result_lines
from hetero.serialization import to_json
from hetero.spec.cluster import MAX_PRICE_PER_HOUR, ClusterSpec, Links, NodeType
from hetero.spec.host import MAX_MEMORY_GIB, MOST_ELEMENTS_PER_S, HostProfile, UpdateRate
from hetero.spec.link import LEAST_GB_PER_S, MOST_GB_PER_S, MOST_LATENCY_US, Link
from hetero.spec.model import ModelSpec
from tests.unit.planner.clusters import opt_model

PRICES = (None, 0.0, 1e-9, 0.001, 3.0, MAX_PRICE_PER_HOUR)

BANDWIDTHS: tuple[float | tuple[tuple[int, float], ...], ...] = (
    LEAST_GB_PER_S,
    0.01,
    10.0,
    MOST_GB_PER_S,
    ((1, LEAST_GB_PER_S), (10**12, MOST_GB_PER_S)),
)


def _link(chance: random.Random) -> Link:
    return Link(
        bandwidth_gb_per_s=chance.choice(BANDWIDTHS), latency_us=chance.choice((0.0, 1e-9, 5.0, MOST_LATENCY_US))
    )


def _host(chance: random.Random) -> HostProfile:
    return HostProfile(
        source="drawn",
        memory_gib=chance.choice((1e-9, 64.0, MAX_MEMORY_GIB)),
        updates=(UpdateRate(threads=1, elements_per_s=chance.choice((1.0, 1e9, MOST_ELEMENTS_PER_S))),),
        to_device=_link(chance),
        to_host=_link(chance),
    )


def _cluster(chance: random.Random, *, is_priced: bool) -> ClusterSpec:
    node_types = []
    for name in ("a", "b", "c")[: chance.choice((1, 1, 2, 3))]:
        gpus = chance.choice((1, 1, 2, 3, 4))
        node_types.append(
            NodeType(
                name=name,
                device=chance.choice(("A100-40", "V100-16", "T4", "H100")),
                gpus_per_node=gpus,
                count=chance.choice((1, 1, 2)),
                nics_per_node=chance.choice((1, gpus)),
                memory_gib=chance.choice((None, 1, 2, MAX_MEMORY_GIB)),
                price_per_hour=chance.choice(PRICES[1:] if is_priced else PRICES),
                inside_node=_link(chance),
                host=_host(chance) if chance.random() < 0.5 else None,
            )
        )
    return ClusterSpec(node_types=tuple(node_types), links=Links(between_nodes=_link(chance)))


def _model(chance: random.Random) -> ModelSpec:
    heads, channels = chance.choice((1, 2, 3, 16)), chance.choice((2, 64))
    vocab_size = chance.choice((1, 2, 50257))
    return dataclasses.replace(
        opt_model(chance.choice((1, 1, 2, 3, 13)), heads * channels, heads),
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
    )


def drawn(seed: int) -> Problem:
    """A question whose every number is at an end of what it may be, or ordinary.

    Raises:
        HeteroError: it is refused.
    """
    chance = random.Random(seed)
    is_priced = chance.random() < 0.7
    cluster, model = _cluster(chance, is_priced=is_priced), _model(chance)
    precision: Precision = chance.choice(get_args(Precision))
    costs = model_costs(
        model,
        seq_length=chance.choice((1, 2, 128)),
        precision=precision,
        data_sheets=True,
        where=cluster,
    )
    return Problem(
        cluster=cluster,
        costs=costs,
        global_batch_size=chance.choice((1, 2, 3, 16, 1000)),
        distributed_optimizer=chance.random() < 0.5,
        goal="money" if is_priced and chance.random() < 0.6 else "time",
        budget_per_hour=chance.choice((None, 0.001, 1e15)) if is_priced else None,
        seed=chance.choice((0, MAX_SEED)),
    )


def answered(question: Problem) -> str:
    """All that is said of the plan, in words and as JSON."""
    deadline = Deadline(0.05, CountedWork())
    result = plan_cluster(question, yardsticks=uniform_yardsticks(question, limit_s=1.0), deadline=deadline)
    certainty = certainty_of(result.simulation, question.topology, question.costs, result.runners_up)
    found = utilizations(result.simulation, question.costs)
    document = prediction_json(
        result.simulation, result.memory, question.cluster, certainty, found, commands_of=lambda _: ()
    )
    json.loads(to_json({**document, **bounds_json(result)}), parse_constant=pytest.fail)
    return "\n".join(result_lines(result, certainty, found, lambda _: ()))


@pytest.mark.slow
@pytest.mark.rotates("starts", every=2, turn=0)
@pytest.mark.parametrize("start", [0, 1000, 2000, 3000])
def test_what_is_extreme_is_planned_or_refused(start: int) -> None:
    """Nothing but an error of ours, no figure that is none, and a uniform plan that is never better."""
    planned = 0
    for seed in range(start, start + 40):
        with contextlib.suppress(HeteroError):
            said = answered(drawn(seed))
            planned += 1
            assert not re.search(r"-0(\.0+)?\b|\bnan\b|\binf\b", said), f"{seed}: {said}"
            for ratio in re.findall(r"against a uniform plan: ([\d.]+)x", said):
                assert float(ratio) >= 1, f"{seed}: {said}"
    assert planned >= 10
