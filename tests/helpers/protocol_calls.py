"""Asks the protocol's real functions, with arguments made from an explored state, and remembers what they said."""

import dataclasses
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.leadership import LeaderSettings, MakeEpoch, Move, NodeView, View, next_move
from hetero.elastic.placement import OwnedBlock, place
from hetero.elastic.records import Epoch, HeldStep, Inventory, RestorePoint
from hetero.elastic.recovery import Restore
from tests.helpers.elastic_epochs import epoch_of
from tests.helpers.protocol_state import Held, Node, Rules, Shared, State, info


@dataclass(kw_only=True)
class ProtocolCalls:
    """The functions of the protocol on states of these nodes, and the records of the epochs that were decided on."""

    nodes: int = 3
    steps: int = 4
    failures: int = 2
    returns: int = 1
    every: int = 1
    reduced: bool = True
    forgets: bool | None = None
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.records: list[Epoch | None] = [None]
        self.index: dict[Any, int] = {}
        self.units: dict[int, list[tuple[int, int | None]]] = {}
        self.checked: set[Any] = set()
        self.moves_of: dict[Any, Move] = {}
        self.kept: dict[Any, tuple[frozenset[Held], ...]] = {}
        self.decided: set[Any] = set()
        if self.forgets is None:
            self.forgets = self.reduced and self.rules == Rules()
        self.step = lru_cache(maxsize=None)(self._protocol_step)
        self.settings = LeaderSettings(first_settle_s=0.0, settle_s=0.0, dwell_s=0.0, missing_s=1e9, answer_s=1e9)

    # Ranks.

    def _protocol_step(self, known: tuple[Any, ...], call: str, *args: Any) -> tuple[tuple[Any, ...], Any]:
        protocol = self.rules.protocol(start_step=0, world_size=1)
        vars(protocol).update({name: list(v) if isinstance(v, tuple) else v for name, v in known})
        named = {"wants_copy": {"every": self.every, "last": args[-1]}, "vote": {"failed": args[-1]}}.get(call, {})
        result = getattr(protocol, call)(args[0], **named)
        return snapshot(protocol), result

    # Records of epochs.

    def members(self, index: int) -> dict[int, int]:
        """By node its rank in an epoch."""
        record = self.records[index]
        return {} if record is None else {int(each.node.name): each.ranks[0] for each in record.nodes}

    def number(self, index: int) -> int:
        record = self.records[index]
        return 0 if record is None else record.number

    def lineage(self, index: int) -> dict[int, RestorePoint]:
        record = self.records[index]
        return {} if record is None else record.lineage

    def units_of(self, index: int) -> list[tuple[int, int | None]]:
        """Of every unit of an epoch its owner and its keeper, by node."""
        if index not in self.units:
            members = list(self.members(index))
            names = [str(node) for node in members]
            owned = [[OwnedBlock(name=name, offsets=(0,), shape=(1,), num_bytes=8)] for name in names]
            placed = place(owned, [[]] * len(names), names, names)
            self.units[index] = [
                (members[unit.owner], None if unit.keeper is None else members[unit.keeper]) for unit in placed.units
            ]
        return self.units[index]

    def record(self, state: State, move: MakeEpoch, restore: Restore) -> int:
        """The index of this epoch's record."""
        infos = [info(int(name), state.nodes[int(name)]) for name in move.nodes]
        number = self.number(state.shared.epoch) + 1
        sources = tuple(sorted(restore.sources.items()))
        key = (
            state.shared.epoch,
            tuple(each.incarnation + each.name for each in infos),
            restore.start,
            sources,
            move.failures,
        )
        made = epoch_of(
            infos,
            number=number,
            start=restore.start,
            lineage=self.lineage(state.shared.epoch),
            sources=restore.sources,
            failures=move.failures,
        )
        return self.index_of(key, made)

    def plain(self, index: int) -> int:
        """The index of the same record without sources."""
        record = self.records[index]
        if record is None or not record.sources:
            return index
        key = (record.number, record.nodes, tuple(record.lineage.items()), record.failures)
        return self.index_of(key, dataclasses.replace(record, sources={}))

    def index_of(self, key: Any, record: Epoch) -> int:
        if key not in self.index:
            self.index[key] = len(self.records)
            self.records.append(record)
        return self.index[key]

    # Recovery.

    def inventory(self, name: int, held: frozenset[Held]) -> Inventory:
        steps: dict[tuple[int, int], set[str]] = {}
        units: dict[int, frozenset[str]] = {}
        for each in held:
            steps.setdefault((self.number(each.epoch), each.step), set()).add(str(each.owner))
            units[self.number(each.epoch)] = frozenset(str(owner) for owner, _ in self.units_of(each.epoch))
        found = tuple(HeldStep(epoch=e, step=s, units=frozenset(u)) for (e, s), u in sorted(steps.items()))
        return Inventory(node=str(name), steps=found, units_of_epoch=units)

    # The leader.

    def leaders_move(self, state: State) -> Move:
        shared = state.shared
        key = (
            shared.epoch,
            shared.broken,
            shared.stop,
            shared.leader,
            len(shared.committed),
            tuple(map(self.seen, state.nodes)),
        )
        if key not in self.moves_of:
            views = {
                str(i): NodeView(
                    info=info(i, node), since_s=0.0, answered=self.answered(state, i), phase=self.phase(shared, node)
                )
                for i, node in enumerate(state.nodes)
                if node.leased
            }
            view = View(
                leader=str(shared.leader),
                epoch=self.records[shared.epoch],
                nodes=views,
                started_s=0.0,
                over_since_s=0.0,
                broken="lost" if shared.broken else None,
                stop_requested="asked" if shared.stop else None,
                committed=len(shared.committed),
                step_s=1.0 / max(1, len(self.members(shared.epoch))),
            )
            self.moves_of[key] = next_move(
                view, 100.0, self.settings, lambda nodes: 1.0 / len(nodes) if nodes else None
            )
        return self.moves_of[key]

    def seen(self, node: Node) -> Any:
        rank = node.rank
        return node.leased and (node.incarnation, node.fence, rank and (rank.epoch, rank.status))

    def phase(self, shared: Shared, node: Node) -> Any:
        rank = node.rank
        if rank is None or rank.epoch != shared.epoch:
            return None
        return rank.status if rank.status in ("stopped", "finished") else "step"

    def answered(self, state: State, i: int) -> bool:
        """Asked when the epoch is over, and before a node joins."""
        node, shared = state.nodes[i], state.shared
        record = self.records[shared.epoch]
        if not self.rules.fences or record is None:
            return True
        return (
            node.fence >= record.number
            or all(each.node != info(i, node) for each in record.nodes)
            or self.phase(shared, node) in ("stopped", "finished")
        )


def snapshot(protocol: CopyProtocol) -> tuple[Any, ...]:
    return tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in vars(protocol).items()))
