"""Shapes of pipelines: what is drawn and what changes make of it have every device once."""

import itertools
import random
from collections import Counter

import pytest

from hetero.planner.improve.compositions import EqualPipelines, NodeParts
from hetero.planner.improve.replica_shapes import ReplicaShape, ShapeDice, StageShape
from hetero.planner.problem import Problem
from tests.unit.planner.clusters import OPT_350M, cluster, problem

WHOLE = EqualPipelines(1, (NodeParts(0, 5, 2), NodeParts(1, 4, 3)))
PARTS = EqualPipelines(4, (NodeParts(0, 2, 1), NodeParts(1, 1, 1)))


def question() -> Problem:
    return problem(cluster(("A100-40", 5, 2), ("V100-16", 4, 3)), OPT_350M, 96)


def check(shape: ReplicaShape, copies: EqualPipelines) -> None:
    """Every device of the copy has one stage, which is within a node or has whole nodes."""
    per_node = {piece.node_type: piece.devices for piece in copies.pieces}
    held: Counter[tuple[int, int]] = Counter()
    for stage in shape.stages:
        assert stage.devices % len(stage.nodes) == 0
        assert (stage.devices // len(stage.nodes)) % stage.tp == 0
        assert OPT_350M.num_query_groups % stage.tp == 0
        for node in stage.nodes:
            held[stage.node_type, node] += stage.devices // len(stage.nodes)
    asked = {(piece.node_type, node): piece.devices for piece in copies.pieces for node in range(piece.parts)}
    assert dict(held) == asked
    devices = set()
    for stage, first in zip(shape.stages, shape.firsts(per_node), strict=True):
        ranks = range(first, first + stage.devices)
        assert {rank // per_node[stage.node_type] for rank in ranks} == set(stage.nodes)
        devices |= {(stage.node_type, rank) for rank in ranks}
    assert len(devices) == sum(asked.values())


@pytest.mark.parametrize("copies", [WHOLE, PARTS], ids=["whole nodes", "parts of nodes"])
def test_what_is_drawn_and_changed_has_every_device_once(copies: EqualPipelines) -> None:
    shapes = ShapeDice(question(), copies, random.Random(0))
    seen = set()
    for _ in range(30):
        shape = shapes.drawn()
        check(shape, copies)
        for _ in range(60):
            changed = shapes.changed(shape)
            if changed is not None:
                check(changed, copies)
                assert 1 <= changed.samples <= shapes.most_samples
                seen.add((len(changed.stages) - len(shape.stages), changed.samples != shape.samples))
                shape = changed
    assert {(0, True), (0, False), (1, False), (-1, False)} <= seen, "stages are cut and joined, samples change"


def test_every_shape_leads_to_every_other() -> None:
    """Of two devices of one node and one of another, all shapes are reached from the first one."""
    copies = EqualPipelines(1, (NodeParts(0, 2, 1), NodeParts(1, 1, 1)))
    shapes = ShapeDice(question(), copies, random.Random(0))
    shape, reached, halved = shapes.drawn(), set(), set()
    for _ in range(4000):
        shape = shapes.changed(shape) or shape
        reached.add(tuple(stage._replace(halved=0) for stage in shape.stages))
        halved.add(tuple(stage.halved for stage in shape.stages if len(shape.stages) == 3))
    a, one, other = (StageShape(0, (0,), 2, tp) for tp in (1, 2, 1))
    half, v = StageShape(0, (0,), 1, 1), StageShape(1, (0,), 1, 1)
    orders = [order for each in (a, one) for order in itertools.permutations([each, v])]
    assert other == a
    assert reached == {*orders, *itertools.permutations([half, half, v])}
    assert halved >= set(itertools.product((0, 1), repeat=3))


def test_nodes_are_numbered_in_the_order_of_the_stages() -> None:
    first, second, both = StageShape(0, (1,), 2, 1), StageShape(0, (0,), 5, 1), StageShape(1, (2, 0), 8, 1)
    shape = ReplicaShape((first, second, first._replace(devices=3), both, both._replace(nodes=(1,), devices=4)), 4)
    assert [stage.nodes for stage in shape.numbered().stages] == [(0,), (1,), (0,), (0, 1), (2,)]
    check(shape.numbered(), WHOLE)


def test_a_stage_has_microbatches_of_its_own() -> None:
    """Halved so often as that says, but never less than one sample on each data-parallel rank."""
    stage = StageShape(0, (0,), 4, 2)
    sizes = [stage._replace(halved=halved).micro_batch_size(16) for halved in range(5)]
    assert sizes == [8, 4, 2, 1, 1]
    assert stage._replace(halved=1).samples(16) == 8


def test_no_microbatch_is_halved_in_vain() -> None:
    """What cannot become smaller stays: other names of the same shape would be looked at again and again."""
    shapes = ShapeDice(question(), WHOLE, random.Random(0))
    shape, seen = shapes.drawn(), 0
    for _ in range(3000):
        changed = shapes.changed(shape) or shape
        pairs = zip(shape.stages, changed.stages, strict=False)
        other = [(before, after) for before, after in pairs if before != after]
        if len(other) == 1 and other[0][1] == other[0][0]._replace(halved=other[0][0].halved + 1):
            seen += 1
            assert other[0][0].micro_batch_size(shape.samples) > 1
        shape = changed
    assert seen > 20


def test_microbatches_of_neighbours_divide_one_another() -> None:
    stages = [StageShape(0, (0,), devices, 1) for devices in (4, 1, 6)]
    assert ReplicaShape(tuple(stages), 1).divides
    assert not ReplicaShape((stages[0], stages[2]), 1).divides
