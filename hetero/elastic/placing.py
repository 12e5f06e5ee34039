"""Lets all ranks of an epoch agree on who copies what, and says what of it is one rank's part."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from hetero.checkpoint.manifest import block_key
from hetero.distributed.process_groups import ParallelContext
from hetero.distributed.rank_consensus import on_all_ranks
from hetero.elastic.copy_folder import used_bytes, write_placement
from hetero.elastic.placement import CopyTraffic, OwnedBlock, place, slot_bytes_of_nodes, traffic_of_nodes
from hetero.elastic.records import CopyPlacement, NodeInfo, RankAssignment, Unit
from hetero.errors import CheckpointError
from hetero.runtime.optimizer import Optimizer
from hetero.runtime.sharded_state import TensorSlice
from hetero.serialization import read_text
from hetero.units import MIB

UNKNOWN_LINK_BYTES_PER_S = 1.25e9
"""Where a network interface does not say how fast it is: 10 Gbit/s, an assumption. What is measured may be less."""

_INTERFACES = Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedCopies:
    """Who copies what in an epoch, and one rank's part of it.

    node_of_rank: its node, by rank.
    link_bytes_per_s: of each node's network interface.
    is_first_of_node: of the ranks of its node, this one does what is done once.
    """

    placement: CopyPlacement
    rank: int
    node_of_rank: tuple[NodeInfo, ...]
    link_bytes_per_s: dict[str, float]
    is_first_of_node: bool

    @property
    def traffic(self) -> Mapping[str, CopyTraffic]:
        """What each node moves for every copied step."""
        return traffic_of_nodes(self.placement, [node.name for node in self.node_of_rank])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on this rank's node."""
        return slot_bytes_of_nodes(self.placement, [node.name for node in self.node_of_rank])[self._node]

    @property
    def owned_bytes(self) -> int:
        """Bytes of what the ranks of this rank's node own, which they hold for an upload."""
        return sum(unit.num_bytes for unit in self.placement.units if self.node_of_rank[unit.owner].name == self._node)

    @property
    def fetched(self) -> list[Unit]:
        """The units that this rank fetches from other nodes."""
        return [unit for unit in self.placement.units if unit.keeper == self.rank and not unit.held]

    def written(self, optimizer: Optimizer) -> list[tuple[Unit, list[TensorSlice]]]:
        """The units that this rank writes from its own memory, with their blocks there."""
        units = [
            unit for unit in self.placement.units if unit.owner == self.rank or (unit.keeper == self.rank and unit.held)
        ]
        blocks_of = {owner: _by_key(optimizer.state(owner=owner)) for owner in {unit.owner for unit in units}}
        return [(unit, [blocks_of[unit.owner][key] for key in unit.blocks]) for unit in units]

    @property
    def _node(self) -> str:
        return self.node_of_rank[self.rank].name


def place_copies(assignment: RankAssignment, context: ParallelContext, optimizer: Optimizer) -> PlacedCopies:
    """Agree on who copies what, and begin the epoch's folder on every node; collective over the world.

    Raises:
        CheckpointError: the folder has no room for two copies, or cannot be written; on every rank.
    """
    epoch = assignment.epoch
    nodes = {rank: each.node for each in epoch.nodes for rank in each.ranks}
    node_of_rank = tuple(nodes[rank] for rank in range(context.plan.world_size))
    names = [node.name for node in node_of_rank]
    own = (
        _blocks(optimizer.state(owner=context.rank)),
        _blocks(optimizer.state(owner=None)),
        link_bytes_per_s(node_of_rank[context.rank].host),
    )
    every = [own] * context.plan.world_size
    dist.all_gather_object(every, own)
    placed = PlacedCopies(
        placement=place(
            [owned for owned, _, _ in every],
            [held for _, held, _ in every],
            domain_of_rank=epoch.domain_of_rank(),
            node_of_rank=names,
        ),
        rank=context.rank,
        node_of_rank=node_of_rank,
        link_bytes_per_s={name: rate for name, (_, _, rate) in zip(names, every, strict=True)},
        is_first_of_node=names.index(names[context.rank]) == context.rank,
    )
    on_all_ranks(lambda: _begin_epoch(assignment, placed))
    return placed


def _begin_epoch(assignment: RankAssignment, placed: PlacedCopies) -> None:
    """On one rank of each node: look whether there is room, and make the folder of the epoch.

    Raises:
        CheckpointError: there is no room, or the folder cannot be written.
    """
    if not placed.is_first_of_node:
        return
    folder, number = Path(assignment.folder), assignment.epoch.number
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        # What this epoch went on from stays until its first copy is committed, and fills a slot's room until then.
        old = used_bytes(folder, before_epoch=number)
        slot = placed.slot_bytes
        held = placed.owned_bytes if assignment.uploads is not None else 0
        if free < slot or free + old < 2 * slot + held:
            upload = f", and the one that is uploaded {held / MIB:,.0f} MiB" if held else ""
            raise CheckpointError(
                f"{folder} on node {assignment.node}: copies of two steps take {2 * slot / MIB:,.0f} MiB there"
                f"{upload}, and "
                f"{(free + old) / MIB:,.0f} MiB are free, {old / MIB:,.0f} MiB of them only when the copies that this "
                "run goes on from are not needed any more; give the agent a larger folder (--copies), be it on a disk, "
                "or the node more memory. Fewer copies (--hetero-elastic-copy-every) take as much room"
            )
        write_placement(folder, number, placed.placement, epoch_id=assignment.epoch.id)
    except OSError as error:
        raise CheckpointError(
            f"{folder} on node {assignment.node}: cannot hold copies: {error.strerror}; give the agent a folder that "
            "is there and can be written (--copies)"
        ) from None


def link_bytes_per_s(host: str) -> float:
    """How fast the network of this node is in one direction.

    Heuristic: its fastest interface that is up and says how fast it is, as the one that leads to ``host`` would.
    """
    if host.startswith("127.") or host in ("localhost", "::1"):
        return UNKNOWN_LINK_BYTES_PER_S
    fastest = 0
    for path in _INTERFACES.glob("*/speed"):
        try:
            fastest = max(fastest, int(read_text(path)))
        except ValueError:
            continue
    return fastest * 1e6 / 8 if fastest else UNKNOWN_LINK_BYTES_PER_S


def _blocks(slices: Sequence[TensorSlice]) -> list[OwnedBlock]:
    return [
        OwnedBlock(name=each.name, offsets=each.offsets, shape=tuple(each.tensor.shape), num_bytes=each.tensor.nbytes)
        for each in slices
    ]


def _by_key(slices: Sequence[TensorSlice]) -> dict[str, TensorSlice]:
    return {block_key(each.name, each.offsets, each.tensor.shape): each for each in slices}
