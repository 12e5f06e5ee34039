"""Decides who has the second copy of whose state, and after every how many steps copies are made.

Each element of the state has one owner. Its second copy has to be on another failure domain:

held     a rank there has the same values after the update, as the replicas of a weight have, and writes the same unit
         from its own memory: no network
fetched  nobody there has: a keeper fetches the owner's file. Keepers are chosen so that nodes fetch evenly

so an owner has one unit of what is fetched, and one for each rank that holds parts of what it owns.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetero.checkpoint.manifest import block_key
from hetero.checkpoint.shard_files import MAX_RANK_STATE_BYTES, max_header_bytes
from hetero.elastic.records import Copy, CopyPlacement, Unit
from hetero.errors import CheckpointError, ConfigError
from hetero.units import MIB

LINK_SHARE = 0.2
"""The part of a node's network interface that copies may take on average; the rest is training's."""

TIME_SHARE = 0.5
"""The part of the time between two copies that making one may take while a device computes, as an estimate."""

CPU_TIME_SHARE = 0.03
"""The same where the processor that copies also computes: what copies take, training waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedBlock:
    """A block of a tensor of the training state that a rank owns, or holds the same values of.

    name: kind and canonical name, as in :class:`hetero.runtime.sharded_state.TensorSlice`.
    num_bytes: of its values.
    """

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def key(self) -> str:
        """As :func:`hetero.checkpoint.manifest.block_key` writes it."""
        return block_key(self.name, self.offsets, self.shape)

    def is_inside(self, other: "OwnedBlock") -> bool:
        """Whether ``other`` has all elements of this block."""
        return self.name == other.name and all(
            start <= offset and offset + size <= start + length
            for offset, size, start, length in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True)
        )


def place(
    owned: Sequence[Sequence[OwnedBlock]],
    held: Sequence[Sequence[OwnedBlock]],
    domain_of_rank: Sequence[str],
    node_of_rank: Sequence[str],
) -> CopyPlacement:
    """Cut what every rank owns into units, and give each a keeper on another failure domain.

    Every rank owns one unit ``rank_00003`` that is fetched, be it empty: it has the rank's own state as well. What
    rank 7 holds of it is ``rank_00003.held_00007``. On one failure domain alone there are no keepers.

    Heuristics: of the ranks that hold a block, the one whose node writes the fewest such bytes so far writes it.
    Keepers are given to owners in descending order of bytes, each on the node that fetches the fewest so far, twice.

    Args:
        owned: for every rank its blocks; those of all ranks tile the state.
        held: for every rank the blocks whose values it has after the update, equal bit by bit to the owner's; its own
            may be among them.
        domain_of_rank, node_of_rank: names; a node lies in one domain.
    """
    chosen = _holders(owned, held, domain_of_rank, node_of_rank)
    fetched = [
        [block for block, holder in zip(blocks, holders, strict=True) if holder is None]
        for blocks, holders in zip(owned, chosen, strict=True)
    ]
    keepers = _keepers([_bytes_of(blocks) for blocks in fetched], domain_of_rank, node_of_rank)
    units = []
    for owner, blocks in enumerate(owned):
        units.append(_unit(f"rank_{owner:05d}", owner, keepers[owner], fetched[owner], held=False))
        for keeper in sorted({holder for holder in chosen[owner] if holder is not None}):
            part = [block for block, holder in zip(blocks, chosen[owner], strict=True) if holder == keeper]
            units.append(_unit(f"rank_{owner:05d}.held_{keeper:05d}", owner, keeper, part, held=True))
    return CopyPlacement(units=tuple(units))


def check_announced(copy: Copy, unit: Unit, *, where: str) -> None:
    """Check what another node says of a unit against the placement, before any memory is taken for it.

    Args:
        where: names the node, for the message.

    Raises:
        CheckpointError: it is of other blocks, or larger than they can be.
    """
    if {block.key for block in copy.shard.boxes} != set(unit.blocks):
        raise CheckpointError(f"{where}: its {unit.name} has other blocks than those that its rank owns")
    tensors = len(copy.shard.boxes) + len(copy.shard.rank_state)
    most = unit.num_bytes + max_header_bytes(tensors) + MAX_RANK_STATE_BYTES
    if not unit.num_bytes <= copy.shard.size_bytes <= most:
        raise CheckpointError(
            f"{where}: its {unit.name} has {copy.shard.size_bytes:,} bytes, as it says; the blocks that its rank owns "
            f"have {unit.num_bytes:,}, and a file of them at most {most:,}"
        )


def _unit(name: str, owner: int, keeper: int | None, blocks: Sequence[OwnedBlock], *, held: bool) -> Unit:
    keys = tuple(block.key for block in blocks)
    return Unit(name=name, owner=owner, keeper=keeper, held=held, blocks=keys, num_bytes=_bytes_of(blocks))


def _bytes_of(blocks: Iterable[OwnedBlock]) -> int:
    return sum(block.num_bytes for block in blocks)


def _holders(
    owned: Sequence[Sequence[OwnedBlock]],
    held: Sequence[Sequence[OwnedBlock]],
    domain_of_rank: Sequence[str],
    node_of_rank: Sequence[str],
) -> list[list[int | None]]:
    """For every block of every rank who holds it on another domain and is to write it, ``None`` where nobody does."""
    by_name: dict[str, list[tuple[int, OwnedBlock]]] = defaultdict(list)
    for rank, blocks in enumerate(held):
        for block in blocks:
            by_name[block.name].append((rank, block))
    written: dict[str, int] = defaultdict(int)
    written_by: dict[int, int] = defaultdict(int)
    chosen: list[list[int | None]] = []
    for owner, blocks in enumerate(owned):
        chosen.append([])
        for block in blocks:
            able = [
                rank
                for rank, other in by_name[block.name]
                if domain_of_rank[rank] != domain_of_rank[owner] and block.is_inside(other)
            ]
            holder = min(able, key=lambda rank: (written[node_of_rank[rank]], written_by[rank], rank), default=None)
            if holder is not None:
                written[node_of_rank[holder]] += block.num_bytes
                written_by[holder] += block.num_bytes
            chosen[owner].append(holder)
    return chosen


def _keepers(num_bytes: Sequence[int], domain_of_rank: Sequence[str], node_of_rank: Sequence[str]) -> list[int | None]:
    """For every rank who fetches its unit, ``None`` where there is one domain alone.

    Of ranks that fetch equally little the next one after the owner does, so that equal nodes keep in a ring. As the
    largest owners may have taken each other, owners are then gone through once more, each to the node that has the
    fewest bytes without it.
    """
    num_ranks = len(num_bytes)
    fetches = dict.fromkeys(node_of_rank, 0)
    fetched_by = [0] * num_ranks
    keepers: list[int | None] = [None] * num_ranks

    def move(owner: int, keeper: int, sign: int) -> None:
        fetches[node_of_rank[keeper]] += sign * num_bytes[owner]
        fetched_by[keeper] += sign * num_bytes[owner]

    for owner in sorted(range(num_ranks), key=lambda rank: (-num_bytes[rank], rank)) * 2:
        before = keepers[owner]
        if before is not None:
            move(owner, before, -1)
        elsewhere = [rank for rank in range(num_ranks) if domain_of_rank[rank] != domain_of_rank[owner]]
        keeper = min(
            elsewhere,
            key=lambda rank: (fetches[node_of_rank[rank]], fetched_by[rank], (rank - owner) % num_ranks),
            default=None,
        )
        if keeper is not None:
            move(owner, keeper, 1)
        keepers[owner] = keeper
    return keepers


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTraffic:
    """Bytes that one node moves for each copied step.

    written: of its ranks' memory into slots, as owners and as holders.
    fetched, served: over its network interface, in and out.
    """

    written: int = 0
    fetched: int = 0
    served: int = 0


def traffic_of_nodes(placement: CopyPlacement, node_of_rank: Sequence[str]) -> dict[str, CopyTraffic]:
    """What each node moves for every step that is copied."""
    written, fetched, served = (dict.fromkeys(node_of_rank, 0) for _ in range(3))
    for unit in placement.units:
        written[node_of_rank[unit.owner]] += unit.num_bytes
        if unit.keeper is not None and unit.held:
            written[node_of_rank[unit.keeper]] += unit.num_bytes
        elif unit.keeper is not None:
            fetched[node_of_rank[unit.keeper]] += unit.num_bytes
            served[node_of_rank[unit.owner]] += unit.num_bytes
    return {node: CopyTraffic(written=written[node], fetched=fetched[node], served=served[node]) for node in written}


def slot_bytes_of_nodes(placement: CopyPlacement, node_of_rank: Sequence[str]) -> dict[str, int]:
    """Bytes of one slot on each node: all units that its ranks own or keep. A node needs memory for two slots."""
    return {node: each.written + each.fetched for node, each in traffic_of_nodes(placement, node_of_rank).items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyInterval:
    """After every how many steps copies are made.

    every: steps from one copy to the next.
    steps_at_risk: how many steps are done again at most after the loss of one failure domain, the one in hand included.
    reason: what made the interval this long, for people.
    """

    every: int
    steps_at_risk: int
    reason: str


def copy_interval(
    traffic: Mapping[str, CopyTraffic],
    *,
    step_s: float,
    link_bytes_per_s: Mapping[str, float],
    copy_bytes_per_s: float,
    time_share: float = TIME_SHARE,
    every: int | None = None,
) -> CopyInterval:
    """The shortest interval at which copies stay beside training.

    Averaged over the interval, copies take at most a fifth of any node's network interface in either direction, and
    writing and fetching one takes at most ``time_share`` of the time. Heuristic: writing and fetching are taken one
    after the other, as files are fetched when they are written.

    A copy that takes d steps is committed in the all-reduce of the d-th step after its own, and the next begins
    then or after the interval. Just before that one is committed max(every, d) + d steps are at risk.

    Args:
        traffic: what each node moves per copied step.
        step_s: seconds of a step.
        link_bytes_per_s: of each node's network interface, in one direction.
        copy_bytes_per_s: at which a node's ranks together write to its memory.
        time_share: :data:`TIME_SHARE` or :data:`CPU_TIME_SHARE`.
        every: what a person asked for, ``None`` to choose; it is not made longer.

    Raises:
        ConfigError: ``every`` is less than one.
    """
    if every is not None and every < 1:
        raise ConfigError(f"copies after every {every} steps: must be at least 1")
    over_link = {node: max(each.fetched, each.served) / link_bytes_per_s[node] for node, each in traffic.items()}
    writing = {node: each.written / copy_bytes_per_s for node, each in traffic.items()}
    copy_s = max((writing[node] + over_link[node] for node in traffic), default=0.0)
    busiest = max(over_link, key=lambda node: over_link[node], default="")
    for_link = math.ceil(over_link.get(busiest, 0.0) / (LINK_SHARE * step_s))
    for_time = math.ceil(copy_s / (time_share * step_s))
    moved = traffic.get(busiest, CopyTraffic())
    if every is not None:
        reason = "as asked for"
    elif max(for_link, for_time) <= 1:
        reason = f"one takes {copy_s:.3g} s of a step's {step_s:.3g} s"
    elif for_link >= for_time:
        mib = max(moved.fetched, moved.served) / MIB
        reason = f"{mib:.0f} MiB over the network of {busiest} may take {LINK_SHARE:z.0%} of it"
    else:
        reason = f"one takes {copy_s:.3g} s, which may be {time_share:z.0%} of the time between two"
    chosen = every or max(for_link, for_time, 1)
    duration = max(1, math.ceil(copy_s / step_s))
    return CopyInterval(every=chosen, steps_at_risk=max(chosen, duration) + duration, reason=reason)
