"""Asks the protocol's real functions, with arguments made from an explored state, and remembers what they said."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.leadership import LackOfStep, LeaderSettings, MakeEpoch, Move, NodeView, View, next_move
from hetero.elastic.placement import OwnedBlock, place
from hetero.elastic.records import Ancestry, Epoch, HeldStep, Inventory, NodeMemory, RestorePoint, RunFlags
from hetero.elastic.recovery import INITIAL_WEIGHTS, History, Restore, choose_history
from tests.helpers.elastic_epochs import epoch_of
from tests.helpers.protocol_state import Held, Node, Rules, Shared, State, info

Left = tuple[int, frozenset[Held], int, bool]
"""Of a node that is there: its number, its copies, the epoch that it remembers, and whether it has seen a commit."""


_SAVES = RunFlags(save="saved")


class _AnyName(str):
    """An id that is equal to every other one."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


@dataclass(kw_only=True)
class ProtocolCalls:
    """The functions of the protocol on states of these nodes, and the records of the epochs that were decided on."""

    nodes: int = 3
    steps: int = 4
    failures: int = 2
    returns: int = 1
    rewinds: int = 0
    refusals: int = 0
    reopens: int = 0
    leaves: int = 0
    min_nodes: int = 1
    every: int = 1
    reduced: bool = True
    forgets: bool | None = None
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        self.records: list[Epoch | None] = [None]
        self.index: dict[Any, int] = {}
        self.names: dict[Any, str] = {}
        self.after_commit: set[int] = set()
        self.index_of_name = {"": 0}
        self.units: dict[int, list[tuple[int, int | None]]] = {}
        self.checked: set[Any] = set()
        self.moves_of: dict[Any, Move] = {}
        self.kept: dict[Any, tuple[frozenset[Held], ...]] = {}
        self.decided: set[Any] = set()
        if self.forgets is None:
            self.forgets = self.reduced and self.rules == Rules()
        self.step = lru_cache(maxsize=None)(self._protocol_step)
        self.settings = LeaderSettings(
            min_nodes=self.min_nodes, first_settle_s=0.0, settle_s=0.0, dwell_s=0.0, missing_s=1e6, answer_s=1e9
        )

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

    def ancestry(self, index: int) -> Ancestry:
        record = self.records[index]
        return Ancestry() if record is None else record.ancestry

    def start(self, index: int) -> RestorePoint:
        """Where an epoch starts."""
        record = self.records[index]
        return INITIAL_WEIGHTS if record is None else record.start

    def name(self, index: int) -> str:
        """The id of an epoch."""
        return self.ancestry(index).id

    def remembered(self, seen: int, epoch: int, *, takes_part: bool = False) -> int:
        """Which epoch a node remembers that sees another one, as an index without sources."""
        if not self.rewinds:
            return 0
        replaces = self.ancestry(epoch).replaces(self.ancestry(seen), takes_part=takes_part)
        return self.plain(epoch) if replaces else seen

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

    def record(self, state: State, move: MakeEpoch, found: History, left: Sequence[Left]) -> int:
        """The index of this epoch's record."""
        assert found.restore is not None
        infos = [info(int(name), state.nodes[int(name)]) for name in move.nodes]
        known = [state.shared.epoch]
        if self.rules.numbers_by_nodes:
            known += [seen for _, _, seen, _ in left]
        number = max([found.newest.number, *map(self.number, known)]) + 1
        if not self.rules.numbers_by_nodes:
            number = self.number(state.shared.epoch) + 1
        key = (
            state.shared.epoch,
            found.newest.id,
            number,
            tuple(each.incarnation + each.name for each in infos),
            found.restore.start,
            tuple(sorted(found.restore.sources.items())),
            move.failures,
            found.committed != 0,
        )
        made = epoch_of(
            infos,
            number=number,
            start=found.restore.start,
            before=found.newest,
            name=self.names.setdefault(key, str(len(self.names) + 1)),
            sources=found.restore.sources,
            failures=move.failures,
        )
        index = self.index_of(key, made)
        if found.committed != 0:
            # The leader writes this with the epoch, for a store that does not know it.
            self.after_commit.add(index)
        return index

    def plain(self, index: int) -> int:
        """The index of the same record without sources."""
        record = self.records[index]
        if record is None or not record.sources:
            return index
        key = (record.id, record.nodes, tuple(record.lineage.items()), record.failures)
        return self.index_of(key, dataclasses.replace(record, sources={}))

    def index_of(self, key: Any, record: Epoch) -> int:
        if key not in self.index:
            self.index[key] = len(self.records)
            self.records.append(record)
            self.index_of_name.setdefault(record.id, self.index[key])
        return self.index[key]

    # Recovery.

    def inventory(self, name: int, held: frozenset[Held], seen: int, has_committed: bool) -> Inventory:
        steps: dict[tuple[int, int], set[str]] = {}
        units: dict[int, frozenset[str]] = {}
        ids: dict[int, str] = {}
        for each in held:
            number = self.number(each.epoch)
            steps.setdefault((number, each.step), set()).add(str(each.owner))
            units[number] = frozenset(str(owner) for owner, _ in self.units_of(each.epoch))
            ids[number] = self.name(each.epoch) if self.rules.tells_apart else _AnyName()
        return Inventory(
            node=str(name),
            steps=tuple(HeldStep(epoch=e, step=s, units=frozenset(u)) for (e, s), u in sorted(steps.items())),
            units_of_epoch=units,
            id_of_epoch=ids,
            memory=NodeMemory(newest=self.ancestry(seen), has_committed=has_committed and self.rules.doubts_commits)
            if self.rules.remembers
            else NodeMemory(),
        )

    def find(self, left: Sequence[Left], shared: Shared) -> History:
        """What a leader finds to go on from among these nodes."""
        return choose_history(
            [self.inventory(*each) for each in left],
            in_store=self.ancestry(shared.epoch),
            noted=int(shared.noted),
            choose=self.rules.choose if self.rules.doubts_commits else self._trusting(shared),
        )

    def _trusting(self, shared: Shared) -> Callable[..., Restore | None]:
        def choose(inventories: Sequence[Inventory], *, committed: int | None, **others: Any) -> Restore | None:
            return self.rules.choose(inventories, committed=committed or 0, **others)

        return choose

    # The leader.

    def leaders_move(self, state: State, *, no_step: bool = False, is_late: bool = False) -> Move:
        """What the leader does; ``is_late``: once it has waited for as long as it does."""
        shared = state.shared
        key = (
            no_step,
            is_late,
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
                    info=info(i, node),
                    since_s=0.0,
                    answered=self.answered(state, i),
                    phase=self.phase(shared, node),
                    leaves_by_s=math.inf if node.leaves else None,
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
                is_stop_for_good=shared.stop == "for good",
                run=_SAVES,
                committed=len(shared.committed),
                step_s=1.0 / max(1, len(self.members(shared.epoch))),
                no_step=LackOfStep(reason="no step is whole", exit_code=1) if no_step else None,
            )
            self.moves_of[key] = next_move(
                view, 1e7 if is_late else 100.0, self.settings, lambda nodes: 1.0 / len(nodes) if nodes else None
            )
        return self.moves_of[key]

    def seen(self, node: Node) -> Any:
        rank = node.rank
        return node.leased and (node.incarnation, node.fence, node.leaves, rank and (rank.epoch, rank.status))

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
