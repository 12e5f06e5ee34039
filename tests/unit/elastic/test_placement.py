"""Every block has its second copy on another failure domain if there is one, without network if that is possible."""

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest

from hetero.checkpoint.manifest import SavedBlock, Shard
from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.placement import (
    CPU_TIME_SHARE,
    CopyInterval,
    CopyTraffic,
    OwnedBlock,
    check_announced,
    copy_interval,
    place,
    slot_bytes_of_nodes,
    traffic_of_nodes,
)
from hetero.elastic.records import Copy, Unit
from hetero.errors import CheckpointError, ConfigError
from tests.helpers.checkpoints import plan_of, state_of


def block(name: str, start: int = 0, size: int = 8, *, num_bytes: int | None = None) -> OwnedBlock:
    return OwnedBlock(name=name, offsets=(start,), shape=(size,), num_bytes=size if num_bytes is None else num_bytes)


def test_what_another_domain_holds_needs_no_network() -> None:
    """Rank 0 owns half of a weight that rank 1 has whole, and moments that nobody else has."""
    owned = [[block("w", 0, 4), block("m", 0, 4)], [block("w", 4, 4), block("m", 4, 4)]]
    placement = place(owned, [[block("w")], [block("w")]], ["x", "y"], ["x", "y"])
    assert [(unit.name, unit.owner, unit.keeper, unit.held, unit.blocks) for unit in placement.units] == [
        ("rank_00000", 0, 1, False, ("m[0:4]",)),
        ("rank_00000.held_00001", 0, 1, True, ("w[0:4]",)),
        ("rank_00001", 1, 0, False, ("m[4:8]",)),
        ("rank_00001.held_00000", 1, 0, True, ("w[4:8]",)),
    ]
    assert traffic_of_nodes(placement, ["x", "y"]) == {
        "x": CopyTraffic(written=12, fetched=4, served=4),
        "y": CopyTraffic(written=12, fetched=4, served=4),
    }
    assert slot_bytes_of_nodes(placement, ["x", "y"]) == {"x": 16, "y": 16}


def test_who_holds_only_a_part_of_a_block_does_not_hold_it() -> None:
    placement = place([[block("w")], []], [[block("w")], [block("w", 0, 7)]], ["x", "y"], ["x", "y"])
    assert [(unit.name, unit.held, unit.num_bytes) for unit in placement.units] == [
        ("rank_00000", False, 8),
        ("rank_00001", False, 0),
    ]


UNIT = Unit(name="rank_00000", owner=0, keeper=1, held=False, blocks=("w[0:8]", "m[0:8]"), num_bytes=64)


def announced(size_bytes: int, *names: str) -> Copy:
    boxes = tuple(SavedBlock(name=name, offsets=(0,), shape=(8,), crc32=0) for name in names)
    shard = Shard(file="rank_00000.safetensors", size_bytes=size_bytes, header_crc32=0, boxes=boxes)
    return Copy(epoch=1, step=2, unit="rank_00000", shard=shard, tensors={}, state=state_of(plan_of(), step=2))


def test_what_a_node_says_of_a_unit_is_checked_against_the_placement() -> None:
    check_announced(announced(64, "m", "w"), UNIT, where="node x")
    check_announced(announced(2**20, "m", "w"), UNIT, where="node x")
    for size_bytes in (63, 2**20 + 2**16, 2**40):
        message = (
            rf"node x: its rank_00000 has {size_bytes:,} bytes, as it says; .* have 64, and a file of them at most"
        )
        with pytest.raises(CheckpointError, match=message):
            check_announced(announced(size_bytes, "m", "w"), UNIT, where="node x")
    for names in (("w",), ("m", "w", "x"), ("m", "x")):
        with pytest.raises(CheckpointError, match="node x: its rank_00000 has other blocks than"):
            check_announced(announced(64, *names), UNIT, where="node x")


def test_nodes_of_one_domain_keep_nothing_for_one_another() -> None:
    domains, nodes = ["rack-1", "rack-1", "rack-2"], ["x", "y", "z"]
    placement = place([[block("a")], [block("b")], [block("c")]], [[block("b")], [], []], domains, nodes)
    assert [(unit.owner, unit.keeper, unit.held) for unit in placement.units] == [
        (0, 2, False),
        (1, 2, False),
        (2, 0, False),
    ]


def test_on_one_domain_there_are_no_keepers() -> None:
    placement = place([[block("a")], [block("b")]], [[block("b")], [block("a")]], ["x", "x"], ["x", "x"])
    assert [(unit.keeper, unit.num_bytes) for unit in placement.units] == [(None, 8), (None, 8)]


def test_holders_share_the_writing() -> None:
    """One rank owns eight blocks that two others hold on two nodes."""
    blocks = [block(str(i)) for i in range(8)]
    placement = place([blocks, [], []], [blocks, blocks, blocks], ["x", "y", "z"], ["x", "y", "z"])
    assert {unit.keeper: unit.num_bytes for unit in placement.units if unit.held} == {1: 32, 2: 32}


def test_nodes_fetch_evenly() -> None:
    """One node with much more state than the other three: each of those fetches a part of it."""
    nodes = ["big"] * 6 + ["a", "b", "c"]
    owned = [[block(f"{rank}", num_bytes=100 if rank < 6 else 60)] for rank in range(9)]
    traffic = traffic_of_nodes(place(owned, [[]] * 9, nodes, nodes), nodes)
    assert {node: each.fetched for node, each in traffic.items()} == {"big": 180, "a": 200, "b": 200, "c": 200}


def test_equal_nodes_keep_in_a_ring() -> None:
    for num_nodes in (2, 3, 4, 7):
        names = [f"node-{i}" for i in range(num_nodes)]
        placement = place([[block(name)] for name in names], [[]] * num_nodes, names, names)
        assert [unit.keeper for unit in placement.units] == [(i + 1) % num_nodes for i in range(num_nodes)]


@pytest.mark.parametrize("seed", range(40))
def test_nodes_fetch_nearly_as_evenly_as_possible(seed: int) -> None:
    """Against all choices, on two to five nodes: the busiest fetches at most half more than it has to."""
    draw = random.Random(seed)
    nodes = [f"node-{i}" for i in range(draw.randint(2, 5))]
    sizes = [draw.choice([1, 5, 30, 100]) * draw.randint(1, 9) for _ in nodes]
    placement = place(
        [[block(name, num_bytes=size)] for name, size in zip(nodes, sizes, strict=True)],
        [[]] * len(nodes),
        nodes,
        nodes,
    )
    busiest = max(each.fetched for each in traffic_of_nodes(placement, nodes).values())
    choices = itertools.product(*([k for k in range(len(nodes)) if k != owner] for owner in range(len(nodes))))
    least = min(
        max(sum(s for s, k in zip(sizes, choice, strict=True) if k == node) for node in range(len(nodes)))
        for choice in choices
    )
    assert least <= busiest <= 1.5 * least


@pytest.mark.parametrize("seed", range(30))
def test_random_states_are_whole_without_any_one_domain(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.randint(1, 9)
    node_of_rank = sorted(draw.choice("uvwxyz") for _ in range(num_ranks))
    domain_of_rank = [{"u": "r", "v": "r"}.get(node, node) for node in node_of_rank]
    edges = sorted({0, 64, *(draw.randrange(64) for _ in range(12))})
    pieces = [block("t", start, end - start) for start, end in pairwise(edges)]
    owned: list[list[OwnedBlock]] = [[] for _ in range(num_ranks)]
    for piece in pieces:
        owned[draw.randrange(num_ranks)].append(piece)
    held = [[each for each in pieces if draw.random() < 0.3] for _ in range(num_ranks)]
    placement = place(owned, held, domain_of_rank, node_of_rank)
    assert placement == place(owned, held, domain_of_rank, node_of_rank)
    names = [unit.name for unit in placement.units]
    assert len(set(names)) == len(names)
    assert {f"rank_{rank:05d}" for rank in range(num_ranks)} <= set(names)
    written = Counter(key for unit in placement.units for key in unit.blocks)
    assert written == Counter(piece.key for piece in pieces)
    sizes = {piece.key: piece.num_bytes for piece in pieces}
    owner_of = {piece.key: rank for rank, blocks in enumerate(owned) for piece in blocks}
    for unit in placement.units:
        assert unit.num_bytes == sum(sizes[key] for key in unit.blocks)
        assert {owner_of[key] for key in unit.blocks} <= {unit.owner}
        if len(set(domain_of_rank)) == 1:
            assert unit.keeper is None
        else:
            assert unit.keeper is not None
            assert domain_of_rank[unit.keeper] != domain_of_rank[unit.owner]
        if unit.held:
            assert unit.keeper is not None
            assert set(unit.blocks) <= {each.key for each in held[unit.keeper]}


def interval(*, step_s: float, every: int | None = None) -> CopyInterval:
    """One node writes 100 bytes at 100 bytes/s, another sends and fetches 60 at 60 bytes/s: at most 2 s a copy."""
    traffic = {"x": CopyTraffic(written=100), "y": CopyTraffic(written=100, fetched=60, served=30)}
    return copy_interval(
        traffic, step_s=step_s, link_bytes_per_s={"x": 1.0, "y": 60.0}, copy_bytes_per_s=100.0, every=every
    )


def test_the_interval_follows_from_the_link_and_the_time_of_a_copy() -> None:
    assert interval(step_s=5.0) == CopyInterval(every=1, steps_at_risk=2, reason="one takes 2 s of a step's 5 s")
    assert (interval(step_s=4.9).every, interval(step_s=1.0).every) == (2, 5)
    assert interval(step_s=1.0).reason == "0 MiB over the network of y may take 20% of it"
    slow = copy_interval(
        {"x": CopyTraffic(written=300)}, step_s=1.0, link_bytes_per_s={"x": 1.0}, copy_bytes_per_s=100.0
    )
    assert slow == CopyInterval(
        every=6, steps_at_risk=9, reason="one takes 3 s, which may be 50% of the time between two"
    )
    beside_computing = copy_interval(
        {"x": CopyTraffic(written=300)},
        step_s=1.0,
        link_bytes_per_s={"x": 1.0},
        copy_bytes_per_s=100.0,
        time_share=CPU_TIME_SHARE,
    )
    assert beside_computing.every == 100


def test_what_a_person_asks_for_is_taken() -> None:
    assert interval(step_s=1.0, every=1) == CopyInterval(every=1, steps_at_risk=4, reason="as asked for")
    with pytest.raises(ConfigError, match="after every 0 steps: must be at least 1"):
        interval(step_s=1.0, every=0)


def test_without_traffic_copies_follow_every_step() -> None:
    assert copy_interval({}, step_s=1.0, link_bytes_per_s={}, copy_bytes_per_s=1.0).every == 1


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("duration", [1, 2, 3, 7])
def test_steps_at_risk_are_what_the_protocol_loses_at_most(every: int, duration: int) -> None:
    """Copies that take so many steps, a rank that dies at any point of a hundred steps."""
    found = copy_interval(
        {"x": CopyTraffic(written=duration)},
        step_s=1.0,
        link_bytes_per_s={"x": 1.0},
        copy_bytes_per_s=1.0,
        every=every,
    )
    rank, worst = CopyProtocol(start_step=0, world_size=1), 0
    for step in range(1, 101):
        if rank.committed:
            worst = max(worst, step - rank.committed)  # dies in this step, before its all-reduce
        rank.decide(rank.vote(rank.pending if rank.pending and step - rank.pending >= duration else None))
        if rank.wants_copy(step, every=every, last=False):
            rank.begin(step)
    assert found.steps_at_risk == worst
