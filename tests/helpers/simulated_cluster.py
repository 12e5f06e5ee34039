"""Nodes, membership store, network and object store under a simulated clock, and what an onlooker knows of them."""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.elastic.copy_protocol import CopyProtocol
from hetero.elastic.leadership import LeaderSettings
from hetero.elastic.records import Ancestry, CopyPlacement, Epoch, HeldStep, Inventory, NodeInfo, NodeMemory
from hetero.elastic.recovery import BadCopy, last_steps
from tests.helpers.elastic_epochs import node_info
from tests.helpers.protocol_state import History, Rules, Violation

LEASE_S, GLOO_TIMEOUT_S = 2.0, 4.0
SETTINGS = LeaderSettings(first_settle_s=1.0, answer_s=2.0, missing_s=120.0, dwell_s=6.0, commit_s=1.0)


@dataclass(kw_only=True)
class StoredCopy:
    """A whole unit, in a slot of a node or in the object store.

    epoch_id: of the epoch that it is of.
    flipped: a byte of it has changed where it lies.
    """

    epoch_id: str
    step: int
    history: History
    good: bool = True
    flipped: bool = False


@dataclass(kw_only=True, eq=False)
class SimulatedNode:
    """A machine with its agent, its rank and its memory. ``held`` is by epoch, slot and unit.

    ended_until_s: when the agent, which has ended with a code other than 0, is started again.
    refused_since_s: since when it has needed the membership store to take a write.
    has_to_notice: the store went back, and the agent has not read it since.
    """

    name: str
    domain: str
    incarnation: int = 1
    up: bool = True
    lease_s: float = -1.0
    since_s: float = 0.0
    fence: int = 0
    stopped_until_s: float = 0.0
    apart_until_s: float = 0.0
    cut_until_s: float = 0.0
    full_until_s: float = 0.0
    leaves_by_s: float | None = None
    rank: "SimulatedRank | None" = None
    ended_until_s: float = 0.0
    refused_since_s: float | None = None
    has_to_notice: bool = False
    held: dict[tuple[int, int, str], StoredCopy] = field(default_factory=dict)
    memory: NodeMemory = field(default_factory=NodeMemory)

    @property
    def info(self) -> NodeInfo:
        return node_info(self.name, str(self.incarnation), domain=self.domain)


@dataclass(kw_only=True, eq=False)
class World:
    """The ranks of an epoch, and where their copies lie. ``noted``: what the store knew to be committed before it."""

    epoch: Epoch
    placement: CopyPlacement
    noted: int = 0
    ranks: dict[int, "SimulatedRank"] = field(default_factory=dict)
    committed: int = 0


@dataclass(kw_only=True, eq=False)
class SimulatedRank:
    """A rank. ``phase`` is as in a ``RankReport``; ``ending``: it finishes the step, commits and ends.

    saving: its last copy is committed, and it writes the last checkpoint.
    """

    node: SimulatedNode
    world: World
    number: int
    protocol: CopyProtocol
    history: History
    phase: str = "restored"
    ending: bool = False
    saving: bool = False
    waiting: bool = False
    failed: bool = False
    alive: bool = True
    tries: int = 0


class SimulatedCluster:
    """Everything that a run is made of, its clock, and the checks of an onlooker. Drawn from a seed."""

    def __init__(self, seed: int, rules: Rules | None = None) -> None:
        self.draw = random.Random(seed)
        self.rules = rules or Rules()
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.num_steps, self.every = self.draw.randint(6, 14), self.draw.choice([1, 1, 2, 3])
        self.step_s = self.draw.uniform(0.2, 1.0)
        self.min_nodes = self.draw.choice([1, 1, 2])
        self.settings = dataclasses.replace(SETTINGS, min_nodes=self.min_nodes)
        self.faults_end_s = self.draw.uniform(10.0, 60.0)
        self.nodes: dict[str, SimulatedNode] = {}
        # The membership store.
        self.epochs: list[World] = []
        self.broken: str | None = None
        self.stop: str | None = None
        self.leader: str | None = None
        self.leads_since_s = self.epoch_since_s = 0.0
        self.over_since_s: float | None = None
        self.store_away_until_s = self.store_refuses_until_s = 0.0
        self.noted = 0
        self.store_went_back = False
        self.worlds: dict[str, World] = {}
        self.lack: tuple[frozenset[str], float] | None = None
        self.saved = False
        self.save_fails_until_s = 0.0
        self.reopens = 1
        # The object store: units by epoch and step, and what is published.
        self.has_objects = False
        self.objects: dict[tuple[int, int], dict[str, StoredCopy]] = {}
        self.published: set[tuple[int, int]] = set()
        self.objects_fail_until_s = self.objects_truncate_until_s = 0.0
        self.bad_objects: set[BadCopy] = set()
        # What an onlooker knows.
        self.committed: History = ()
        self.committed_in: World | None = None
        self.hurt: set[str] = set()
        self.end: str | None = None
        self.faults: list[str] = []

    # The clock.

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now_s + delay_s, next(self.order), event))

    def wait(self, low_s: float, high_s: float, event: Callable[[], None]) -> None:
        self.after(self.draw.uniform(low_s, high_s), event)

    # What agents and leader find out and tell.

    def end_rank(self, node: SimulatedNode) -> None:
        if node.rank is not None:
            node.rank.alive = False
            node.fence = max(node.fence, node.rank.world.epoch.number)
            node.rank = None

    def say_broken(self, world: World, reason: str) -> None:
        """Tells all agents, once the membership store is there."""
        if not self.takes_writes:
            self.after(0.3, lambda: self.say_broken(world, reason))
        elif self.epochs and self.epochs[-1] is world and self.broken is None:
            self.broken = reason

    @property
    def takes_writes(self) -> bool:
        return self.now_s >= max(self.store_away_until_s, self.store_refuses_until_s)

    @property
    def newest_number(self) -> int:
        """Of the epoch that the membership store has."""
        return self.epochs[-1].epoch.number if self.epochs else 0

    def reaches(self, one: SimulatedNode, other: SimulatedNode) -> bool:
        there = one.up and other.up and self.now_s >= max(other.stopped_until_s, other.ended_until_s)
        return there and (one is other or self.now_s >= max(one.cut_until_s, other.cut_until_s))

    def inventory(self, node: SimulatedNode) -> Inventory:
        units: dict[tuple[int, int], set[str]] = {}
        ids: dict[int, str] = {}
        for (epoch, _, unit), copy in node.held.items():
            units.setdefault((epoch, copy.step), set()).add(unit)
            ids[epoch] = copy.epoch_id
        of_epoch = {epoch: frozenset(u.name for u in self.worlds[name].placement.units) for epoch, name in ids.items()}
        steps = tuple(HeldStep(epoch=e, step=s, units=frozenset(names)) for (e, s), names in sorted(units.items()))
        memory = node.memory if self.rules.remembers else NodeMemory()
        return Inventory(node=node.name, steps=steps, units_of_epoch=of_epoch, id_of_epoch=ids, memory=memory)

    # What an onlooker checks.

    def note_commit(self, world: World, history: History) -> None:
        """Nodes that are all cut off may go on in an epoch that is over: that history was given up."""
        if not self.epochs or self.epochs[-1] is not world:
            return
        self.committed, self.committed_in = history, world
        world.committed = max(world.committed, len(history))
        self.noted = max(self.noted, len(history))
        damaged = {
            rank.node.domain
            for rank in world.ranks.values()
            for key, copy in rank.node.held.items()
            if (key[0], copy.step, copy.flipped) == (world.epoch.number, len(history), True)
        }
        self.hurt = damaged
        if self.has_objects and self.draw.random() < 0.5:
            self.upload(world, len(history))

    def must_be_kept(self, answering: set[str]) -> bool:
        """At most one failure domain that has copies of the committed step is lost, damaged or out of reach."""
        world = self.committed_in
        if world is None:
            return False
        domains = {each.node.failure_domain for each in world.epoch.nodes}
        away = {each.node.failure_domain for each in world.epoch.nodes if each.node.name not in answering}
        return len(domains & (self.hurt | away)) <= (1 if len(domains) > 1 else 0)

    # The object store.

    def upload(self, world: World, step: int) -> None:
        """Files that an upload reads stay as they are, as it has a link to each. Published last, once all are whole."""
        epoch, parts = world.epoch.number, {}
        for rank in world.ranks.values():
            for (of, _, unit), copy in rank.node.held.items():
                if (of, copy.step) == (epoch, step) and (copy.good or unit not in parts):
                    parts[unit] = copy
        self.wait(0.5, 8.0, lambda: self.uploaded(world, step, parts))

    def uploaded(self, world: World, step: int, parts: dict[str, StoredCopy]) -> None:
        key = (world.epoch.number, step)
        if self.now_s < self.objects_fail_until_s:
            return
        truncated = self.now_s < self.objects_truncate_until_s
        self.objects[key] = {
            unit: dataclasses.replace(copy, good=copy.good and not truncated) for unit, copy in parts.items()
        }
        names = {unit.name for unit in world.placement.units}
        if not truncated and all(copy.good for copy in parts.values()) and names == set(parts):
            self.published.add(key)


def history_of(epochs: Ancestry, epoch: int, step: int) -> History:
    """The history of a step of an epoch by the lineage: by which epoch each of its steps was done.

    Of epochs that only the object store remembers the id is not known, and empty here.
    """
    found: list[str] = []
    for of, end in last_steps({e: s for e, s in epochs.lineage.items() if e <= epoch}).items():
        found += [epochs.ids.get(of, "")] * ((step if end is None or of == epoch else end) - len(found))
    return tuple(found)


def agree(expected: History, history: History) -> bool:
    """Whether two histories are the same as far as both go."""
    return all(one in ("", other) for one, other in zip(expected, history, strict=False))


def check_history(history: History, epoch: Epoch) -> None:
    """Each step was done once, in the epoch of the lineage that had it to do."""
    expected = history_of(epoch.ancestry, epoch.number, len(history))
    if len(expected) != len(history) or not agree(expected, history):
        raise Violation(f"the history {history} is not that of the lineage, {expected}")
