"""What may happen next in an explored state: every event of ranks, agents, leaders and machines."""

from collections.abc import Iterator

from hetero.elastic.leadership import EvictNode, Finish, MakeEpoch, RequestStop
from hetero.elastic.records import Epoch
from hetero.elastic.recovery import Restore
from tests.helpers.protocol_calls import snapshot
from tests.helpers.protocol_invariants import ProtocolInvariants
from tests.helpers.protocol_state import Held, Node, Proposal, Rank, Shared, State, Violation, info

RESULT, WRITTEN = "gets the result", "has written"


class ProtocolMoves(ProtocolInvariants):
    """All events, each with the state that it leads to. Those with ``!`` before their names are failures."""

    def initial(self) -> State:
        node = Node(up=True, leased=True, incarnation=1, fence=0, rank=None, held=frozenset())
        shared = Shared(0, False, False, 0, (), self.failures, self.returns, 0, (), 0, 1, "")
        return State((node,) * self.nodes, shared)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        if state.shared.end:
            return
        for i, node in enumerate(state.nodes):
            if node.up:
                yield from self.rank_events(state, i)
                yield from self.agent_events(state, i)
            yield from self.failures_of(state, i)
        yield from self.all_reduces(state)
        yield from self.leader_events(state)

    def all_reduces(self, state: State) -> Iterator[tuple[str, State]]:
        for index in {node.rank.epoch for node in state.nodes if node.rank is not None}:
            members = self.members(index)
            ranks = {i: state.nodes[i].rank for i in members}
            if any(r is None or r.epoch != index or r.inbox or r.status not in ("run", "end") for r in ranks.values()):
                continue
            there = {(r.step, r.history, r.status) for r in ranks.values() if r is not None}
            if len(there) != 1:
                raise Violation(f"ranks of one epoch are at different states: {there}")
            ((step, history, status),) = there
            self.check_history(history, self.lineage(index))
            votes = sum(self.vote(state, i) for i in members)
            inbox_stops = (
                [False, True] if state.shared.stop and index == state.shared.epoch and status == "run" else [False]
            )
            pending = dict(ranks[next(iter(members))].protocol)["pending"]  # type: ignore[union-attr]
            shared = state.shared
            decided = [self.step(rank.protocol, "decide", votes)[1] for rank in ranks.values() if rank is not None]
            if index == shared.epoch and any(each is not None for each in decided):
                cut = sum(not state.nodes[i].leased for i in members)
                damaged = sum(
                    any((e.epoch, e.step, e.owner, e.good) == (index, pending, i, False) for e in state.nodes[i].held)
                    for i in members
                    if state.nodes[i].leased
                )
                whole = 1 if any(keeper is not None for _, keeper in self.units_of(index)) else 0
                shared = shared._replace(
                    committed_epoch=self.number(index), committed=history[:pending], lost=cut + damaged, tolerated=whole
                )
            for stops in inbox_stops:
                nodes = tuple(
                    node._replace(rank=node.rank._replace(inbox=(votes, stops))) if i in members and node.rank else node
                    for i, node in enumerate(state.nodes)
                )
                yield (
                    f"all-reduce of epoch {self.number(index)} after step {step}: {votes:g} votes, stop {stops}",
                    State(nodes, shared),
                )

    def vote(self, state: State, i: int) -> float:
        node = state.nodes[i]
        assert node.rank is not None
        pending = dict(node.rank.protocol)["pending"]
        kept = {(each.owner, each.step) for each in node.held if each.epoch == node.rank.epoch}
        wanted = {
            owner
            for owner, keeper in self.units_of(node.rank.epoch)
            if owner == i or (keeper == i and self.rules.waits_for_keepers)
        }
        whole = pending if pending is not None and {(owner, pending) for owner in wanted} <= kept else None
        return float(self.step(node.rank.protocol, "vote", whole, node.rank.failed)[1])

    def rank_events(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        node = state.nodes[i]
        rank = node.rank
        if rank is None or rank.status not in ("run", "end"):
            return
        known = dict(rank.protocol)
        pending = known["pending"]
        if pending is not None:
            slot = known["_slots"].index(pending)
            for owner, keeper in self.units_of(rank.epoch):
                if i not in (owner, keeper) or any(e[:3] == (rank.epoch, slot, owner) for e in node.held):
                    continue
                if owner == i:
                    unit = Held(rank.epoch, slot, i, pending, rank.history[:pending], True)
                    yield (
                        f"node {i} {WRITTEN} step {pending}",
                        self.with_node(state, i, node._replace(held=node.held | {unit})),
                    )
                    continue
                source = next((e for e in state.nodes[owner].held if e[:4] == (rank.epoch, slot, owner, pending)), None)
                if source is not None and state.nodes[owner].up and not source.good and self.rules.verifies:
                    if not rank.failed:
                        after = node._replace(rank=rank._replace(failed=True))
                        yield f"node {i} finds step {pending} of node {owner} damaged", self.with_node(state, i, after)
                elif source is not None and state.nodes[owner].up:
                    after = node._replace(held=node.held | {source})
                    yield f"node {i} has fetched step {pending} of node {owner}", self.with_node(state, i, after)
                    if not self.rules.verifies and state.shared.failures:
                        after = node._replace(held=node.held | {source._replace(good=False)})
                        shared = state.shared._replace(failures=state.shared.failures - 1)
                        damaged = self.with_node(state._replace(shared=shared), i, after)
                        yield f"!node {i} has fetched step {pending} of node {owner}, damaged", damaged
        writing = pending == rank.step and not any(
            e[:4] == (rank.epoch, known["_slots"].index(pending), i, pending) for e in node.held
        )
        if rank.inbox is not None and not writing:
            yield f"node {i} {RESULT}", self.with_node(state, i, self.after_result(node, rank))

    def after_result(self, node: Node, rank: Rank) -> Node:
        """What a rank does with the result of an all-reduce: decides, updates, and copies if it is to."""
        assert rank.inbox is not None
        (votes, stops), before = rank.inbox, rank.step
        number = self.number(rank.epoch)
        protocol, committed = self.step(rank.protocol, "decide", votes)
        held = node.held
        if committed is not None:
            held = frozenset(each for each in held if self.number(each.epoch) >= number)
        failed = rank.failed and dict(protocol)["pending"] is not None
        rank = rank._replace(protocol=protocol, inbox=None, failed=failed)
        if rank.status == "run":
            step = rank.step + 1
            rank = rank._replace(step=step, history=(*rank.history, number))
            if stops or step == self.steps:
                rank = rank._replace(status="end")
        if rank.step > before or rank.status == "end":
            rank, held = self.maybe_copy(rank, held)
        if rank.status == "end" and dict(rank.protocol)["committed"] == rank.step:
            rank = rank._replace(status="finished" if rank.step == self.steps else "stopped")
        return node._replace(rank=rank, held=held)

    def maybe_copy(self, rank: Rank, held: frozenset[Held]) -> tuple[Rank, frozenset[Held]]:
        protocol, wants = self.step(rank.protocol, "wants_copy", rank.step, rank.status == "end")
        if not wants:
            return rank._replace(protocol=protocol), held
        protocol, slot = self.step(protocol, "begin", rank.step)
        held = frozenset(each for each in held if (each.epoch, each.slot) != (rank.epoch, slot))
        return rank._replace(protocol=protocol, failed=False), held

    def agent_events(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        node, shared = state.nodes[i], state.shared
        number = self.number(shared.epoch)
        if not node.leased:
            if shared.returns:
                after = node._replace(leased=True, incarnation=node.incarnation + 1, rank=None, fence=number)
                yield (
                    f"node {i} comes back",
                    self.with_node(state._replace(shared=shared._replace(returns=shared.returns - 1)), i, after),
                )
            return
        old = node.rank is not None and node.rank.epoch != shared.epoch
        if old or (shared.broken and node.fence < number and i in self.members(shared.epoch)):
            fence = number if not old else max(node.fence, self.number(node.rank.epoch))  # type: ignore[union-attr]
            yield f"node {i} ends its rank", self.with_node(state, i, node._replace(rank=None, fence=fence))
        record = self.records[shared.epoch]
        if record is None or shared.broken or node.rank is not None or node.fence >= number:
            return
        if any(each.node == info(i, node) for each in record.nodes):
            yield self.restored(state, i, record)

    def restored(self, state: State, i: int, record: Epoch) -> tuple[str, State]:
        node = state.nodes[i]
        held = {k: other.held for k, other in enumerate(state.nodes) if other.up and other.leased}
        history, bad = self.read(held, Restore(start=record.start, sources=record.sources))
        if history is None:
            nodes = tuple(
                other._replace(held=frozenset(each for each in other.held if (k, each) not in bad))
                for k, other in enumerate(state.nodes)
            )
            failed = State(nodes, state.shared._replace(broken=True))
            return f"node {i} cannot restore", self.with_node(failed, i, nodes[i]._replace(fence=record.number))
        self.check_history(history, record.lineage)
        protocol = snapshot(self.rules.protocol(start_step=record.start.step, world_size=len(record.nodes)))
        rank = Rank(
            state.shared.epoch, len(history), history, protocol, None, "end" if len(history) == self.steps else "run"
        )
        kept = (
            node.held
            if self.rules.keeps_old_epochs
            else frozenset(e for e in node.held if self.number(e.epoch) >= record.number)
        )
        rank, kept = self.maybe_copy(rank, kept)
        return f"node {i} restores {history}", self.with_node(state, i, node._replace(rank=rank, held=kept))

    def leader_events(self, state: State) -> Iterator[tuple[str, State]]:
        shared = state.shared
        if not any(node.leased for node in state.nodes):
            if not shared.returns:
                yield "all nodes are lost", state._replace(shared=shared._replace(end="no node"))
            return
        if not state.nodes[shared.leader].leased:
            leader = next(i for i, node in enumerate(state.nodes) if node.leased)
            yield f"node {leader} leads", state._replace(shared=shared._replace(leader=leader))
        else:
            yield from self.leaders_moves(state)
        for proposal in shared.proposals:
            yield from self.transaction(state, proposal)

    def leaders_moves(self, state: State) -> Iterator[tuple[str, State]]:
        shared = state.shared
        move = self.leaders_move(state)
        if (
            shared.epoch
            and not shared.broken
            and not all(
                self.phase(shared, state.nodes[i]) in ("stopped", "finished") for i in self.members(shared.epoch)
            )
        ):
            record = self.records[shared.epoch]
            assert record is not None
            gone = any(
                not state.nodes[int(e.node.name)].leased
                or state.nodes[int(e.node.name)].incarnation != int(e.node.incarnation)
                for e in record.nodes
            )
            if gone:
                yield "the epoch is broken", state._replace(shared=shared._replace(broken=True))
        if isinstance(move, RequestStop) and not shared.stop:
            yield "ranks are asked to stop", state._replace(shared=shared._replace(stop=True))
        if isinstance(move, Finish):
            self.check_end(state, move)
            yield f"the run ends: {move.reason}", state._replace(shared=shared._replace(end=move.reason))
        if isinstance(move, MakeEpoch) and all(
            p.leader != shared.leader or p.after != shared.epoch for p in shared.proposals
        ):
            yield from self.decision(state, move)
        if isinstance(move, EvictNode):
            raise Violation(f"{move} although every node with a lease answers")

    def decision(self, state: State, move: MakeEpoch) -> Iterator[tuple[str, State]]:
        shared = state.shared
        left = [(i, node.held) for i, node in enumerate(state.nodes) if node.leased and self.answered(state, i)]
        lineage = self.lineage(shared.epoch)
        restore = self.rules.choose(
            [self.inventory(*each) for each in left], lineage=lineage, committed=len(shared.committed)
        )
        if restore is None:
            if shared.lost <= shared.tolerated:
                raise Violation("no whole step is found")
            yield "no step is whole", state._replace(shared=shared._replace(end="no whole step"))
            return
        if shared.lost <= shared.tolerated:
            self.check_committed(shared, left, "")
        stopped = {node.rank.step for node in state.nodes if node.rank is not None and node.rank.status == "stopped"}
        if not shared.broken and stopped and shared.lost <= shared.tolerated and {restore.start.step} != stopped:
            raise Violation(f"a planned stop at {stopped} goes on from step {restore.start.step}")
        index = self.record(state, move, restore)
        self.decided.add((self.number(index), move.nodes, restore.start, tuple(lineage.items())))
        proposal = Proposal(shared.leader, shared.epoch, index)
        after = state._replace(shared=shared._replace(proposals=tuple(sorted((*shared.proposals, proposal)))))
        yield f"node {shared.leader} decides on {move.nodes} from {restore.start}", after

    def transaction(self, state: State, proposal: Proposal) -> Iterator[tuple[str, State]]:
        shared = state.shared
        if not state.nodes[proposal.leader].up:
            rest = tuple(each for each in shared.proposals if each != proposal)
            yield (
                f"node {proposal.leader} dies with its decision",
                state._replace(shared=shared._replace(proposals=rest)),
            )
            return
        rest = tuple(each for each in shared.proposals if each != proposal)
        shared = shared._replace(proposals=rest)
        valid = (
            shared.epoch == proposal.after and shared.leader == proposal.leader and state.nodes[proposal.leader].leased
        )
        if valid or not self.rules.compares:
            if self.number(proposal.epoch) <= self.number(shared.epoch):
                raise Violation(f"epoch {self.number(proposal.epoch)} is made after epoch {self.number(shared.epoch)}")
            shared = shared._replace(epoch=proposal.epoch, broken=False, stop=False)
        yield f"transaction of node {proposal.leader}: {valid}", state._replace(shared=shared)

    def failures_of(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        node, shared = state.nodes[i], state.shared
        if not node.up:
            if shared.returns:
                after = Node(True, True, node.incarnation + 1, self.number(shared.epoch), None, frozenset())
                yield (
                    f"node {i} comes back empty",
                    self.with_node(state._replace(shared=shared._replace(returns=shared.returns - 1)), i, after),
                )
            return
        if not shared.failures:
            return
        state = state._replace(shared=shared._replace(failures=shared.failures - 1))
        hurt = state._replace(shared=state.shared._replace(lost=shared.lost + 1)) if node.leased else state
        lost = self.with_node(hurt, i, node._replace(up=False, leased=False, rank=None, held=frozenset()))
        yield f"!node {i} is lost", self.after_failure(lost, i)
        if node.leased:
            yield f"!node {i} is cut off", self.after_failure(self.with_node(hurt, i, node._replace(leased=False)), i)
        if node.rank is not None and node.rank.epoch == shared.epoch and node.leased:
            broken = state._replace(shared=state.shared._replace(broken=True))
            dead = self.with_node(broken, i, node._replace(rank=None, fence=self.number(shared.epoch)))
            yield f"!the rank of node {i} dies", self.after_failure(dead, i)
        if i == shared.leader and node.leased and shared.proposals:
            others = [k for k, other in enumerate(state.nodes) if k != i and other.leased]
            if others:
                yield (
                    f"!node {i} is paused, node {others[0]} leads",
                    state._replace(shared=state.shared._replace(leader=others[0])),
                )
        for unit in node.held:
            if unit.good and unit.owner == i:
                damaged = node._replace(held=node.held - {unit} | {unit._replace(good=False)})
                yield f"!a byte of step {unit.step} on node {i} flips", self.with_node(hurt, i, damaged)

    def after_failure(self, state: State, failed: int) -> State:
        """The state in which a failure of a node leaves the others."""
        return state

    @staticmethod
    def with_node(state: State, i: int, node: Node) -> State:
        return State((*state.nodes[:i], node, *state.nodes[i + 1 :]), state.shared)
