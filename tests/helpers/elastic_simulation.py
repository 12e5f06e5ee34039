"""Runs elastic training under a simulated clock, with faults drawn from a seed, by the real functions of the protocol.

    python -m tests.helpers.elastic_simulation --seeds 100000 --first 0

prints the seeds that break an invariant, and how the runs ended. Simulated are nodes with an agent and a rank each, the
membership store (leases, transactions, times at which it is away), the network, copies in memory and in the object
store. ``CopyProtocol``, ``next_move``, ``choose_step`` and ``place`` are those that run. Faults end after a while; then
a run has to come to its end. The parts are in ``simulated_cluster``, ``simulated_ranks``, ``simulated_faults`` (agents
too) and ``simulated_leader``.
"""

import argparse
import heapq
import time
from collections import Counter

from tests.helpers.protocol_state import Rules, Violation
from tests.helpers.simulated_leader import ClusterWithLeader

LIMIT_S = 900.0


class Simulation(ClusterWithLeader):
    """One run from one seed."""

    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        super().__init__(seed, rules)
        racks = self.draw.random() < 0.2
        for i in range(self.draw.randint(2, 5)):
            self.add_node(f"n{i}", f"rack{i // 2}" if racks else f"n{i}")
        self.has_objects = self.draw.random() < 0.6

    def run(self) -> str:
        """How the run ended.

        Raises:
            Violation: an invariant does not hold, or the run does not end.
        """
        self.wait(0.0, 0.3, self.lead)
        for _ in range(self.draw.randint(0, 6)):
            self.wait(0.0, self.faults_end_s, self.fault)
        while self.end is None:
            if not self.events or self.now_s > LIMIT_S:
                raise Violation(f"no end after {self.now_s:.0f} s; faults {self.faults}, epochs {len(self.epochs)}")
            self.now_s, _, event = heapq.heappop(self.events)
            event()
        return self.end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    began_s, ends = time.monotonic(), Counter[str]()
    for seed in range(args.first, args.first + args.seeds):
        try:
            ends[Simulation(seed).run()] += 1
        except Violation as violation:
            ends["broken"] += 1
            print(f"seed {seed}: {violation}", flush=True)
    print(f"{args.seeds:,} seeds in {time.monotonic() - began_s:.0f} s: {dict(ends.most_common())}")
    if ends["broken"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
