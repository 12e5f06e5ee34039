"""What a simulated leader does: elections, what it sees, its decision, and the transaction after a while."""

import dataclasses

from hetero.elastic.leadership import (
    EvictNode,
    Finish,
    LackOfStep,
    MakeEpoch,
    NodeView,
    RequestStop,
    View,
    end_of_epoch,
    next_move,
)
from hetero.elastic.placement import OwnedBlock, place
from hetero.elastic.records import Ancestry, HeldStep, NodeInfo, RestorePoint
from hetero.elastic.recovery import History, choose_history
from tests.helpers.elastic_epochs import epoch_of
from tests.helpers.protocol_state import History as Steps
from tests.helpers.protocol_state import Violation
from tests.helpers.simulated_cluster import SimulatedNode, World, agree, history_of
from tests.helpers.simulated_faults import ClusterWithFaults


class ClusterWithLeader(ClusterWithFaults):
    """One node leads, by ``next_move`` and ``choose_step``."""

    def lead(self) -> None:
        self.wait(0.05, 0.3, self.lead)
        if not self.takes_writes:
            return
        there = {node.name: node for node in self.nodes.values() if node.lease_s >= self.now_s}
        if self.leader not in there:
            able = [name for name, node in there.items() if self.able(node)]
            self.leader = self.draw.choice(able) if able else None
            self.leads_since_s = self.epoch_since_s = self.now_s
            self.over_since_s = None
        if self.leader is None:
            coming = any(node.up for node in self.nodes.values())
            if self.now_s > self.faults_end_s and not coming:
                self.end = "all nodes are lost"
            return
        leader = self.nodes[self.leader]
        if self.able(leader):
            self.move(leader, there)

    def able(self, node: SimulatedNode) -> bool:
        is_free = self.now_s >= max(node.stopped_until_s, node.apart_until_s, node.ended_until_s)
        return node.up and is_free and not node.has_to_notice

    def move(self, leader: SimulatedNode, there: dict[str, SimulatedNode]) -> None:
        view = self.view(leader, there)
        reason = end_of_epoch(view)
        if reason is not None and self.over_since_s is None:
            self.over_since_s = self.now_s
            view = dataclasses.replace(view, over_since_s=self.now_s)
            members = [view.nodes.get(each.node.name) for each in self.epochs[-1].epoch.nodes]
            if not all(node is not None and node.phase in ("stopped", "finished") for node in members):
                self.broken = self.broken or reason
        move = next_move(view, self.now_s, self.settings, lambda nodes: self.step_s * 6 / len(nodes) if nodes else None)
        if isinstance(move, RequestStop):
            self.stop = move.reason
        elif isinstance(move, EvictNode):
            self.nodes[move.name].lease_s = min(self.nodes[move.name].lease_s, self.now_s - 1e-6)
        elif isinstance(move, Finish):
            self.finish(move)
        elif isinstance(move, MakeEpoch):
            self.decide(leader, there, move, stopped=self.broken is None)

    def view(self, leader: SimulatedNode, there: dict[str, SimulatedNode]) -> View:
        world = self.epochs[-1] if self.epochs else None
        nodes = {}
        for name, node in sorted(there.items()):
            phase = node.rank.phase if node.rank is not None and node.rank.world is world else None
            nodes[name] = NodeView(
                info=node.info,
                since_s=max(node.since_s, self.leads_since_s),
                answered=self.answers(leader, node),
                phase=phase,  # type: ignore[arg-type]
                leaves_by_s=node.leaves_by_s,
            )
        return View(
            leader=leader.name,
            epoch=world.epoch if world else None,
            nodes=nodes,
            started_s=self.leads_since_s,
            epoch_since_s=self.epoch_since_s,
            over_since_s=self.over_since_s,
            broken=self.broken,
            stop_requested=self.stop,
            committed=world.committed if world else 0,
            step_s=self.step_s * 6 / len(world.epoch.nodes) if world and world.ranks else None,
            no_step=self.no_step({name for name, view in nodes.items() if view.answered}),
        )

    def no_step(self, answering: set[str]) -> LackOfStep | None:
        """What a leader remembers of its last search."""
        if self.lack is None or self.lack[0] != answering or self.now_s >= self.lack[1]:
            return None
        return LackOfStep(reason="no step is whole", exit_code=1)

    def answers(self, leader: SimulatedNode, node: SimulatedNode) -> bool:
        """It can be reached, and has no rank of the newest epoch and will start none."""
        if not self.reaches(leader, node):
            return False
        if not self.epochs or not self.rules.fences:
            return True
        world = self.epochs[-1]
        if node.info not in [each.node for each in world.epoch.nodes]:
            return node.rank is None
        if node.rank is not None:
            return node.rank.world is world and node.rank.phase in ("stopped", "finished")
        return self.broken is not None and node.fence >= world.epoch.number

    def decide(self, leader: SimulatedNode, there: dict[str, SimulatedNode], move: MakeEpoch, *, stopped: bool) -> None:
        before = self.epochs[-1] if self.epochs else None
        answering = {name for name, node in there.items() if self.answers(leader, node)}
        stored = [
            HeldStep(epoch=epoch, step=step, units=frozenset(self.objects[epoch, step]))
            for epoch, step in sorted(self.published)
            if self.now_s >= self.objects_fail_until_s
        ]
        found = choose_history(
            [self.inventory(self.nodes[name]) for name in sorted(answering)],
            in_store=before.epoch.ancestry if before else Ancestry(lineage=self.claimed_lineage),
            noted=self.noted,
            stored=stored,
            bad=self.bad_objects,
            choose=self.rules.choose,
        )
        kept = self.committed if self.must_be_kept(answering) else None
        if found.restore is None:
            if kept:
                raise Violation(f"step {len(self.committed)} was committed and is not found; faults {self.faults}")
            self.lack = frozenset(answering), self.now_s + (2.0 if self.has_objects else 1e9)
            return
        number = self.next_number(found, answering)
        infos = [self.nodes[name].info for name in move.nodes]
        self.wait(
            0.0,
            1.0,
            lambda: self.transaction(
                leader.name, before, infos, found, move, number=number, kept=kept, stopped=stopped
            ),
        )

    @property
    def claimed_lineage(self) -> dict[int, RestorePoint]:
        """Of the newest epoch that was claimed in the object store."""
        if not self.has_objects or not self.worlds:
            return {}
        return max(self.worlds.values(), key=lambda world: world.epoch.number).epoch.lineage

    def next_number(self, found: History, answering: set[str]) -> int:
        """Of the next epoch: nobody who is there, and nobody in the object store, has seen another with it."""
        if not self.rules.numbers_by_nodes:
            return self.newest_number + 1
        seen = [self.nodes[name].memory.newest.number for name in answering]
        claimed = [world.epoch.number for world in self.worlds.values()] if self.has_objects else []
        return max([found.newest.number, self.newest_number, *seen, *claimed]) + 1

    def transaction(
        self,
        leader: str,
        before: World | None,
        infos: list[NodeInfo],
        found: History,
        move: MakeEpoch,
        *,
        number: int,
        kept: Steps | None,
        stopped: bool,
    ) -> None:
        if not self.nodes[leader].up or not self.takes_writes:
            return
        newest = self.epochs[-1] if self.epochs else None
        if self.rules.compares and (self.leader != leader or newest is not before):
            return
        assert found.restore is not None
        if newest is not None and number <= newest.epoch.number:
            raise Violation(f"epoch {number} is made after epoch {newest.epoch.number}")
        if kept is None:
            self.committed, self.committed_in = (), None
        else:
            self.committed = kept
            self.check_committed(found, stopped=stopped)
        epoch = epoch_of(
            infos,
            number=number,
            start=found.restore.start,
            before=found.newest,
            name=str(len(self.worlds) + 1),
            sources=found.restore.sources,
            failures=move.failures,
        )
        owned = [
            [
                OwnedBlock(name=f"{kind}/{each.name}", offsets=(0,), shape=(1,), num_bytes=8)
                for kind in ("weights", "exp_avg")
            ]
            for each in infos
        ]
        # Some ranks have the weights of some others.
        held = [[blocks[0] for blocks in owned if self.draw.random() < 0.4] for _ in infos]
        placed = place(owned, held, [each.failure_domain for each in infos], [each.name for each in infos])
        if found.committed != 0:
            self.noted = max(self.noted, 1)
        self.epochs.append(World(epoch=epoch, placement=placed, noted=self.noted))
        self.worlds[epoch.id] = self.epochs[-1]
        self.broken = self.stop = self.over_since_s = None
        self.epoch_since_s = self.now_s
        world = self.epochs[-1]
        self.after(40.0, lambda: self.check_rendezvous(world))
        if self.draw.random() < 0.1 and self.now_s < self.faults_end_s:
            self.wait(0.0, 3.0, self.fault)

    def check_committed(self, found: History, *, stopped: bool) -> None:
        """The step that is restored goes on from the newest committed one; after a planned stop it is that one."""
        assert found.restore is not None
        start = found.restore.start
        expected = history_of(found.newest, start.epoch, start.step)
        is_kept = len(expected) >= len(self.committed) and agree(expected, self.committed)
        if not is_kept and not (self.store_went_back and len(expected) > len(self.committed)):
            raise Violation(f"{self.committed} was committed, {expected} is restored; faults {self.faults}")
        if stopped and len(expected) != len(self.committed) and not self.store_went_back:
            raise Violation(f"a planned stop at {len(self.committed)} goes on from {len(expected)}")

    def finish(self, move: Finish) -> None:
        if move.exit_code == 0:
            histories = {rank.history for rank in self.epochs[-1].ranks.values()}
            if len(histories) != 1 or len(histories.pop()) != self.num_steps:
                raise Violation("the run ends before its last step")
            if not self.saved:
                raise Violation("the run ends with exit code 0 and has not saved its last step")
            self.end = "finished"
        elif self.reopens and self.draw.random() < 0.5:
            self.reopen()
        elif move.reason.startswith("no step is whole"):
            self.end = "no whole step"
        else:
            self.end = "restarts without progress" if "in a row" in move.reason else "too few nodes"

    def reopen(self) -> None:
        """All agents of a job that was given up end, and are started again."""
        self.reopens -= 1
        for node in self.nodes.values():
            if node.up:
                self.end_agent(node)
        self.broken = self.stop = self.over_since_s = self.leader = self.lack = None
