"""Nodes dealt anew among few kinds of replicas, and the estimate that tells which of such plans are worth a replay."""

import random
from collections import Counter
from functools import cache

import pytest

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.division import Divider
from hetero.planner.improve.recompositions import MOST_ALIKE, Recomposer, Recomposition
from hetero.planner.problem import Problem
from hetero.planner.scoring import score_plan
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.helpers.plans import replica, stage
from tests.unit.planner.clusters import OPT_350M, cluster, problem


@cache
def question() -> Problem:
    """Two nodes of four A100-40 and four nodes of four V100-16."""
    return problem(cluster(("A100-40", 4, 2), ("V100-16", 4, 4)), OPT_350M, 96)


def taken(recomposer: Recomposer, dice: random.Random, *, more: int, most: int) -> list[Recomposition]:
    recomposer.draw(dice, more, Deadline(1e9, CountedWork()))
    return recomposer.taken(recomposer.drawn, most)


@cache
def drawn() -> tuple[Recomposition, ...]:
    return tuple(taken(Recomposer(question(), Divider(question())), random.Random(0), more=160, most=80))


@cache
def made() -> dict[Recomposition, Plan]:
    """Those of which a legal plan can be made, with layers and samples divided."""
    recomposer = Recomposer(question(), Divider(question()))
    found = {}
    for each in drawn():
        try:
            plan = recomposer.plan(each)
            if plan is not None:
                validate(plan)
                found[each] = plan
        except (PlanError, ConfigError):
            pass
    return found


def test_nothing_is_drawn_twice_and_the_same_seed_draws_the_same() -> None:
    recomposer = Recomposer(question(), Divider(question()))
    dice = random.Random(0)
    first, second = (taken(recomposer, dice, more=160, most=80) for _ in range(2))
    assert tuple(first) == drawn()
    every = [(each.composition, each.pipelines) for each in (*first, *second)]
    assert len(every) == len(set(every))


def test_what_was_found_of_a_composition_tells_of_its_other_pipelines() -> None:
    """The least by which one of its pipelines was longer than at best."""
    recomposer = Recomposer(question(), Divider(question()))
    dice = random.Random(0)
    told = taken(recomposer, dice, more=120, most=30)
    for each in told:
        recomposer.tell(each, 9 * each.step_s)
    for times in (1, 9):
        recomposer.tell(told[0], times * told[0].step_s)
    left = [each.composition for each in taken(recomposer, dice, more=0, most=1000)]
    assert 1 < left.count(told[0].composition) <= MOST_ALIKE
    others = {each.composition for each in told[1:]}
    assert left.index(told[0].composition) < min(left.index(each) for each in others if each in left)


def test_a_composition_that_was_searched_often_lets_others_come_first() -> None:
    """However good its best shape is, from where nothing better is found any more."""
    recomposer = Recomposer(question(), Divider(question()))
    dice = random.Random(0)
    told = [(each, recomposer.shaped(each, dice)) for each in taken(recomposer, dice, more=160, most=20)]
    shaped = [(each, found) for each, found in told if found is not None]
    for _, found in shaped:
        recomposer.tell(found, found.step_s)
    best, _ = min(shaped, key=lambda pair: pair[1].step_s)
    before = taken(recomposer, dice, more=400, most=1000)
    recomposer.drawn.put_back(before)
    for _ in range(60):
        recomposer.shaped(best, dice)
    after = taken(recomposer, dice, more=0, most=1000)
    first, later = ([each.composition for each in every].index(best.composition) for every in (before, after))
    assert later > first + 3


def test_parts_of_odd_nodes_lie_within_a_node() -> None:
    """Of five devices two pipelines have two each, and the last one idles."""
    odd = problem(cluster(("A100-40", 5, 2), ("V100-16", 3, 4)), OPT_350M, 96)
    recomposer = Recomposer(odd, Divider(odd))
    sizes = set()
    for each in taken(recomposer, random.Random(0), more=800, most=800):
        plan = recomposer.plan(each)
        for _, _, made_of in plan.stages() if plan is not None else ():
            per_node = odd.node_type_of(made_of.ranks[0]).gpus_per_node
            if len(made_of.ranks) < per_node:
                assert len({odd.topology.node(rank) for rank in made_of.ranks}) == 1
                sizes.add((per_node, len(made_of.ranks)))
    assert (5, 2) in sizes


def test_most_of_them_make_legal_plans_of_all_samples() -> None:
    assert len(made()) > len(drawn()) / 2
    for plan in made().values():
        assert sum(replica.num_samples for replica in plan.replicas) == 96
        assert sorted(plan.ranks()) == list(range(24)), "no device is lost"


def test_a_plan_has_the_replicas_of_its_composition() -> None:
    for each, plan in made().items():
        assert len(plan.replicas) == sum(copies.number for copies in each.composition)
        devices = Counter(stage.device for _, _, stage in plan.stages() for _ in stage.ranks)
        asked: Counter[str] = Counter()
        for copies in each.composition:
            for piece in copies.pieces:
                asked[question().node_types[piece.node_type].device] += copies.number * piece.devices * piece.parts
        assert devices == asked


def test_devices_of_one_type_may_be_at_both_ends_of_another() -> None:
    orders = [[stage.node_type for stage in shape.stages] for each in drawn() for shape in each.pipelines]
    assert any(order[0] == order[-1] != order[len(order) // 2] for order in orders)


def test_the_estimate_is_close_to_the_simulated_step() -> None:
    """Of the plans that are best by it; of long ones nobody asks by how much they are."""
    estimates = Divider(question()).estimates
    best = sorted(made().values(), key=estimates.step_s)[:12]
    off = []
    for plan in best:
        found = score_plan(plan, question())
        if found is not None:
            off.append(estimates.step_s(plan) / found.step_s - 1)
    assert len(off) > 6
    assert sorted(map(abs, off))[len(off) // 2] < 0.08
    assert max(off) < 0.15, "a plan that is estimated to be far too long is passed over"


def test_the_estimate_has_transfers_that_bound_the_step_and_gradients_that_wait() -> None:
    """Of a pipeline across a slow link, whose transfers take longer than computes; and of one with delays."""
    slow = Link(bandwidth_gb_per_s=0.05, latency_us=0.0)
    fast = Link(bandwidth_gb_per_s=50.0, latency_us=0.0)
    for link, delays, samples in ((slow, (None, None), 8), (fast, (0, 1), 2)):
        node = NodeType(name="node", device="A100-40", gpus_per_node=1, count=2)
        spec = ClusterSpec(node_types=(node,), links=Links(between_nodes=link))
        asked = problem(spec, OPT_350M, samples)
        stages = (
            stage(layers=(8 * s, 8 + 16 * s), ranks=(s,), device="A100-40", depth=2 - s, delay=delays[s])
            for s in (0, 1)
        )
        plan = asked.plan_of([replica(*stages, num_samples=samples)])
        found = score_plan(plan, asked)
        assert found is not None
        assert Divider(asked).estimates.step_s(plan) == pytest.approx(found.step_s, rel=0.05)
