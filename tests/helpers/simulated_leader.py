"""What a simulated leader does: elections, what it sees, its decision, and the transaction after a while."""

import dataclasses

from hetero.elastic.leadership import EvictNode, Finish, MakeEpoch, NodeView, RequestStop, View, end_of_epoch, next_move
from hetero.elastic.placement import OwnedBlock, place
from hetero.elastic.records import HeldStep, NodeInfo
from hetero.elastic.recovery import Restore
from tests.helpers.elastic_epochs import epoch_of
from tests.helpers.protocol_state import History, Violation
from tests.helpers.simulated_cluster import SimulatedNode, World, history_of
from tests.helpers.simulated_faults import ClusterWithFaults


class ClusterWithLeader(ClusterWithFaults):
    """One node leads, by ``next_move`` and ``choose_step``."""

    def lead(self) -> None:
        self.wait(0.05, 0.3, self.lead)
        if self.now_s < self.store_away_until_s:
            return
        there = {node.name: node for node in self.nodes.values() if node.lease_s >= self.now_s}
        if self.leader not in there:
            able = [name for name, node in there.items() if self.able(node)]
            self.leader = self.draw.choice(able) if able else None
            self.leads_since_s = self.epoch_since_s = self.now_s
            self.over_since_s = None
        if self.leader is None:
            if self.now_s > self.faults_end_s and not any(node.up for node in self.nodes.values()):
                self.end = "all nodes are lost"
            return
        leader = self.nodes[self.leader]
        if self.able(leader):
            self.move(leader, there)

    def able(self, node: SimulatedNode) -> bool:
        return node.up and self.now_s >= max(node.stopped_until_s, node.apart_until_s)

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
        )

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
        lineage = before.epoch.lineage if before else {}
        stored = [
            HeldStep(epoch=epoch, step=step, units=frozenset(self.objects[epoch, step]))
            for epoch, step in sorted(self.published)
            if self.now_s >= self.objects_fail_until_s
        ]
        found = self.rules.choose(
            [self.inventory(self.nodes[name]) for name in sorted(answering)],
            lineage=lineage,
            stored=stored,
            bad=self.bad_objects,
            committed=self.ever_committed,
        )
        kept = self.committed if self.must_be_kept(answering) else None
        if found is None:
            if kept is not None:
                raise Violation(f"step {len(self.committed)} was committed and is not found; faults {self.faults}")
            if self.now_s < max(self.faults_end_s, self.objects_fail_until_s) + 30.0:
                return
            self.end = "no whole step"
            return
        infos = [self.nodes[name].info for name in move.nodes]
        self.wait(
            0.0, 1.0, lambda: self.transaction(leader.name, before, infos, found, move, kept=kept, stopped=stopped)
        )

    def transaction(
        self,
        leader: str,
        before: World | None,
        infos: list[NodeInfo],
        found: Restore,
        move: MakeEpoch,
        *,
        kept: History | None,
        stopped: bool,
    ) -> None:
        if not self.nodes[leader].up or self.now_s < self.store_away_until_s:
            return
        newest = self.epochs[-1] if self.epochs else None
        if self.rules.compares and (self.leader != leader or newest is not before):
            return
        number = (before.epoch.number if before else 0) + 1
        if newest is not None and number <= newest.epoch.number:
            raise Violation(f"epoch {number} is made after epoch {newest.epoch.number}")
        if kept is None:
            self.committed, self.committed_in = (), None
        else:
            self.committed = kept
            self.check_committed(found, before, stopped=stopped)
        lineage = before.epoch.lineage if before else {}
        epoch = epoch_of(
            infos, number=number, start=found.start, lineage=lineage, sources=found.sources, failures=move.failures
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
        self.epochs.append(World(epoch=epoch, placement=placed))
        self.broken = self.stop = self.over_since_s = None
        self.epoch_since_s = self.now_s
        world = self.epochs[-1]
        self.after(40.0, lambda: self.check_rendezvous(world))
        if self.draw.random() < 0.1 and self.now_s < self.faults_end_s:
            self.wait(0.0, 3.0, self.fault)

    def check_committed(self, found: Restore, before: World | None, *, stopped: bool) -> None:
        """The step that is restored goes on from the newest committed one; after a planned stop it is that one."""
        start = found.start
        lineage = before.epoch.lineage if before else {}
        expected = history_of(start.epoch, start.step, lineage)
        if expected[: len(self.committed)] != self.committed:
            raise Violation(f"{self.committed} was committed, {expected} is restored; faults {self.faults}")
        if stopped and len(expected) != len(self.committed):
            raise Violation(f"a planned stop at {len(self.committed)} goes on from {len(expected)}")

    def finish(self, move: Finish) -> None:
        if move.exit_code == 0:
            histories = {rank.history for rank in self.epochs[-1].ranks.values()}
            if len(histories) != 1 or len(histories.pop()) != self.num_steps:
                raise Violation("the run ends before its last step")
            self.end = "finished"
        else:
            self.end = "restarts without progress" if "in a row" in move.reason else "too few nodes"
