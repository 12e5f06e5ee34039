"""Ways in which the protocol could be wrong. Exploration and campaign have to find each."""

from collections.abc import Mapping, Sequence
from typing import Any

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.records import Inventory, RestorePoint
from hetero.elastic.recovery import Restore, choose_step
from tests.helpers.protocol_state import Rules


class OverwritesCommitted(CopyProtocol):
    """Begins in the slot of the newest committed copy."""

    def begin(self, step: int) -> int:
        slot = self._slots.index(self.committed) if self.committed in self._slots else 0
        self._slots[slot], self.pending = step, step
        return slot


class CommitsByMajority(CopyProtocol):
    """Takes all votes but one for all."""

    def decide(self, votes: float) -> int | None:
        return super().decide(votes + 1.0 if votes >= 1.0 and votes < self._world_size else votes)


class OneSlot(CopyProtocol):
    """Has a single slot."""

    def begin(self, step: int) -> int:
        self._slots[0] = self.pending = step
        return 0


class NeverGivesUp(CopyProtocol):
    """Waits for ever for a copy that cannot become whole."""

    def vote(self, whole_step: int | None, *, failed: bool = False) -> float:
        return super().vote(whole_step, failed=False)


def ignores_lineage(
    inventories: Sequence[Inventory], *, lineage: Mapping[int, RestorePoint], **others: Any
) -> Restore | None:
    """Takes the newest whole step, whichever history it belongs to."""
    epochs = {each.epoch for inventory in inventories for each in inventory.steps} | lineage.keys()
    anything = {epoch: RestorePoint(epoch=epoch - 1, step=10**9) for epoch in epochs}
    return choose_step(inventories, lineage=anything, **others)


def takes_any_newest(
    inventories: Sequence[Inventory], *, lineage: Mapping[int, RestorePoint], **others: Any
) -> Restore | None:
    """Takes the newest step that any node has a part of."""
    newest = max(((each.step, each.epoch) for inventory in inventories for each in inventory.steps), default=None)
    if newest is None:
        return choose_step(inventories, lineage=lineage, **others)
    step, epoch = newest
    units = {unit for inventory in inventories for unit in inventory.units_of_epoch.get(epoch, ())}
    sources = {
        unit: tuple(
            inventory.node
            for inventory in inventories
            for each in inventory.steps
            if (each.epoch, each.step) == (epoch, step) and unit in each.units
        )
        for unit in units
    }
    return Restore(start=RestorePoint(epoch=epoch, step=step), sources=sources)


MUTANTS = {
    "overwrites the committed slot": Rules(protocol=OverwritesCommitted),
    "has one slot": Rules(protocol=OneSlot),
    "commits on own copies alone": Rules(waits_for_keepers=False),
    "commits by majority": Rules(protocol=CommitsByMajority),
    "votes before a fetched unit is verified": Rules(verifies=False),
    "never gives up a copy": Rules(protocol=NeverGivesUp),
    "ignores the lineage": Rules(choose=ignores_lineage),
    "takes the newest step of any node": Rules(choose=takes_any_newest),
    "deletes old epochs before its first commit": Rules(keeps_old_epochs=False),
    "writes an epoch without comparing": Rules(compares=False),
    "asks for copies while ranks still run": Rules(fences=False),
    "deletes copies when given up": Rules(keeps_copies=False),
    "ends with 0 without a save": Rules(saves_again=False),
    "takes etcd's lineage after it went back": Rules(remembers=False),
    "numbers epochs by etcd alone": Rules(numbers_by_nodes=False),
    "takes epochs of one number for one": Rules(tells_apart=False),
    "believes a store that has forgotten a commit": Rules(doubts_commits=False),
    "finishes without a save if all nodes leave": Rules(saves_if_all_leave=False),
    "leaves with 0 though no node stays": Rules(stays_until_saved=False),
}
