"""What has to hold in every explored state."""

from collections.abc import Sequence

from hetero.elastic.leadership import Finish
from hetero.elastic.records import Ancestry
from hetero.elastic.recovery import Restore, last_steps
from tests.helpers.protocol_calls import Left, ProtocolCalls
from tests.helpers.protocol_state import Held, History, Shared, State, Violation

BEFORE = "0"
"""Stands in a history where the epochs before are all called the same."""


_NOTHING: tuple[frozenset[Held], int, bool] = (frozenset(), 0, False)


class ProtocolInvariants(ProtocolCalls):
    """Checks of states, of histories, and of how a run ends."""

    def check(self, state: State) -> None:
        """At any time, the loss of as many failure domains as are tolerated leaves the newest committed step whole.

        Once all failures have happened it is checked where the leader decides, as copies are forgotten by then.
        """
        shared = state.shared
        is_kept_elsewhere = shared.saved >= len(shared.committed)
        if shared.lost > shared.tolerated or is_kept_elsewhere or not shared.failures:
            return
        # An agent that was given up has kept its copies, and comes back with them.
        reachable = tuple(
            (node.held, node.seen, node.knows) if node.up and (node.leased or node.ended) else _NOTHING
            for node in state.nodes
        )
        key = (shared.epoch, shared.committed, shared.lost, shared.tolerated, reachable)
        if key in self.checked:
            return
        self.checked.add(key)
        hurt = [None] if shared.lost == shared.tolerated else [None, *range(self.nodes)]
        for gone in hurt:
            left = [(i, *node) for i, node in enumerate(reachable) if i != gone and (node[0] or node[1])]
            self.check_committed(shared, left, "" if gone is None else f" if node {gone} is lost")

    def check_committed(self, shared: Shared, left: Sequence[Left], where: str) -> None:
        history = self.best_history(left, shared)
        is_kept = history[: len(shared.committed)] == shared.committed
        # If others went on before it was noticed that the store went back, the longer history is gone on with.
        if not is_kept and not (self.rewinds and len(history) > len(shared.committed)):
            raise Violation(f"committed {shared.committed} is lost{where}: recovery finds {history}")

    def best_history(self, left: Sequence[Left], shared: Shared) -> History:
        """What recovery restores of these nodes in the end, after all copies that are damaged have been found out."""
        while True:
            found = self.find(left, shared).restore
            if found is None:
                return ()
            history, bad = self.read({i: held for i, held, _, _ in left}, found)
            if history is not None:
                return history
            if not bad:
                return ()
            left = [
                (i, frozenset(each for each in held if (i, each) not in bad), seen, knows)
                for i, held, seen, knows in left
            ]

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

    def history_of(self, epochs: Ancestry, num_steps: int) -> History:
        """Which epoch has done each of the steps of a history, by its lineage."""
        expected: list[str] = []
        for epoch, end in sorted(last_steps(epochs.lineage).items()):
            expected += [epochs.ids.get(epoch, BEFORE)] * ((num_steps if end is None else end) - len(expected))
        return tuple(expected)

    def check_history(self, history: History, epochs: Ancestry) -> None:
        """Every sample once: step i was done in the epoch of the lineage that had it to do."""
        expected = self.history_of(epochs, len(history))
        if expected != history:
            raise Violation(f"the history {history} is not that of the lineage, {expected}")

    def check_end(self, state: State, move: Finish) -> None:
        if move.exit_code == 0:
            for i in self.members(state.shared.epoch):
                rank = state.nodes[i].rank
                if rank is None or (rank.step != self.steps and rank.stop != "for good"):
                    raise Violation(f"the run ends before its last step: {rank}")
                if state.shared.saved != rank.step:
                    raise Violation(
                        f"the run ends with exit code 0 after step {rank.step}, {state.shared.saved} is saved"
                    )
        elif state.shared.lost <= state.shared.tolerated:
            raise Violation(f"the run is given up: {move.reason}")
