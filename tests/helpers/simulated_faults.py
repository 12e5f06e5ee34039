"""What simulated agents do, and the faults that befall nodes, network and stores."""

import dataclasses
from collections.abc import Callable

from hetero.elastic.records import NodeMemory
from tests.helpers.simulated_cluster import LEASE_S, SimulatedNode, World
from tests.helpers.simulated_ranks import ClusterWithRanks

WAIT_FOR_STORE_S = 10.0


class ClusterWithFaults(ClusterWithRanks):
    """Nodes with agents, which register, start and end ranks, get lost and come back."""

    def add_node(self, name: str, domain: str) -> None:
        node = SimulatedNode(name=name, domain=domain)
        self.nodes[name] = node
        self.wait(0.0, 2.0, lambda: self.agent(node))

    def agent(self, node: SimulatedNode) -> None:
        """Renews the lease or registers anew, ends ranks and starts them."""
        self.wait(0.1, 0.4, lambda: self.agent(node))
        busy_until_s = max(node.stopped_until_s, node.apart_until_s, node.ended_until_s, self.store_away_until_s)
        if not node.up or self.now_s < busy_until_s:
            return
        if node.has_to_notice:
            node.has_to_notice = False
            node.memory = dataclasses.replace(node.memory, has_committed=True)
            self.end_agent(node)
            return
        if self.gives_up(node):
            self.end_agent(node)
            return
        if node.lease_s < self.now_s:
            if not self.takes_writes or (node.leaves_by_s is not None and node.rank is None and node.lease_s > 0.0):
                return
            if node.lease_s > 0.0:
                node.incarnation += 1
                self.end_rank(node)
            node.since_s = self.now_s
        node.lease_s = self.now_s + LEASE_S
        if self.epochs:
            self.follow(node, self.epochs[-1])

    def follow(self, node: SimulatedNode, world: World) -> None:
        """What an agent does with the newest epoch."""
        number = world.epoch.number
        self.see(node, world, takes_part=False)
        if node.rank is not None and (node.rank.world is not world or self.broken is not None):
            self.end_rank(node)
        if node.rank is not None and node.rank.phase == "failed":
            self.say_broken(world, f"rank of {node.name} failed")
        if self.broken is not None:
            node.fence = max(node.fence, number)
        elif node.rank is None and node.fence < number:
            ranks = [each.ranks[0] for each in world.epoch.nodes if each.node == node.info]
            if ranks:
                node.fence = number
                self.wait(0.3, 2.0, lambda: self.restore(node, world, ranks[0]))

    def gives_up(self, node: SimulatedNode) -> bool:
        """Whether an agent has needed a write for too long; one whose rank trains needs none."""
        is_idle = node.rank is None or node.rank.phase in ("stopped", "finished")
        if not is_idle or self.now_s >= self.store_refuses_until_s:
            node.refused_since_s = None
            return False
        if node.refused_since_s is None:
            node.refused_since_s = self.now_s
        return self.now_s >= node.refused_since_s + WAIT_FOR_STORE_S

    def end_agent(self, node: SimulatedNode) -> None:
        """End an agent with another code than 0; its user starts it again."""
        self.end_rank(node)
        if not self.rules.keeps_copies:
            node.held = {}
        node.lease_s = min(node.lease_s, self.now_s - 1e-6)
        node.refused_since_s = None
        node.ended_until_s = max(self.now_s, self.store_refuses_until_s) + self.draw.uniform(1.0, 10.0)
        self.after(node.ended_until_s - self.now_s, lambda: self.start_agent(node))

    def start_agent(self, node: SimulatedNode) -> None:
        node.fence = self.newest_number

    # Faults.

    def fault(self) -> None:
        node = self.draw.choice(list(self.nodes.values()))
        kind = self.draw.choice(sorted(FAULTS))
        self.faults.append(f"{kind} {node.name} {self.now_s:.2f}")
        FAULTS[kind](self, node)

    def lose(self, node: SimulatedNode) -> None:
        if not node.up:
            return
        self.hurt.add(node.domain)
        self.end_rank(node)
        node.up, node.held, node.memory, node.has_to_notice = False, {}, NodeMemory(), False
        if self.draw.random() < 0.7:
            self.wait(1.0, 20.0, lambda: self.come_back(node))

    def come_back(self, node: SimulatedNode) -> None:
        node.up, node.leaves_by_s, node.fence = True, None, self.newest_number
        node.lease_s = min(node.lease_s, self.now_s - 1e-6)

    def lose_with_keeper(self, node: SimulatedNode) -> None:
        others = [other for other in self.nodes.values() if other is not node]
        if self.epochs:
            world = self.epochs[-1]
            numbers = {each.node.name: each.ranks[0] for each in world.epoch.nodes}
            keepers = {unit.keeper for unit in world.placement.units if unit.owner == numbers.get(node.name)}
            others = [other for other in others if numbers.get(other.name) in keepers] or others
        self.lose(node)
        if others:
            self.lose(self.draw.choice(others))

    def kill_rank(self, node: SimulatedNode) -> None:
        if node.rank is not None:
            world = node.rank.world
            self.end_rank(node)
            self.wait(0.0, 0.2, lambda: self.say_broken(world, f"rank of {node.name} was killed"))

    def restart_agent(self, node: SimulatedNode) -> None:
        self.end_rank(node)
        node.lease_s = min(node.lease_s, self.now_s - 1e-6)

    def flip(self, node: SimulatedNode) -> None:
        stored = [copy for step in self.objects.values() for copy in step.values()]
        copies = list(node.held.values()) if self.draw.random() < 0.8 or not stored else stored
        if copies:
            copy = self.draw.choice(copies)
            copy.good, copy.flipped = False, True
            self.hurt |= {node.domain}

    def notice(self, node: SimulatedNode) -> None:
        node.leaves_by_s = self.now_s + self.draw.choice([0.5, 3.0, 30.0])
        self.after(node.leaves_by_s - self.now_s, lambda: self.lose(node))

    def store_goes_back(self, _: SimulatedNode) -> None:
        """The membership store is restored as it was before one of the last epochs."""
        if self.store_went_back or self.now_s < self.store_refuses_until_s:
            return
        self.store_went_back = True
        del self.epochs[self.draw.randint(0, len(self.epochs)) :]
        self.noted = self.epochs[-1].noted if self.epochs else 0
        self.broken = self.stop = self.over_since_s = self.leader = None
        for node in self.nodes.values():
            node.has_to_notice = node.up and self.now_s >= node.ended_until_s

    def refuse_writes(self, _: SimulatedNode) -> None:
        self.store_refuses_until_s = self.now_s + self.draw.choice([1.0, 8.0, 30.0])

    def for_a_while(self, node: SimulatedNode | None, name: str) -> None:
        setattr(self if node is None else node, name, self.now_s + self.draw.choice([0.3, 1.0, 3.0, 8.0, 20.0]))


FAULTS: dict[str, Callable[[ClusterWithFaults, SimulatedNode], None]] = {
    "node lost": ClusterWithFaults.lose,
    "node and its keeper lost": ClusterWithFaults.lose_with_keeper,
    "rank killed": ClusterWithFaults.kill_rank,
    "agent restarted": ClusterWithFaults.restart_agent,
    "stopped and continued": lambda run, node: run.for_a_while(node, "stopped_until_s"),
    "cut off from nodes": lambda run, node: run.for_a_while(node, "cut_until_s"),
    "cut off from the membership store": lambda run, node: run.for_a_while(node, "apart_until_s"),
    "membership store away": lambda run, node: run.for_a_while(None, "store_away_until_s"),
    "object store fails": lambda run, node: run.for_a_while(None, "objects_fail_until_s"),
    "object store truncates": lambda run, node: run.for_a_while(None, "objects_truncate_until_s"),
    "membership store goes back": ClusterWithFaults.store_goes_back,
    "membership store takes no writes": ClusterWithFaults.refuse_writes,
    "save fails": lambda run, node: run.for_a_while(None, "save_fails_until_s"),
    "memory full": lambda run, node: run.for_a_while(node, "full_until_s"),
    "byte flipped": ClusterWithFaults.flip,
    "notice": ClusterWithFaults.notice,
    "node joins": lambda run, node: run.add_node(f"n{len(run.nodes)}", f"n{len(run.nodes)}"),
}
