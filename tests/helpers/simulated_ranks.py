"""What simulated ranks do: restore, train step by step, copy beside it, fetch, vote, commit and end."""

import dataclasses

from hetero.elastic.recovery import OBJECT_STORE, BadCopy
from tests.helpers.protocol_state import History, Violation
from tests.helpers.simulated_cluster import (
    GLOO_TIMEOUT_S,
    SimulatedCluster,
    SimulatedNode,
    SimulatedRank,
    StoredCopy,
    World,
    check_history,
)


class ClusterWithRanks(SimulatedCluster):
    """Ranks that train by ``CopyProtocol``."""

    def restore(self, node: SimulatedNode, world: World, number: int) -> None:
        if not node.up or self.now_s < node.ended_until_s or node.has_to_notice:
            return
        if not self.epochs or self.epochs[-1] is not world or self.broken is not None or node.rank is not None:
            return
        if self.now_s < node.stopped_until_s:
            self.after(node.stopped_until_s - self.now_s, lambda: self.restore(node, world, number))
            return
        start, histories = world.epoch.start, set()
        for unit, names in world.epoch.sources.items():
            history = self.read_unit(node, (start.epoch, start.step, unit), names)
            if history is None:
                self.say_broken(world, f"{node.name} has no good source of {unit}")
                return
            histories.add(history)
        if not world.epoch.sources:
            histories.add(())
        if len(histories) != 1:
            raise Violation(f"units of different histories: {histories}")
        history = histories.pop()
        check_history(history, world.epoch)
        protocol = self.rules.protocol(start_step=start.step, world_size=len(world.epoch.nodes))
        rank = SimulatedRank(node=node, world=world, number=number, protocol=protocol, history=history)
        rank.ending = len(history) == self.num_steps
        node.rank = world.ranks[number] = rank
        self.see(node, world, takes_part=True)
        if not self.rules.keeps_old_epochs:
            self.delete_older(rank)
        self.maybe_copy(rank)
        if len(world.ranks) == len(world.epoch.nodes):
            self.wait(0.0, self.step_s, lambda: self.all_reduce(world))
        else:
            self.after(GLOO_TIMEOUT_S * 2, lambda: self.check_rendezvous(world))

    def see(self, node: SimulatedNode, world: World, *, takes_part: bool) -> None:
        """Remember an epoch; who takes part in it has no copies of another one with its number."""
        epoch = world.epoch
        if epoch.ancestry.replaces(node.memory.newest, takes_part=takes_part):
            node.memory = dataclasses.replace(node.memory, newest=epoch.ancestry)
        if takes_part and self.rules.tells_apart:
            others = [key for key, copy in node.held.items() if key[0] == epoch.number and copy.epoch_id != epoch.id]
            for key in others:
                del node.held[key]

    def check_rendezvous(self, world: World) -> None:
        if len(world.ranks) < len(world.epoch.nodes):
            self.say_broken(world, "not all ranks came")

    def read_unit(self, node: SimulatedNode, copy: tuple[int, int, str], names: tuple[str, ...]) -> History | None:
        """The content of a unit from the first good source; copies found damaged are deleted or reported."""
        epoch, step, unit = copy
        for name in sorted(names, key=lambda each: each != node.name):
            source = self.nodes[name]
            if not self.reaches(node, source):
                continue
            for key, found in list(source.held.items()):
                if (key[0], key[2], found.step) == (epoch, unit, step):
                    if found.good:
                        return found.history
                    del source.held[key]
        if (epoch, step) in self.published and self.now_s >= self.objects_fail_until_s:
            found = self.objects[epoch, step][unit]
            if found.good:
                return found.history
            self.bad_objects.add(BadCopy(node=OBJECT_STORE, epoch=epoch, step=step, unit=unit))
        return None

    def units(self, rank: SimulatedRank) -> list[tuple[str, int | None]]:
        """Units that a rank writes, with ``None``, and those that it fetches, with their owners."""
        return [
            (unit.name, None if unit.held or unit.owner == rank.number else unit.owner)
            for unit in rank.world.placement.units
            if rank.number in (unit.owner, unit.keeper)
        ]

    def maybe_copy(self, rank: SimulatedRank) -> None:
        step = len(rank.history)
        if not rank.protocol.wants_copy(step, every=self.every, last=rank.ending):
            return
        slot, epoch = rank.protocol.begin(step), rank.world.epoch.number
        rank.failed = False
        for unit, owner in self.units(rank):
            rank.node.held.pop((epoch, slot, unit), None)
            if owner is None:
                self.wait(0.01, 0.5, lambda unit=unit: self.written(rank, step, slot, unit))  # type: ignore[misc]
            else:
                self.wait(0.05, 0.6, lambda unit=unit, owner=owner: self.fetched(rank, step, slot, unit, owner, 0))  # type: ignore[misc]

    def written(self, rank: SimulatedRank, step: int, slot: int, unit: str) -> None:
        if not rank.alive or rank.protocol.pending != step:
            return
        if self.now_s < rank.node.stopped_until_s:
            self.after(rank.node.stopped_until_s - self.now_s, lambda: self.written(rank, step, slot, unit))
        elif self.now_s < rank.node.full_until_s:
            rank.failed = True
        else:
            copy = StoredCopy(epoch_id=rank.world.epoch.id, step=step, history=rank.history[:step])
            rank.node.held[rank.world.epoch.number, slot, unit] = copy

    def fetched(self, rank: SimulatedRank, step: int, slot: int, unit: str, owner: int, tries: int) -> None:
        if not rank.alive or rank.protocol.pending != step:
            return
        source = rank.world.ranks[owner].node if owner in rank.world.ranks else None
        key = (rank.world.epoch.number, slot, unit)
        found = source.held.get(key) if source is not None and self.reaches(rank.node, source) else None
        if found is not None and found.step == step and self.now_s >= rank.node.full_until_s:
            arrives_whole = self.draw.random() > 0.02
            if (found.good and arrives_whole) or not self.rules.verifies:
                good = found.good and arrives_whole
                rank.node.held[key] = StoredCopy(
                    epoch_id=rank.world.epoch.id, step=step, history=found.history, good=good
                )
                return
            tries += 1
        if tries == 3:
            rank.failed = True
        else:
            self.wait(0.05, 0.5, lambda: self.fetched(rank, step, slot, unit, owner, tries))

    def delete_older(self, rank: SimulatedRank) -> None:
        number = rank.world.epoch.number
        for key in [key for key in rank.node.held if key[0] < number]:
            del rank.node.held[key]

    def vote(self, rank: SimulatedRank) -> float:
        pending = rank.protocol.pending
        whole = {
            key[2] for key, copy in rank.node.held.items() if key[0] == rank.world.epoch.number and copy.step == pending
        }
        wanted = {unit for unit, owner in self.units(rank) if owner is None or self.rules.waits_for_keepers}
        return rank.protocol.vote(pending if wanted <= whole else None, failed=rank.failed)

    def all_reduce(self, world: World, since_s: float | None = None) -> None:
        """One step's, or one of those in which ranks that end wait for their last commit."""
        ranks = list(world.ranks.values())
        since_s = self.now_s if since_s is None else since_s
        if not all(rank.alive and rank.node.up for rank in ranks):
            for rank in ranks:
                rank.phase = "failed"
            return
        held_up = any(
            self.now_s < max(rank.node.stopped_until_s, rank.node.cut_until_s * (len(ranks) > 1)) for rank in ranks
        )
        if held_up:
            if self.now_s > since_s + GLOO_TIMEOUT_S:
                for rank in ranks:
                    rank.phase = "failed"
            else:
                self.after(0.2, lambda: self.all_reduce(world, since_s))
            return
        if len({(rank.history, rank.ending, rank.protocol.pending) for rank in ranks}) != 1:
            raise Violation(f"ranks of one epoch are at different states: {[rank.history for rank in ranks]}")
        history, pending = ranks[0].history, ranks[0].protocol.pending
        check_history(history, world.epoch)
        votes = sum(self.vote(rank) for rank in ranks)
        stops = self.stop is not None and bool(self.epochs) and self.epochs[-1] is world
        if pending is not None and round(votes) == len(ranks):
            self.note_commit(world, history[:pending])
        for rank in ranks:
            rank.waiting = True
            self.wait(0.0, 0.15, lambda rank=rank: self.result(rank, votes, stops))  # type: ignore[misc]

    def result(self, rank: SimulatedRank, votes: float, stops: bool) -> None:
        """A rank has the result of the all-reduce. If it ends first, it never knows."""
        if not rank.alive or not rank.node.up:
            return
        writing = rank.protocol.pending == len(rank.history) and not rank.failed
        own = [unit for unit, owner in self.units(rank) if owner is None]
        epoch = rank.world.epoch.number
        there = {
            key[2] for key, copy in rank.node.held.items() if key[0] == epoch and copy.step == rank.protocol.pending
        }
        if self.now_s < rank.node.stopped_until_s or (writing and not set(own) <= there):
            self.wait(0.02, 0.2, lambda: self.result(rank, votes, stops))
            return
        had = rank.protocol.pending
        if (committed := rank.protocol.decide(votes)) is not None:
            if committed > rank.world.committed:
                self.note_commit(rank.world, rank.history[:committed])
            rank.node.memory = dataclasses.replace(rank.node.memory, has_committed=True)
            self.delete_older(rank)
        if had is not None and rank.protocol.pending is None and rank.protocol.committed != had and rank.ending:
            rank.tries += 1
        if not rank.ending:
            rank.history = (*rank.history, rank.world.epoch.id)
            rank.phase = "step"
            rank.ending = stops or len(rank.history) == self.num_steps
        if rank.protocol.pending != len(rank.history):
            self.maybe_copy(rank)
        rank.waiting = False
        if rank.ending and rank.protocol.committed == len(rank.history):
            self.come_to_end(rank)
        elif rank.tries == 5:
            rank.phase = "failed"
        ranks = rank.world.ranks.values()
        is_out = ("stopped", "finished", "failed")
        if all(not each.waiting and not each.saving and each.phase not in is_out for each in ranks):
            self.wait(0.5 * self.step_s, 1.5 * self.step_s, lambda: self.all_reduce(rank.world))

    def come_to_end(self, rank: SimulatedRank) -> None:
        """The last copy is committed: the last step is saved, be it one that this epoch restored."""
        if len(rank.history) < self.num_steps:
            rank.phase = "stopped"
        elif rank.world.epoch.start.step == self.num_steps and not self.rules.saves_again:
            rank.phase = "finished"
        elif not rank.saving:
            rank.saving = True
            if all(each.saving for each in rank.world.ranks.values()):
                self.wait(0.1, 2.0, lambda: self.save(rank.world))

    def save(self, world: World) -> None:
        """The end of the last save."""
        ranks = world.ranks.values()
        works = self.now_s >= self.save_fails_until_s and all(rank.alive and rank.node.up for rank in ranks)
        self.saved = self.saved or works
        for rank in ranks:
            rank.phase = "finished" if works else "failed"
