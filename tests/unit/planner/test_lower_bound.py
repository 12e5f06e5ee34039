"""No plan is below the lower bound by the simulator, whatever it looks like; and what the bound knows shows in it."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from hetero.cost.network import RING_SHARE
from hetero.data.cost_models import model_costs
from hetero.errors import ConfigError, PlanError, ScheduleError
from hetero.plan.depths import enough_in_flight
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import least_in_flight
from hetero.planner.cover.lower_bound import lower_bound_s
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, score_plan
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import Link
from hetero.units import GB
from tests.unit.planner.clusters import cluster, opt_model, problem
from tests.unit.planner.line import line_problem
from tests.unit.planner.random_problems import random_problem

SMALL = opt_model(4, 1024, 16)


def slow(spec: ClusterSpec, gb_per_s: float) -> ClusterSpec:
    """The same nodes, all with one interface and links of ``gb_per_s`` between them."""
    types = tuple(dataclasses.replace(node_type, nics_per_node=1) for node_type in spec.node_types)
    link = Link(bandwidth_gb_per_s=gb_per_s, latency_us=0.0)
    return dataclasses.replace(spec, node_types=types, links=Links(between_nodes=link))


TWO_NODES = slow(cluster(("A100-40", 2, 2)), 0.5)
APART = slow(cluster(("A100-40", 1, 4)), 0.5)
LARGER = slow(cluster(("A100-40", 1, 3), ("V100-16", 2, 1)), 10.0)

PROBLEMS = {
    "unlike devices": random_problem(0, gpus=(2, 2), num_layers=4, batch=16),
    "unlike devices, whole backwards": dataclasses.replace(
        random_problem(3, gpus=(4, 1), num_layers=5, batch=8), splits_backward=False, interleaves=False
    ),
    "slow links": problem(TWO_NODES, SMALL, 16),
    "slow links, whole backwards": problem(TWO_NODES, SMALL, 16, splits_backward=False),
    "slow links, one stage per device": problem(TWO_NODES, SMALL, 16, interleaves=False, splits_backward=False),
    "one device per node": problem(APART, SMALL, 16, interleaves=False),
    "a distributed optimizer": problem(TWO_NODES, SMALL, 16, interleaves=False, distributed_optimizer=True),
    "a distributed optimizer, whole backwards": problem(
        LARGER, SMALL, 16, splits_backward=False, distributed_optimizer=True
    ),
    "more samples than one node takes": problem(LARGER, SMALL, 16, splits_backward=False),
    "more samples than one node takes, no head tied": problem(
        LARGER, dataclasses.replace(SMALL, tied_embeddings=False), 16, splits_backward=False, interleaves=False
    ),
}


def random_plans(question: Problem, chance: random.Random) -> Iterator[ScoredPlan]:
    """Legal plans that fit, of all shapes, one after the other."""
    while True:
        try:
            found = score_plan(_drawn(question, chance), question)
        except (PlanError, ConfigError, ScheduleError):
            continue
        if found is not None:
            yield found


def _drawn(question: Problem, chance: random.Random) -> Plan:
    free = {node_type.index: list(node_type.ranks) for node_type in question.node_types}
    shares = chance.choice(([1], [1], [1, 1], [3, 1], [1, 1, 2], [1, 1, 1, 1]))
    total = question.global_batch_size
    replicas = [_replica(question, chance, free, total * share // sum(shares)) for share in shares]
    return question.plan_of(replicas)


def _replica(question: Problem, chance: random.Random, free: dict[int, list[int]], num_samples: int) -> Replica:
    model = question.model
    groups = [_group(question, chance, free) for _ in range(chance.choice((1, 1, 2, 3, 4)))]
    turns = chance.choice((1, 1, 2)) if question.interleaves and len(groups) > 1 else 1
    step = chance.choice((1.0, 0.5))
    edges = [step * i for i in range(1, int(model.num_layers / step))]
    if len(groups) * turns > len(edges) + 1:
        raise PlanError("fewer layers than stages")
    cuts = sorted(chance.sample(edges, len(groups) * turns - 1))
    layers = itertools.pairwise([0.0, *cuts, float(model.num_layers)])
    stages = []
    for s, held in enumerate(layers):
        recompute = chance.choice(("none", "none", "selective", "full"))
        delay = chance.choice((None, 0, 1, 2)) if question.splits_backward and recompute != "full" else None
        stages.append(
            dataclasses.replace(groups[s % len(groups)].with_layers(*held), recompute=recompute, wgrad_delay=delay)
        )
    replica = Replica(num_samples=num_samples, stages=tuple(stages))
    least = enough_in_flight(replica)
    if least is None:
        raise PlanError("it stands still at any depth")
    return replica.with_each_stage(in_flight=[depth + chance.choice((0, 0, 1, 3)) for depth in least])


def _group(question: Problem, chance: random.Random, free: dict[int, list[int]]) -> Stage:
    """Devices of one node type, each tensor-parallel group on one node."""
    node_type = chance.choice(question.node_types)
    tp = chance.choice([tp for tp in (1, 1, 2, 4) if node_type.gpus_per_node % tp == 0])
    dp = chance.choice((1, 1, 2, 4))
    ranks = free[node_type.index]
    if len(ranks) < tp * dp:
        raise PlanError("no device is left")
    taken = ranks[: tp * dp]
    del ranks[: tp * dp]
    return _stage(question, taken, tp, chance.choice((1, 1, 2, 4)))


def _stage(question: Problem, ranks: Sequence[int], tp: int, micro_batch_size: int) -> Stage:
    return Stage(
        first_layer=0,
        end_layer=1,
        ranks=tuple(ranks),
        device=question.node_type_of(ranks[0]).device,
        tp=tp,
        dp=len(ranks) // tp,
        sequence_parallel=question.splits_sequence(tp),
        micro_batch_size=micro_batch_size,
        in_flight=1,
    )


def extreme_plans(question: Problem) -> Iterator[ScoredPlan]:
    """Legal plans that fit, of one replica each: all samples in one microbatch or one by one, by tensor parallelism
    alone or by data parallelism alone; a stage for every device, with both ends on one node, too; unlike microbatches
    along a replica. Pipelines are as deep as keeps all stages at work, with and without late weights' gradients."""
    delays = (None, 0, 8) if question.splits_backward else (None,)
    for stages, recompute, delay in itertools.product(_extreme_stages(question), ("none", "full"), delays):
        if recompute == "full" and delay is not None:
            continue
        # Twice what a round trip takes, as stages are not equally fast.
        depths = [2 * (len(stages) - s) - 1 for s in range(len(stages))]
        cuts = [i * question.model.num_layers // len(stages) for i in range(len(stages) + 1)]
        held = [stage.with_layers(*cut) for stage, cut in zip(stages, itertools.pairwise(cuts), strict=True)]
        replica = Replica(num_samples=question.global_batch_size, stages=tuple(held)).with_each_stage(
            recompute=[recompute] * len(held), wgrad_delay=[delay] * len(held), in_flight=depths
        )
        depths = [max(depth, least_in_flight(replica, s)) for s, depth in enumerate(depths)]
        try:
            found = score_plan(question.plan_of([replica.with_each_stage(in_flight=depths)]), question)
        except (PlanError, ConfigError, ScheduleError):
            continue
        if found is not None:
            yield found


def _extreme_stages(question: Problem) -> Iterator[list[Stage]]:
    batch, num_layers = question.global_batch_size, question.model.num_layers
    ranks = [rank for node_type in question.node_types for rank in node_type.ranks]
    for node_type in question.node_types:
        for tp in (tp for tp in (1, 2, 4) if node_type.gpus_per_node % tp == 0):
            for dp in (dp for dp in (1, 2, 4) if tp * dp <= node_type.num_devices):
                for size in {1, batch // dp}:
                    yield [_stage(question, node_type.ranks[: tp * dp], tp, size)]
    around = [ranks[0], *ranks[2:], ranks[1]]
    for order, size in itertools.product((ranks, ranks[::-1], around), (1, 2)):
        yield [_stage(question, [rank], 1, size) for rank in order[:num_layers]]
    for sizes in itertools.permutations((1, batch)):
        yield [_stage(question, [rank], 1, size) for rank, size in zip((ranks[0], ranks[-1]), sizes, strict=True)]


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_random_plan_is_below_the_bound(name: str) -> None:
    question = PROBLEMS[name]
    bound_s = lower_bound_s(question)
    assert bound_s > 0
    best_s = min(each.step_s for each in itertools.islice(random_plans(question, random.Random(1)), 40))
    assert bound_s <= best_s * (1 + 1e-9)
    assert best_s < 5 * bound_s, "a bound so far away would hold if it were wrong"


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_extreme_plan_is_below_the_bound(name: str) -> None:
    question = PROBLEMS[name]
    steps_s = [each.step_s for each in extreme_plans(question)]
    assert len(steps_s) > 20
    assert lower_bound_s(question) <= min(steps_s) * (1 + 1e-9)


def test_equal_devices_of_one_stage_each_are_near_the_bound() -> None:
    """One replica per device and links that cost nothing: what is above the bound is the sum of the last gradients."""
    question = line_problem(batch=64, interleaves=False, splits_backward=False)
    node_type = question.node_types[0]
    one = Stage(first_layer=0, end_layer=8, ranks=(0,), device=node_type.device, micro_batch_size=1, in_flight=1)
    plan = question.plan_of(
        Replica(num_samples=16, stages=(dataclasses.replace(one, ranks=(rank,)),)) for rank in node_type.ranks
    )
    found = score_plan(plan, question)
    assert found is not None
    assert lower_bound_s(question) == pytest.approx(found.step_s, rel=0.02)


def test_slow_links_between_single_devices_raise_the_bound() -> None:
    """Each either sums its gradients over them, or receives every sample over them."""
    fast, slowed = (
        problem(slow(APART, gb_per_s), SMALL, 16, interleaves=False, splits_backward=False)
        for gb_per_s in (100.0, 0.05)
    )
    assert lower_bound_s(slowed) > 1.2 * lower_bound_s(fast)


def test_whole_backwards_leave_a_slow_sum_of_the_embedding_to_nobody_but_one_node() -> None:
    """However stages are ordered, nobody computes during that sum: with 2,000 s of it, one node does everything."""
    one, two, split = (
        problem(slow(cluster(("A100-40", 2, count)), 1e-4), SMALL, 16, splits_backward=splits)
        for count, splits in ((1, False), (2, False), (2, True))
    )
    alone_s = lower_bound_s(one)
    assert 0.95 * alone_s < lower_bound_s(two) < 1.05 * alone_s
    assert lower_bound_s(split) < 0.6 * alone_s


def test_whole_backwards_end_with_the_sum_of_the_embedding() -> None:
    """Where one node takes too long for all first stages, the bound is that much higher than with split backwards."""
    whole, split = (problem(LARGER, SMALL, 16, splits_backward=splits) for splits in (False, True))
    sum_s = whole.costs.parameter_counts.word_embedding * 4 / (RING_SHARE * 10.0 * GB)
    assert lower_bound_s(whole) - lower_bound_s(split) == pytest.approx(sum_s, rel=0.05)


def test_weights_in_half_precision_are_gathered_in_half_the_time_of_gradients() -> None:
    """With a distributed optimizer it comes before every forward, also where backwards are split."""

    def question(gb_per_s: float) -> Problem:
        spec = slow(LARGER, gb_per_s)
        costs = model_costs(SMALL, seq_length=2048, precision="fp16", data_sheets=True, where=spec)
        return Problem(cluster=spec, costs=costs, global_batch_size=16, distributed_optimizer=True)

    numel = question(1.0).costs.parameter_counts.word_embedding
    gather_s = numel * 2 / 2 / (RING_SHARE * 1.0 * GB)
    assert lower_bound_s(question(1.0)) - lower_bound_s(question(1e5)) == pytest.approx(gather_s, rel=0.05)


@pytest.mark.parametrize("more", [{"memory_gib": 80}, {"count": 3}, {"nics_per_node": 2}])
def test_more_of_anything_never_raises_the_bound(more: dict[str, int]) -> None:
    (node_type,) = TWO_NODES.node_types
    grown = dataclasses.replace(TWO_NODES, node_types=(dataclasses.replace(node_type, **more),))
    before, after = (problem(spec, SMALL, 16, interleaves=False) for spec in (TWO_NODES, grown))
    assert lower_bound_s(after) <= lower_bound_s(before) * (1 + 1e-9)
