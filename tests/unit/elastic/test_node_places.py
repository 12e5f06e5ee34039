import itertools
import random
from typing import Any

import pytest

from hetero.checkpoint.manifest import block_key
from hetero.elastic.node_places import place_nodes
from hetero.errors import CheckpointError
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Plan
from hetero.plan.sub_blocks import sub_blocks_of
from hetero.planner.node_assignment import cheapest_places
from tests.helpers.plans import plan, replica, sharded, stage
from tests.unit.elastic.test_replanning import MODEL, node, problem

NODES = [node("n0"), node("n1")]


def owned(whole: Plan, rank: int, kinds: tuple[str, ...] = ("weights", "exp_avg", "exp_avg_sq")) -> list[str]:
    """The keys of what a rank owns, as it copies it."""
    keys = []
    for bucket in gradient_buckets(whole, bucket_numel=40_000_000):
        if rank not in bucket.ranks:
            continue
        shard = bucket.shard_of(rank)
        for segment, offset in zip(bucket.segments, bucket.offsets, strict=False):
            start, end = max(shard.start - offset, 0), min(shard.stop - offset, segment.numel)
            if start < end:
                keys += [
                    block_key(f"{kind}/{segment.parameter.name}", block.offsets, block.shape)
                    for block in sub_blocks_of(segment, start=start, end=end)
                    for kind in kinds
                ]
    return keys


def pipeline() -> Plan:
    """The first half of the layers on the first node, the second half on the second."""
    return plan(
        MODEL,
        [
            replica(
                stage(layers=(0, 2), ranks=[0, 1], tp=2, device="A100-40"),
                stage(layers=(2, 4), ranks=[2, 3], tp=2, device="A100-40"),
                num_samples=24,
            )
        ],
    )


def alone(**options: Any) -> Plan:
    return plan(MODEL, [replica(stage(layers=(0, 4), ranks=[0], device="V100-16"), num_samples=24)], **options)


@pytest.mark.parametrize("whole", [pipeline(), sharded(pipeline())], ids=["whole", "sharded"])
def test_a_node_that_has_the_copies_of_its_layers_keeps_them(whole: Plan) -> None:
    mine, other = [*owned(whole, 0), *owned(whole, 1)], [*owned(whole, 2), *owned(whole, 3)]
    kept = place_nodes(whole, problem(), NODES, {"n0": mine, "n1": other})
    assert [(each.node.name, each.ranks) for each in kept.nodes] == [("n0", (0, 1)), ("n1", (2, 3))]
    swapped = place_nodes(whole, problem(), NODES, {"n0": other, "n1": mine})
    assert [each.node.name for each in swapped.nodes] == ["n1", "n0"]
    # What the two tied embeddings and the norms share is owned by one rank and read by others.
    everything = place_nodes(whole, problem(), NODES, {})
    assert kept.moved_bytes == swapped.moved_bytes < 0.3 * everything.moved_bytes
    assert place_nodes(whole, problem(), NODES, {"n0": mine + other, "n1": mine + other}).moved_bytes == 0


def test_without_copies_all_that_ranks_load_moves_and_names_decide() -> None:
    found = place_nodes(pipeline(), problem(), NODES[::-1], {})
    assert [each.node.name for each in found.nodes] == ["n0", "n1"]
    whole = alone()
    one = place_nodes(whole, problem(), [node("s", "slow", 1)], {})
    parameters = sum(bucket.numel for bucket in gradient_buckets(whole, bucket_numel=1000))
    assert one.moved_bytes == 3 * 4 * parameters


def test_masters_count_in_half_precision() -> None:
    whole = alone(precision="fp16")
    found = place_nodes(whole, problem(precision="fp16"), [node("s", "slow", 1)], {})
    parameters = sum(bucket.numel for bucket in gradient_buckets(whole, bucket_numel=1000))
    assert found.moved_bytes == (2 + 3 * 4) * parameters
    kinds = ("weights", "master", "exp_avg", "exp_avg_sq")
    held = {"s": owned(whole, 0, kinds)}
    assert place_nodes(whole, problem(precision="fp16"), [node("s", "slow", 1)], held).moved_bytes == 0


def test_what_is_no_key_of_a_block_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"'exp_avg/w\[0:x\]' is not the key of a block"):
        place_nodes(pipeline(), problem(), NODES, {"n0": ["exp_avg/w[0:x]"]})


@pytest.mark.parametrize("seed", range(5))
def test_places_are_the_cheapest_of_all_orders(seed: int) -> None:
    draw = random.Random(seed)
    costs = [[draw.randrange(10) for _ in range(5)] for _ in range(5)]
    best = min(
        itertools.permutations(range(5)),
        key=lambda places: (
            sum(row[place] for row, place in zip(costs, places, strict=True)),
            sum(node != place for node, place in enumerate(places)),
        ),
    )
    found = cheapest_places(costs)
    assert sum(map(lambda row, place: row[place], costs, found)) == sum(map(lambda row, p: row[p], costs, best))
    assert sum(n != p for n, p in enumerate(found)) == sum(n != p for n, p in enumerate(best))


def test_no_node_has_no_place() -> None:
    assert cheapest_places([]) == ()
