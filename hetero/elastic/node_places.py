"""Which present node takes which place of a new plan, so that the fewest bytes move (local-first, as arXiv 2512.20953).

A place is the ranks of one node of the cluster that was planned for. Nodes of one type may take any place of that type;
a node that has the copies of the layers of a place reads them from its own memory, and any other one fetches them.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero.checkpoint.manifest import Region, overlap
from hetero.elastic.planning_problem import NodeCounts, PlanningProblem
from hetero.elastic.records import EpochNode, NodeInfo
from hetero.errors import CheckpointError
from hetero.plan.gradient_groups import Bucket, gradient_buckets
from hetero.plan.ir import Plan
from hetero.plan.sub_blocks import sub_blocks_of
from hetero.planner.node_assignment import cheapest_places
from hetero.units import BYTES_OF_PRECISION

HeldBlocks = Mapping[str, Iterable[str]]
"""By name of a node, the keys of the blocks that it has copies of (:func:`hetero.checkpoint.manifest.block_key`)."""

_KEY = re.compile(r"(?P<name>.+)\[(?P<edges>\d+:\d+(,\d+:\d+)*)\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedNodes:
    """The nodes of an epoch in the order of their ranks.

    moved_bytes: that ranks will read from another node or from the object store.
    """

    nodes: tuple[EpochNode, ...]
    moved_bytes: int


def place_nodes(plan: Plan, problem: PlanningProblem, nodes: Sequence[NodeInfo], held: HeldBlocks) -> PlacedNodes:
    """Give each of ``nodes`` its place in ``plan``, which is for exactly these.

    Where nothing decides, nodes keep the order of their names.
    """
    types = [node_type for node_type in problem.cluster.node_types if any(n.node_type == node_type.name for n in nodes)]
    of_type = {
        each.name: sorted((node for node in nodes if node.node_type == each.name), key=lambda node: node.name)
        for each in types
    }
    places = [
        (node_type, ranks)
        for node_type in of_type
        for ranks in places_of(problem, {name: len(them) for name, them in of_type.items()})[node_type]
    ]
    known = _Holders({node.name: held.get(node.name, ()) for node in nodes})
    place_of_rank = {rank: p for p, (_, ranks) in enumerate(places) for rank in ranks}
    needs = [0] * len(places)
    present = [dict.fromkeys(known.nodes, 0) for _ in places]
    for ranks, name, region, item_bytes in _needed(plan, problem.runtime.bucket_numel):
        at_hand = known.elements_of(name, region)
        for rank in ranks:
            place = place_of_rank[rank]
            needs[place] += math.prod(region.shape) * item_bytes
            for node, count in at_hand.items():
                present[place][node] += count * item_bytes
    placed: list[EpochNode] = []
    moved_bytes = 0
    for node_type, candidates in of_type.items():
        own = [p for p, (name, _) in enumerate(places) if name == node_type]
        missing = [[max(0, needs[p] - present[p][node.name]) for p in own] for node in candidates]
        chosen = cheapest_places(missing)
        moved_bytes += sum(missing[i][place] for i, place in enumerate(chosen))
        node_at = {place: candidates[i] for i, place in enumerate(chosen)}
        placed += [EpochNode(node=node_at[i], ranks=places[p][1]) for i, p in enumerate(own)]
    return PlacedNodes(nodes=tuple(placed), moved_bytes=moved_bytes)


def places_of(problem: PlanningProblem, counts: NodeCounts) -> dict[str, list[tuple[int, ...]]]:
    """By node type, the ranks of each of its places in a plan for ``counts``, in ascending order."""
    found: dict[str, list[tuple[int, ...]]] = {}
    first = 0
    for node_type in problem.cluster.node_types:
        for _ in range(counts.get(node_type.name, 0)):
            ranks = tuple(range(first, first + node_type.gpus_per_node))
            found.setdefault(node_type.name, []).append(ranks)
            first += node_type.gpus_per_node
    return found


class _Holders:
    """Finds which node has how much of a block."""

    def __init__(self, held: HeldBlocks) -> None:
        self.nodes = tuple(held)
        self._blocks: dict[str, list[tuple[Region, str]]] = {}
        for node, keys in held.items():
            for key in keys:
                name, region = _block_of(key)
                self._blocks.setdefault(name, []).append((region, node))

    def elements_of(self, name: str, region: Region) -> dict[str, int]:
        """By node, the elements of ``region`` of tensor ``name`` that it has."""
        found: dict[str, int] = {}
        for block, node in self._blocks.get(name, ()):
            if (edges := overlap(block, region)) is not None:
                found[node] = found.get(node, 0) + math.prod(end - start for start, end in edges)
        return found


def _block_of(key: str) -> tuple[str, Region]:
    """The tensor and the edges of a block by its key.

    Raises:
        CheckpointError: it is no key of a block.
    """
    if (found := _KEY.fullmatch(key)) is None:
        raise CheckpointError(f"{key!r} is not the key of a block, such as exp_avg/output_layer.weight[0:32,0:16]")
    edges = [tuple(map(int, each.split(":"))) for each in found["edges"].split(",")]
    shape = tuple(end - start for start, end in edges)
    return found["name"], Region(offsets=tuple(start for start, _ in edges), shape=shape)


def _needed(plan: Plan, bucket_numel: int) -> Iterator[tuple[tuple[int, ...], str, Region, int]]:
    """What ranks load at the start of an epoch: ranks, tensor, block and bytes of an element.

    All weights of their stages; of master weights and moments what they update.
    """
    weight_bytes = BYTES_OF_PRECISION[plan.precision]
    state_bytes = max(weight_bytes, BYTES_OF_PRECISION["fp32"])
    kinds = ["exp_avg", "exp_avg_sq", *(["master"] if weight_bytes < state_bytes else [])]
    for bucket in gradient_buckets(plan, bucket_numel=plan.gradient_sync.bucket_numel or bucket_numel):
        everything = list(_blocks_of(bucket, slice(0, bucket.length)))
        for parameter, region in everything:
            yield bucket.ranks, f"weights/{parameter}", region, weight_bytes
        # Without a distributed optimizer each rank updates the whole bucket.
        updated = (
            [((rank,), list(_blocks_of(bucket, bucket.shard_of(rank)))) for rank in bucket.ranks]
            if plan.distributed_optimizer
            else [(bucket.ranks, everything)]
        )
        for ranks, blocks in updated:
            for parameter, region in blocks:
                for kind in kinds:
                    yield ranks, f"{kind}/{parameter}", region, state_bytes


def _blocks_of(bucket: Bucket, within: slice) -> Iterator[tuple[str, Region]]:
    """The blocks of parameters that lie in a part of the bucket."""
    for segment, offset in zip(bucket.segments, bucket.offsets, strict=False):
        start, end = max(0, within.start - offset), min(segment.numel, within.stop - offset)
        if start < end:
            for block in sub_blocks_of(segment, start=start, end=end):
                yield segment.parameter.name, Region(offsets=block.offsets, shape=block.shape)
