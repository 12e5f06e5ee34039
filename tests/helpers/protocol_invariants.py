"""What has to hold in every explored state."""

from collections.abc import Sequence

from hetero.elastic.leadership import Finish
from hetero.elastic.records import RestorePoint
from hetero.elastic.recovery import Restore, last_steps
from tests.helpers.protocol_calls import ProtocolCalls
from tests.helpers.protocol_state import Held, History, Shared, State, Violation


class ProtocolInvariants(ProtocolCalls):
    """Checks of states, of histories, and of how a run ends."""

    def check(self, state: State) -> None:
        """At any time, the loss of as many failure domains as are tolerated leaves the newest committed step whole.

        Once all failures have happened it is checked where the leader decides, as copies are forgotten by then.
        """
        shared = state.shared
        if shared.lost > shared.tolerated or not shared.committed or not shared.failures:
            return
        reachable = tuple(node.held if node.up and node.leased else frozenset() for node in state.nodes)
        key = (shared.epoch, shared.committed, shared.lost, shared.tolerated, reachable)
        if key in self.checked:
            return
        self.checked.add(key)
        hurt = [None] if shared.lost == shared.tolerated else [None, *range(self.nodes)]
        for gone in hurt:
            left = [(i, held) for i, held in enumerate(reachable) if i != gone and held]
            self.check_committed(shared, left, "" if gone is None else f" if node {gone} is lost")

    def check_committed(self, shared: Shared, left: Sequence[tuple[int, frozenset[Held]]], where: str) -> None:
        history = self.best_history(left, self.lineage(shared.epoch))
        if history[: len(shared.committed)] != shared.committed:
            raise Violation(f"committed {shared.committed} is lost{where}: recovery finds {history}")

    def best_history(self, left: Sequence[tuple[int, frozenset[Held]]], lineage: dict[int, RestorePoint]) -> History:
        """What recovery restores of these nodes in the end, after all copies that are damaged have been found out."""
        while True:
            found = self.rules.choose([self.inventory(*each) for each in left], lineage=lineage, committed=1)
            if found is None:
                return ()
            history, bad = self.read(dict(left), found)
            if history is not None:
                return history
            if not bad:
                return ()
            left = [(i, frozenset(each for each in held if (i, each) not in bad)) for i, held in left]

    def read(self, held: dict[int, frozenset[Held]], restore: Restore) -> tuple[History | None, set[tuple[int, Held]]]:
        """The history that ranks restore from these nodes, ``None`` where a unit has no good source; and bad copies.

        Raises:
            Violation: units are of different histories.
        """
        histories, bad, lacks = set(), set(), False
        for unit, nodes in restore.sources.items():
            copies = [
                (int(node), each)
                for node in nodes
                for each in held.get(int(node), frozenset())
                if (self.number(each.epoch), each.step, str(each.owner))
                == (restore.start.epoch, restore.start.step, unit)
            ]
            bad |= {each for each in copies if not each[1].good}
            good = [each for _, each in copies if each.good]
            lacks |= not good
            histories |= {each.history for each in good[:1]}
        if lacks:
            return None, bad
        if not restore.sources:
            return (), bad
        if len(histories) != 1 or len(next(iter(histories))) != restore.start.step:
            raise Violation(f"restored units are of different histories: {sorted(histories)}")
        return histories.pop(), bad

    def check_history(self, history: History, lineage: dict[int, RestorePoint]) -> None:
        """Every sample once: step i was done in the epoch of the lineage that had it to do."""
        limits = last_steps(lineage)
        expected: list[int] = []
        for epoch in sorted(limits):
            end = limits[epoch]
            expected += [epoch] * ((len(history) if end is None else end) - len(expected))
        if tuple(expected) != history:
            raise Violation(f"the history {history} is not that of the lineage, {tuple(expected)}")

    def check_end(self, state: State, move: Finish) -> None:
        if move.exit_code == 0:
            for i in self.members(state.shared.epoch):
                rank = state.nodes[i].rank
                if rank is None or rank.step != self.steps:
                    raise Violation(f"the run ends before its last step: {rank}")
        elif state.shared.lost <= state.shared.tolerated:
            raise Violation(f"the run is given up: {move.reason}")
