"""Compositions: what replicas are made of, and which ranks they get."""

import random
from collections import Counter

import pytest

from hetero.planner.improve.compositions import Composition, drawn_composition, placed
from hetero.planner.problem import Problem
from tests.unit.planner.clusters import OPT_350M, cluster, problem

CLUSTERS = {
    "two types": cluster(("A100-40", 4, 2), ("V100-16", 4, 4)),
    "odd nodes": cluster(("A100-40", 5, 2), ("V100-16", 3, 4), ("RTX-3090", 1, 3)),
    "one type": cluster(("A100-40", 8, 3)),
}


def question(name: str) -> Problem:
    return problem(CLUSTERS[name], OPT_350M, 96)


def drawn(name: str, *, times: int = 300, seed: int = 0) -> list[Composition]:
    dice, asked = random.Random(seed), question(name)
    return [drawn_composition(asked, dice) for _ in range(times)]


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_copy_has_devices_of_its_own_in_parts_of_nodes(name: str) -> None:
    asked = question(name)
    for composition in drawn(name):
        owned: Counter[int] = Counter()
        for copies, places in zip(composition, placed(composition, asked), strict=True):
            assert len(places.firsts) == copies.number
            for first in places.firsts:
                for piece in copies.pieces:
                    of_type = asked.node_types[piece.node_type]
                    ranks = range(first[piece.node_type], first[piece.node_type] + piece.devices * piece.parts)
                    assert set(ranks) <= set(of_type.ranks)
                    owned.update(ranks)
                    if piece.parts == 1:
                        assert len({asked.topology.node(rank) for rank in ranks}) == 1
                    else:
                        assert piece.devices == of_type.gpus_per_node
        assert set(owned.values()) <= {1}


def test_the_same_seed_draws_the_same() -> None:
    assert drawn("odd nodes", seed=3) == drawn("odd nodes", seed=3)
    assert drawn("odd nodes", seed=3) != drawn("odd nodes", seed=4)


def test_equal_copies_of_everything_are_drawn_for_every_number() -> None:
    """Two nodes of four and four nodes of four: whole nodes, halves and single devices in each copy."""
    numbers = {each[0].number for each in drawn("two types", times=1000) if len(each) == 1 and len(each[0].pieces) == 2}
    assert {1, 2, 4, 8} <= numbers


def test_types_are_together_alone_and_idle() -> None:
    every = drawn("two types", times=1000)
    kinds = {tuple(sorted(len(copies.pieces) for copies in each)) for each in every}
    assert {(2,), (1, 1), (1, 2)} <= kinds, "together, each type alone, and what is left of one alone"
    devices = [
        sum(copies.number * each.devices * each.parts for copies in of for each in copies.pieces) for of in every
    ]
    assert {24} < set(devices), "all of them, and fewer"
    assert max(devices) == 24


def test_most_have_only_the_node_types_that_a_good_plan_keeps() -> None:
    """And some have others, since a plan that leaves one idle need not be the best. All types, or one, say nothing."""
    dice, asked = random.Random(0), question("odd nodes")
    of_types = Counter(
        frozenset(piece.node_type for copies in drawn_composition(asked, dice, {0, 2}) for piece in copies.pieces)
        for _ in range(400)
    )
    kept = sum(times for types, times in of_types.items() if types <= {0, 2})
    assert 280 < kept < 340
    assert of_types[frozenset({0, 2})] > of_types[frozenset({0, 1, 2})] > 40
    for kept_types in ({0, 1, 2}, {1}):
        one, other = random.Random(0), random.Random(0)
        assert drawn_composition(asked, one) == drawn_composition(asked, other, kept_types)
        assert one.random() == other.random()


def test_ranks_of_every_other_replica_are_known() -> None:
    """The sums of gradients go over them."""
    asked = question("two types")
    several = next(each for each in drawn("two types") if len(each) > 1)
    every = placed(several, asked)
    for places in every:
        others = [first for each in every if each is not places for first in each.firsts]
        assert all(set(places.others) & set(first.values()) for first in others)
        assert not set(places.others) & {rank for first in places.firsts for rank in first.values()}
