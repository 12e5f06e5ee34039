"""Explores every order of events of a few nodes that train, copy, fail and recover by the protocol's real functions.

    python -m tests.helpers.protocol_explorer --nodes 3 --steps 4 --failures 2

A node has one rank. What is explored is any order of: the all-reduce of a step, its result's arrival at each rank, the
end of a write and of a fetch, the loss of a node or of a rank, a node that the store of members and the leader do not
see any more while its rank goes on, a flipped byte, the end of each rank, elections, the leader's decision and, apart
from it, its transaction, each node's start and restore, notices, and the return of nodes.

What ranks, leader and recovery decide is not written here: it is asked of ``CopyProtocol``, ``next_move``,
``choose_step`` and ``place``. A state of training is the tuple of the epochs in which its steps were done, so that two
histories are told apart, and a step done twice or left out is seen.
"""

import argparse
import gc
import sys
import time
from collections import deque

from tests.helpers.protocol_reduction import ReducedMoves
from tests.helpers.protocol_state import State, Violation
from tests.helpers.state_search import trace


class Explorer(ReducedMoves):
    """Visits every state that can be reached."""

    def explore(self, *, limit: int | None = None) -> tuple[int, int]:
        """Number of states and of moves.

        Raises:
            Violation: with the events that led there.
        """
        start = self.initial()
        parents: dict[State, tuple[State, str] | None] = {start: None}
        before: dict[State, list[State]] = {start: []}
        queue = deque([start])
        num_moves = 0
        while queue:
            state = queue.popleft()
            try:
                self.check(state)
                successors = [(label, self.without_what_is_over(each)) for label, each in self.successors(state)]
                if not any(not label.startswith("!") for label, _ in successors) and not state.shared.end:
                    raise Violation("nothing can happen any more, and the run has not ended")
            except Violation as violation:
                raise Violation(f"{violation}\n" + "\n".join(trace(parents, state))) from None
            for label, following in successors:
                num_moves += 1
                if following not in parents:
                    parents[following] = (state, label)
                    before[following] = []
                    queue.append(following)
                if not label.startswith("!"):
                    before[following].append(state)
            if limit is not None and len(parents) > limit:
                return len(parents), num_moves
        endless = parents.keys() - can_end(before)
        if endless:
            first = min(endless, key=lambda state: len(trace(parents, state)))
            raise Violation("no end can be reached without a failure\n" + "\n".join(trace(parents, first)))
        return len(parents), num_moves


def can_end(before: dict[State, list[State]]) -> set[State]:
    """The states from which the run can end if nothing more fails."""
    found = {state for state in before if state.shared.end}
    queue = deque(found)
    while queue:
        for state in before[queue.popleft()]:
            if state not in found:
                found.add(state)
                queue.append(state)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("nodes", 3),
        ("steps", 4),
        ("failures", 2),
        ("returns", 0),
        ("rewinds", 0),
        ("refusals", 0),
        ("reopens", 0),
        ("leaves", 0),
        ("min-nodes", 1),
        ("every", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--unreduced", action="store_true")
    args = parser.parse_args()
    explorer = Explorer(
        nodes=args.nodes,
        steps=args.steps,
        failures=args.failures,
        returns=args.returns,
        rewinds=args.rewinds,
        refusals=args.refusals,
        reopens=args.reopens,
        leaves=args.leaves,
        min_nodes=args.min_nodes,
        every=args.every,
        reduced=not args.unreduced,
    )
    # States have no cycles, and are many.
    gc.disable()
    began_s = time.monotonic()
    num_states, num_moves = explorer.explore(limit=args.limit)
    print(f"{num_states:,} states, {num_moves:,} moves, {time.monotonic() - began_s:.1f} s, no invariant broken")


if __name__ == "__main__":
    try:
        main()
    except Violation as violation:
        sys.exit(f"broken: {violation}")
