"""The estimate of a pipeline of which nothing but its shape is known, and the search for the shortest one."""

import itertools
import random
from collections.abc import Iterator
from functools import cache

import pytest

from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve.compositions import Composition, EqualPipelines, NodeParts, placed
from hetero.planner.improve.division import Divider
from hetero.planner.improve.recompositions import Recomposer, Recomposition
from hetero.planner.improve.replica_shapes import ReplicaShape, ShapeDice, StageShape
from hetero.planner.improve.shape_estimates import ShapeEstimates, ShapeTimes
from hetero.planner.improve.shape_search import FoundShapes, ShapeSearch
from hetero.planner.problem import Problem
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from tests.unit.planner.clusters import OPT_30B, OPT_350M, cluster, problem


def estimates_of(question: Problem, composition: Composition) -> ShapeEstimates:
    """Of its only pipeline."""
    (places,) = placed(composition, question)
    return ShapeEstimates(ShapeTimes(question, Divider(question)), places)


def step_s(question: Problem, shape: ReplicaShape, pieces: tuple[NodeParts, ...], number: int = 1) -> float | None:
    steps = estimates_of(question, (EqualPipelines(number, pieces),)).steps(shape, question.global_batch_size / number)
    return None if steps is None else steps.fill_s + question.global_batch_size / number * steps.period_s


def linked(link: Link, *, gpus: int, count: int, batch: int = 48) -> Problem:
    inside = Link(bandwidth_gb_per_s=100.0, latency_us=0.0)
    node = NodeType(name="node", device="A100-40", gpus_per_node=gpus, count=count, inside_node=inside)
    return problem(ClusterSpec(node_types=(node,), links=Links(between_nodes=link)), OPT_350M, batch)


def test_it_is_close_to_what_is_estimated_of_the_divided_plan() -> None:
    """Of equal copies of everything half are off by no more than an eighth, and none by half."""
    question = problem(cluster(("A100-40", 4, 2), ("V100-16", 4, 4)), OPT_350M, 96)
    divider = Divider(question)
    recomposer, estimates, dice = Recomposer(question, divider), divider.estimates, random.Random(0)
    recomposer.draw(dice, 2000, Deadline(1e9, CountedWork()))
    off = []
    for each in recomposer.taken(recomposer.drawn, 2000):
        shaped = recomposer.shaped(each, dice) if len(each.composition) == 1 else None
        plan = recomposer.plan(shaped) if shaped is not None else None
        if shaped is not None and plan is not None:
            off.append(abs(estimates.step_s(plan) / shaped.step_s - 1))
    assert len(off) > 5
    assert sorted(off)[len(off) // 2] < 0.125
    assert max(off) < 0.5


def test_a_slow_link_bounds_the_step() -> None:
    """Of two nodes one behind the other, whose transfers take longer than the computes."""
    slow, fast = (Link(bandwidth_gb_per_s=bandwidth, latency_us=0.0) for bandwidth in (0.05, 50.0))
    shape = ReplicaShape((StageShape(0, (0,), 1, 1), StageShape(0, (1,), 1, 1)), 1)
    pieces = (NodeParts(0, 1, 2),)
    over = {link.bandwidth_gb_per_s: step_s(linked(link, gpus=1, count=2), shape, pieces) for link in (slow, fast)}
    bytes_there = 48 * 2048 * 1024 * 4
    assert over[0.05] is not None
    assert over[50.0] is not None
    assert over[0.05] > bytes_there / 0.05e9 > 2 * over[50.0]


def test_gradients_that_cross_a_slow_link_count() -> None:
    """Two nodes as one stage sum all gradients between them; one behind the other they sum the embedding's alone."""
    question = linked(Link(bandwidth_gb_per_s=0.5, latency_us=0.0), gpus=2, count=2)
    pieces = (NodeParts(0, 2, 2),)
    fused = step_s(question, ReplicaShape((StageShape(0, (0, 1), 4, 1),), 4), pieces)
    behind = step_s(question, ReplicaShape(tuple(StageShape(0, (n,), 2, 1) for n in (0, 1)), 4), pieces)
    assert fused is not None
    assert behind is not None
    layers = 24 * 12 * 1024**2 * 4
    assert fused - behind > 0.5 * layers / 0.5e9


def test_the_tied_embedding_is_summed_faster_where_both_ends_are_on_one_node() -> None:
    question = linked(Link(bandwidth_gb_per_s=0.5, latency_us=0.0), gpus=2, count=2, batch=4)
    pieces = (NodeParts(0, 2, 2),)
    one, other = StageShape(0, (0,), 1, 1), StageShape(0, (1,), 2, 1)
    apart = (one._replace(devices=2), *(StageShape(0, (1,), 1, 1) for _ in range(2)))
    together_s = step_s(question, ReplicaShape((one, other, one), 2), pieces)
    apart_s = step_s(question, ReplicaShape(apart, 2), pieces)
    assert together_s is not None
    assert apart_s is not None
    assert apart_s - together_s > 0.5 * 50304 * 1024 * 4 / 0.5e9


def test_microbatches_that_do_not_make_up_the_batch_are_none() -> None:
    """Seven ways divide no batch of 48, unless other pipelines take the rest."""
    question = problem(cluster(("A100-40", 7, 1), ("V100-16", 1, 1)), OPT_350M, 48)
    shape, copies = ReplicaShape((StageShape(0, (0,), 7, 1),), 1), EqualPipelines(1, (NodeParts(0, 7, 1),))
    assert estimates_of(question, (copies,)).steps(shape, 48) is None
    both = (copies, EqualPipelines(1, (NodeParts(1, 1, 1),)))
    times = ShapeTimes(question, Divider(question))
    assert ShapeEstimates(times, placed(both, question)[0]).steps(shape, 42) is not None


def test_what_does_not_fit_is_none() -> None:
    """A model of 30 billion parameters on two devices."""
    question = problem(cluster(("A100-40", 2, 1)), OPT_30B, 8)
    shape = ReplicaShape((StageShape(0, (0,), 2, 1),), 2)
    assert step_s(question, shape, (NodeParts(0, 2, 1),)) is None


@cache
def small() -> tuple[Problem, EqualPipelines]:
    """Three devices and two."""
    question = problem(cluster(("A100-40", 3, 1), ("V100-16", 2, 1)), OPT_350M, 24)
    return question, EqualPipelines(1, (NodeParts(0, 3, 1), NodeParts(1, 2, 1)))


def every_shape(question: Problem, copies: EqualPipelines) -> Iterator[ReplicaShape]:
    """All of them, by the partitions of the devices of each node."""
    partitions = {2: [(2,), (1, 1)], 3: [(3,), (1, 2), (1, 1, 1)]}
    for sizes in itertools.product(*(partitions[piece.devices] for piece in copies.pieces)):
        blocks = [(piece.node_type, size) for piece, of in zip(copies.pieces, sizes, strict=True) for size in of]
        for order in set(itertools.permutations(blocks)):
            degrees = [[tp for tp in (1, 2) if size % tp == 0] for _, size in order]
            for tps in itertools.product(*degrees):
                stages = tuple(StageShape(t, (0,), size, tp) for (t, size), tp in zip(order, tps, strict=True))
                for samples in (1, 2, 4, 8):
                    yield from every_microbatch(ReplicaShape(stages, samples))


def every_microbatch(shape: ReplicaShape) -> Iterator[ReplicaShape]:
    """With microbatches that are halved on some stages, and whole on one."""
    by_stage = [
        [halved for halved in range(4) if halved == 0 or shape.samples >> halved >= stage.dp] for stage in shape.stages
    ]
    for halved in itertools.product(*by_stage):
        if min(halved) == 0:
            stages = (each._replace(halved=h) for each, h in zip(shape.stages, halved, strict=True))
            yield ReplicaShape(tuple(stages), shape.samples)


def test_the_search_finds_the_shortest_of_all() -> None:
    """Some of few searches from random starts, none by more than a tenth longer in the mean."""
    question, copies = small()
    places = placed((copies,), question)[0]
    search = ShapeSearch(ShapeTimes(question, Divider(question)), copies, places)
    samples = question.global_batch_size
    every = [search.steps(shape, samples) for shape in every_shape(question, copies)]
    least = min(steps.fill_s + samples * steps.period_s for steps in every if steps is not None)
    found = []
    for seed in range(8):
        dice = random.Random(seed)
        shapes = search.shortest(ShapeDice(question, copies, dice).drawn(), samples, dice)
        assert shapes is not None
        assert shapes.new is shapes.best
        found.append(shapes.best.seconds(samples))
    assert min(found) == pytest.approx(least, rel=1e-9)
    assert sum(found) / len(found) < 1.1 * least


def test_a_short_search_is_no_better_than_a_long_one() -> None:
    question, copies = small()
    places = placed((copies,), question)[0]
    search = ShapeSearch(ShapeTimes(question, Divider(question)), copies, places)
    mean = {}
    for share in (0.2, 1.0):
        found = []
        for seed in range(8):
            dice = random.Random(seed)
            shapes = search.shortest(ShapeDice(question, copies, dice).drawn(), 24, dice, share=share)
            found.append(shapes.best.seconds(24) if shapes is not None else 10.0)
        mean[share] = sum(found)
    assert mean[1.0] <= mean[0.2]


def test_beside_the_best_shape_the_best_is_told_of_which_no_plan_was_made() -> None:
    question, copies = small()
    search = ShapeSearch(ShapeTimes(question, Divider(question)), copies, placed((copies,), question)[0])

    def found() -> FoundShapes:
        dice = random.Random(1)
        shapes = search.shortest(ShapeDice(question, copies, dice).drawn(), 24, dice)
        assert shapes is not None
        return shapes

    first = found()
    search.made.add(first.best.shape)
    second = found()
    assert second.best == first.best
    assert second.new is not None
    assert second.new.shape != first.best.shape
    assert second.new.seconds(24) >= first.best.seconds(24)


def test_where_the_best_shapes_are_known_others_of_the_same_composition_are_made() -> None:
    """Two devices in one pipeline have few shapes, and estimates are too far off to leave it at one of them."""
    question = problem(cluster(("A100-40", 2, 1)), OPT_350M, 8)
    recomposer, dice, made = Recomposer(question, Divider(question)), random.Random(0), []
    for _ in range(4):
        recomposer.draw(dice, 100, Deadline(1e9, CountedWork()))
        for each in recomposer.taken(recomposer.drawn, 20):
            if [copies.number for copies in each.composition] == [1]:
                shaped = recomposer.shaped(each, dice)
                made.append(None if shaped is None else shaped.step_s)
    steps_s = [step_s for step_s in made if step_s is not None]
    assert len(steps_s) > 3
    assert steps_s[0] == min(steps_s)


def test_nothing_that_was_found_is_found_again() -> None:
    question = problem(cluster(("A100-40", 2, 1), ("V100-16", 2, 1)), OPT_350M, 24)
    recomposer, dice = Recomposer(question, Divider(question)), random.Random(0)
    seen: set[tuple[object, ...]] = set()
    for _ in range(4):
        recomposer.draw(dice, 100, Deadline(1e9, CountedWork()))
        for each in recomposer.taken(recomposer.drawn, 20):
            shaped: Recomposition | None = recomposer.shaped(each, dice)
            if shaped is not None:
                assert (shaped.composition, shaped.pipelines) not in seen
                seen.add((shaped.composition, shaped.pipelines))
    assert len(seen) > 5
