"""Layers and samples divided anew: as short as the best of all divisions, by the formula, and within the memory."""

import dataclasses
import itertools
import math
import random
from functools import partial

import numpy as np
import pytest

from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError
from hetero.plan.ir import Plan
from hetero.planner.improve.division import Divider, ReplicaSteps, StageSeconds, least_cuts, shared_out
from hetero.planner.improve.division_costs import DivisionCosts, Matrix, StageKind, StageTable
from hetero.planner.problem import Problem
from hetero.planner.scoring import bytes_over_capacity, score_plan
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.plans import replica, stage
from tests.unit.planner import few_layers, unlike_devices
from tests.unit.planner.clusters import GPT_NEO, OPT_350M, cluster, problem
from tests.unit.planner.line import score_of


def longest_end_s(seconds: list[float], weight_s: list[float], counts: list[int], delays: list[int | None]) -> float:
    """max over s of M_s t_s + max(fill_s / 2, fill_s - min(M_s, k_s + 1) w_s), fill_s = sum_{i < s} (t_i - w_i)."""
    ends_s, fill_s = [], 0.0
    for each_s, late_s, count, delay in zip(seconds, weight_s, counts, delays, strict=True):
        waiting = 0 if delay is None else min(count, delay + 1)
        ends_s.append(count * each_s + max(fill_s / 2, fill_s - waiting * late_s))
        fill_s += each_s - late_s
    return max(ends_s)


@pytest.mark.parametrize("splits", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("seed", range(6))
def test_no_cuts_are_shorter(seed: int, splits: bool) -> None:
    dice = np.random.default_rng(seed)
    num_stages, last = 4, 9
    counts = [int(each) for each in dice.integers(1, 12, num_stages)]
    delays: list[int | None] = [int(each) if splits else None for each in dice.integers(0, 4, num_stages)]
    tables = []
    for _ in range(num_stages):
        seconds = dice.uniform(0.5, 2.0) * (np.arange(last + 1)[None, :] - np.arange(last + 1)[:, None]).astype(float)
        seconds += dice.uniform(0.0, 0.3, seconds.shape)
        weight_s = dice.uniform(0.1, 0.4, seconds.shape) * np.abs(seconds) * splits
        seconds[np.tril_indices(last + 1)] = np.inf
        seconds[dice.uniform(size=seconds.shape) < 0.3] = np.inf
        tables.append(StageTable(seconds, weight_s, np.zeros(seconds.shape, dtype=np.int64)))

    def end_s(cuts: list[tuple[int, int]]) -> float:
        each_s, weight_s = (
            [float(getattr(t, of)[cut]) for t, cut in zip(tables, cuts, strict=True)] for of in ("seconds", "weight_s")
        )
        return longest_end_s(each_s, weight_s, counts, delays)

    every = [end_s(list(itertools.pairwise((0, *inner, last)))) for inner in itertools.combinations(range(1, last), 3)]
    cuts = least_cuts([StageSeconds.of(*each) for each in zip(tables, counts, delays, strict=True)], counts)
    if cuts is None:
        assert min(every) == np.inf
    else:
        assert end_s(cuts) <= 1.01 * min(every)


@pytest.mark.parametrize("seed", range(6))
def test_no_shares_are_shorter(seed: int) -> None:
    dice = random.Random(seed)
    shares = [ReplicaSteps(dice.choice((1, 2, 3)), dice.uniform(0, 9), dice.uniform(1, 4)) for _ in range(3)]
    batch = dice.randint(8, 30)
    every = {
        counts: max(s.fill_s + (n - 1) * s.period_s for s, n in zip(shares, counts, strict=True))
        for counts in itertools.product(range(1, batch), repeat=3)
        if sum(s.unit * n for s, n in zip(shares, counts, strict=True)) == batch
    }
    found = shared_out(shares, batch)
    assert found is not None
    assert every[tuple(found)] == pytest.approx(min(every.values()), rel=1e-5)
    assert shared_out([ReplicaSteps(2, 1.0, 1.0)] * 2, 7) is None


def test_layers_go_where_they_end_first() -> None:
    question = unlike_devices.mixed_problem()
    start = score_of(unlike_devices.halves(question), question)
    changed = Divider(question).settled(start.plan, [0], per_stage=2)
    assert changed is not None
    assert changed.replicas[0].stages[0].num_layers in {6.0, 6.5}, "one is four times as fast as the other"
    assert score_of(changed, question).step_s < 0.7 * start.step_s


def test_what_is_divided_anew_fits_with_recomputation() -> None:
    question = problem(cluster(("A100-40", 2, 1), ("V100-16", 2, 2)), GPT_NEO, 32)
    stages = [stage(layers=(s, s + 1), ranks=(s,), device="A100-40" if s < 2 else "V100-16", mbs=2) for s in range(6)]
    start = question.plan_of([replica(*stages, num_samples=32)])
    for per_stage in (1, 2):
        changed = Divider(question).settled(start, [0], per_stage=per_stage)
        assert changed is not None
        assert score_plan(changed, question) is not None
        assert any(stage.recompute == "full" for stage in changed.replicas[0].stages)


def around(question: Problem, layers: tuple[float, float], *, depth: int, size: int, copies: int, again: int) -> Plan:
    """A stage of these layers on a V100, so many of which are computed again, between two others; in so many alike
    pipelines."""
    held = math.ceil(layers[1]) - math.floor(layers[0])
    middle = stage(
        layers=layers,
        ranks=(0,),
        device="V100-16",
        mbs=size,
        depth=depth,
        recompute="full" if again else "none",
        recompute_num_layers=again if 0 < again < held else None,
    )
    return question.plan_of(
        replica(
            stage(layers=(0, layers[0]), ranks=(r,), device="A100-40", mbs=size, depth=16),
            dataclasses.replace(middle, ranks=(4 + 2 * r,)),
            stage(layers=(layers[1], 32), ranks=(5 + 2 * r,), device="V100-16", mbs=size, depth=1),
            num_samples=64 // copies,
        )
        for r in range(copies)
    )


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_no_more_is_computed_again_than_memory_asks_for(distributed_optimizer: bool) -> None:
    """The least number of layers with which the memory model lets a stage pass, but for rounding."""
    question = problem(cluster(("A100-40", 4, 1), ("V100-16", 4, 2)), GPT_NEO, 64)
    question = dataclasses.replace(question, distributed_optimizer=distributed_optimizer)
    costs, dice = DivisionCosts(question), random.Random(0)
    pairs = []
    for _ in range(100):
        first = dice.randrange(2, 40)
        cut = first, first + dice.randrange(3, 23)
        first_layer, end = (float(costs.positions[each]) for each in cut)
        depth, size, copies = dice.randint(1, 8), dice.choice((1, 2)), dice.choice((1, 2))
        made = partial(around, question, (first_layer, end), depth=depth, size=size, copies=copies)
        table = costs.table(costs.kind(made(again=0).replicas[0], 1, copies), depth)
        found = int(table.recomputed[cut]) if np.isfinite(table.seconds[cut]) else None
        if found is not None:
            computing = made(again=found).replicas[0].stages[1]
            assert table.seconds[cut] == pytest.approx(question.costs.of(computing).microbatch_s, rel=0.02)
        least = None
        for again in range(math.ceil(end) - math.floor(first_layer) + 1):
            plan = made(again=again)
            if not any(s == 1 for _, s in bytes_over_capacity(plan, question, plan_memory(plan, question.costs))):
                least = again
                break
        pairs.append((found, least))
    assert all(found in {least, least + 1} for found, least in pairs if found is not None and least is not None)
    assert sum(found == least for found, least in pairs) > 90
    assert {found for found, _ in pairs} > {None, 0, 1, 2, 3, 4, 5}


def test_what_waits_for_its_weights_gradients_takes_memory() -> None:
    question = problem(cluster(("V100-16", 4, 1)), GPT_NEO, 64)
    costs = DivisionCosts(question)
    pipeline = replica(*(stage(layers=(8 * s, 8 * s + 8), ranks=(s,), device="V100-16") for s in range(4)))
    whole, split = (
        costs.table(costs.kind(each, 1, 1), 4).recomputed for each in (pipeline, pipeline.with_stage(1, wgrad_delay=3))
    )
    fits_both = (costs.table(costs.kind(pipeline, 1, 1), 4).seconds < np.inf) & (split > 0)
    assert np.all(split >= whole)
    assert np.any(fits_both & (whole == 0))


def test_split_backwards_fill_the_time_before_and_after_a_stage() -> None:
    """With few microbatches, stages behind have fewer layers where backwards are whole: they begin later and are done
    sooner. Weights' gradients that wait fill that time."""
    question = few_layers.question(12, 3, batch=4)
    found = {}
    for splits in (False, True):
        asked = dataclasses.replace(question, splits_backward=splits)
        divided = Divider(asked).settled(few_layers.pipeline(asked, 4, 8), [0], per_stage=2)
        assert divided is not None
        found[splits] = divided
    whole, split = (found[splits].replicas[0].stages for splits in (False, True))
    assert [(each.num_layers, each.wgrad_delay) for each in whole] == [(5.0, None), (4.0, None), (3.0, None)]
    assert [(each.num_layers, each.wgrad_delay) for each in split] == [(4.5, 0), (4.0, 1), (3.5, 2)]
    assert score_of(found[True], question).step_s < 0.85 * score_of(found[False], question).step_s


def test_gradients_that_are_summed_for_long_do_not_wait() -> None:
    """Of two replicas over a slow link. What the division saves by delays is less than what sums then add."""
    delays = {}
    for bandwidth in (0.05, 50.0):
        link = Link(bandwidth_gb_per_s=bandwidth, latency_us=0.0)
        node = NodeType(
            name="node",
            device="A100-40",
            gpus_per_node=2,
            count=2,
            inside_node=Link(bandwidth_gb_per_s=100, latency_us=0),
        )
        question = problem(ClusterSpec(node_types=(node,), links=Links(between_nodes=link)), OPT_350M, 8)
        pipelines = (
            replica(
                *(
                    stage(layers=(12 * s, 12 * s + 12), ranks=(2 * r + s,), device="A100-40", depth=2 - s)
                    for s in (0, 1)
                ),
                num_samples=4,
            )
            for r in (0, 1)
        )
        divided = Divider(question).settled(question.plan_of(pipelines), [0, 1], per_stage=2)
        assert divided is not None
        delays[bandwidth] = [each.wgrad_delay for each in divided.replicas[0].stages]
    assert delays == {0.05: [None, None], 50.0: [0, 1]}


def test_where_no_profile_tells_what_may_wait_backwards_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    question = few_layers.question(6, 3)

    def fails(costs: DivisionCosts, kind: StageKind) -> Matrix:
        raise ConfigError("no profile of a divided block")

    monkeypatch.setattr(DivisionCosts, "_weight_seconds_of", fails)
    divided = Divider(question).settled(few_layers.pipeline(question, 2, 4), [0], per_stage=2)
    assert divided is not None
    assert {each.wgrad_delay for each in divided.replicas[0].stages} == {None}


def test_what_is_remembered_is_of_the_same_question() -> None:
    """Depths follow microbatches and what hides a transfer, the cuts the number of microbatches."""
    question = problem(cluster(("A100-40", 2, 1), ("V100-16", 2, 1)), GPT_NEO, 32)
    stages = [stage(layers=(s, s + 1), ranks=(s,), device="A100-40" if s < 2 else "V100-16") for s in range(4)]
    divider, found = Divider(question), set()
    for samples, per_stage in itertools.product((2, 32), (1, 2)):
        start = replica(*stages, num_samples=samples)
        plan = dataclasses.replace(question.plan_of([start]), global_batch_size=samples)
        again = divider.divided(start, plan, per_stage=per_stage)
        assert again == Divider(question).divided(start, plan, per_stage=per_stage)
        assert again is not None
        found.add(tuple((each.num_layers, each.in_flight) for each in again.stages))
    assert len(found) > 2, "the questions have other answers"


def test_transfers_are_of_as_many_samples() -> None:
    question = few_layers.question(6, 2)
    one, two = few_layers.pipeline(question, 3).replicas[0].stages
    divider = Divider(question)
    once = divider.transfers.between(one, two).seconds
    doubled = [dataclasses.replace(each, micro_batch_size=2) for each in (one, two)]
    assert divider.transfers.between(*doubled).seconds == Divider(question).transfers.between(*doubled).seconds > once


def test_who_waits_for_transfers_has_fewer_samples() -> None:
    """A pipeline of two devices beside a third one alone, with a link between nodes that takes its time."""
    shares = []
    for latency_us in (0.0, 5e5):
        link = Link(bandwidth_gb_per_s=10.0, latency_us=latency_us)
        node = NodeType(name="node", device="A100-40", gpus_per_node=1, count=3)
        spec = ClusterSpec(node_types=(node,), links=Links(between_nodes=link))
        question = problem(spec, OPT_350M, 64)
        pipeline = [stage(layers=(12 * s, 12 * s + 12), ranks=(s,), device="A100-40") for s in (0, 1)]
        alone = stage(layers=(0, 24), ranks=(2,), device="A100-40")
        made = question.plan_of([replica(*pipeline, num_samples=32), replica(alone, num_samples=32)])
        found = Divider(question).shared(made)
        assert found is not None
        shares.append(found.replicas[0].num_samples)
    fast, slow = shares
    assert slow < fast


def test_seconds_of_tables_are_those_of_stages() -> None:
    question = few_layers.question(6, 3)
    pipeline = few_layers.pipeline(question, 1.5, 4).replicas[0]
    costs = DivisionCosts(question)
    for s, each in enumerate(pipeline.stages):
        table = costs.table(costs.kind(pipeline, s, 1), 2)
        at = int(2 * each.start), int(2 * each.end)
        assert table.seconds[at] == pytest.approx(question.costs.of(each).microbatch_s)
        assert table.weight_s[at] == 0
        split = pipeline.with_stage(s, wgrad_delay=1)
        table = costs.table(costs.kind(split, s, 1), 2)
        assert table.weight_s[at] == pytest.approx(question.costs.of(split.stages[s]).weight_s)
        assert table.seconds[at] == pytest.approx(question.costs.of(split.stages[s]).microbatch_s)
