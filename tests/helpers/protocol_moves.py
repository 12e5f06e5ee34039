"""What may happen next in an explored state: every event of ranks, agents, leaders and machines."""

from collections.abc import Iterator

from hetero.elastic.leadership import EvictNode, Finish, MakeEpoch, RequestStop, Wait
from hetero.elastic.records import Epoch
from hetero.elastic.recovery import Restore
from tests.helpers.protocol_calls import snapshot
from tests.helpers.protocol_leaving import LeavingMoves
from tests.helpers.protocol_state import GONE, Held, Node, Proposal, Rank, Shared, State, Stop, Violation, info

FINISHED = "all ranks have finished"
"""How a run ends that has done what it was to do."""

RESULT, WRITTEN = "gets the result", "has written"


class ProtocolMoves(LeavingMoves):
    """All events, each with the state that it leads to. Those with ``!`` before their names are failures."""

    def initial(self) -> State:
        node = Node(up=True, leased=True, incarnation=1, fence=0, rank=None, held=frozenset())
        shared = Shared(
            0, False, "", 0, (), self.failures, self.returns, 0, (), 0, 1, "",
            rewinds=self.rewinds, refusals=self.refusals, reopens=self.reopens, leaves=self.leaves,
        )  # fmt: skip
        return State((node,) * self.nodes, shared)

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        if state.shared.end:
            yield from self.reopening(state)
            return
        if state.shared.went_back:
            yield from self.noticing(state)
            return
        for i, node in enumerate(state.nodes):
            if node.up:
                yield from self.rank_events(state, i)
                yield from self.agent_events(state, i)
                yield from self.leaving_events(state, i)
            yield from self.failures_of(state, i)
        yield from self.all_reduces(state)
        yield from self.saves(state)
        yield from self.leader_events(state)
        yield from self.store_events(state)

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
            self.check_history(history, self.ancestry(index))
            votes = sum(self.vote(state, i) for i in members)
            inbox_stops: list[Stop] = [""]
            if state.shared.stop and index == state.shared.epoch and status == "run":
                inbox_stops = self.stops_that_ranks_see(state.shared)
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
                    committed_epoch=self.number(index),
                    committed=history[:pending],
                    lost=cut + damaged,
                    tolerated=whole,
                    noted=True,
                )
            for stops in inbox_stops:
                nodes = tuple(
                    node._replace(rank=node.rank._replace(inbox=(votes, stops))) if i in members and node.rank else node
                    for i, node in enumerate(state.nodes)
                )
                asked = f"stop {stops}" if stops else "no stop"
                yield (
                    f"all-reduce of epoch {self.number(index)} after step {step}: {votes:g} votes, {asked}",
                    State(nodes, shared),
                )

    def saves(self, state: State) -> Iterator[tuple[str, State]]:
        """The last checkpoint is whole once all ranks have written their parts; then all of them have finished."""
        for index in {node.rank.epoch for node in state.nodes if node.rank is not None}:
            members = self.members(index)
            ranks = [state.nodes[i].rank for i in members]
            if all(rank is not None and rank.epoch == index and rank.status == "save" for rank in ranks):
                nodes = tuple(
                    node._replace(rank=node.rank._replace(status="finished")) if i in members and node.rank else node
                    for i, node in enumerate(state.nodes)
                )
                saved = max(rank.step for rank in ranks if rank is not None)
                yield f"step {saved} is saved", State(nodes, state.shared._replace(saved=saved))

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
            rank = rank._replace(step=step, history=(*rank.history, self.name(rank.epoch)))
            if stops or step == self.steps:
                rank = rank._replace(status="end", stop=stops)
        if rank.step > before or rank.status == "end":
            rank, held = self.maybe_copy(rank, held)
        if rank.status == "end" and dict(rank.protocol)["committed"] == rank.step:
            rank = rank._replace(status=self.status_at_end(rank))
        knows = node.knows or (bool(self.rewinds) and committed is not None)
        return node._replace(rank=rank, held=held, knows=knows)

    def status_at_end(self, rank: Rank) -> str:
        """What a rank does once its last copy is committed: it saves if the run ends, also a step that it restored."""
        if rank.stop == "for good" and not self.rules.saves_if_all_leave:
            return "finished"
        if rank.step < self.steps:
            return "save" if rank.stop == "for good" else "stopped"
        record = self.records[rank.epoch]
        assert record is not None
        return "save" if record.start.step < self.steps or self.rules.saves_again else "finished"

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
        if node.ended:
            if not shared.refuses:
                yield f"the agent of node {i} is started again", self.with_node(state, i, self.started(node, shared))
            return
        if not node.leased:
            if shared.returns and not shared.refuses:
                after = self.started(node, shared)
                yield (
                    f"node {i} comes back",
                    self.with_node(state._replace(shared=shared._replace(returns=shared.returns - 1)), i, after),
                )
            return
        old = node.rank is not None and node.rank.epoch != shared.epoch
        if old or (shared.broken and node.fence < number and i in self.members(shared.epoch)):
            fence = number if not old else max(node.fence, self.number(node.rank.epoch))  # type: ignore[union-attr]
            after = node._replace(rank=None, fence=fence, seen=self.remembered(node.seen, shared.epoch))
            yield f"node {i} ends its rank", self.with_node(state, i, after)
        record = self.records[shared.epoch]
        if record is None or shared.broken or node.rank is not None or node.fence >= number:
            return
        if any(each.node == info(i, node) for each in record.nodes):
            yield self.restored(state, i, record)

    def started(self, node: Node, shared: Shared) -> Node:
        """A node whose agent has been started again, with what it has in memory."""
        return node._replace(
            leased=True,
            incarnation=node.incarnation + 1,
            fence=self.number(shared.epoch),
            rank=None,
            seen=self.remembered(node.seen, shared.epoch),
            ended=False,
            leaves=False,
        )

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
        self.check_history(history, record.ancestry)
        protocol = snapshot(self.rules.protocol(start_step=record.start.step, world_size=len(record.nodes)))
        rank = Rank(
            state.shared.epoch, len(history), history, protocol, None, "end" if len(history) == self.steps else "run"
        )
        kept = (
            node.held
            if self.rules.keeps_old_epochs
            else frozenset(e for e in node.held if self.number(e.epoch) >= record.number)
        )
        if self.rules.tells_apart:
            kept = frozenset(
                e for e in kept if self.number(e.epoch) != record.number or self.name(e.epoch) == record.id
            )
        rank, kept = self.maybe_copy(rank, kept)
        seen = self.remembered(node.seen, state.shared.epoch, takes_part=True)
        return f"node {i} restores {history}", self.with_node(state, i, node._replace(rank=rank, held=kept, seen=seen))

    def leader_events(self, state: State) -> Iterator[tuple[str, State]]:
        shared = state.shared
        if not any(node.leased for node in state.nodes):
            if not shared.returns and not any(node.ended for node in state.nodes):
                yield "all nodes are gone", state._replace(shared=shared._replace(end="no node"))
            return
        if shared.refuses:
            return
        if not self.may_lead(state, shared.leader):
            leader = next(i for i in range(self.nodes) if self.may_lead(state, i))
            yield f"node {leader} leads", state._replace(shared=shared._replace(leader=leader))
        else:
            yield from self.leaders_moves(state)
        for proposal in shared.proposals:
            yield from self.transaction(state, proposal)

    def leaders_moves(self, state: State) -> Iterator[tuple[str, State]]:
        shared = state.shared
        move = self.leaders_move(state)
        late = self.leaders_move(state, is_late=True)
        if isinstance(move, Wait) and isinstance(late, Finish):
            yield f"the leader has waited long enough: {late.reason}", self.over(state, late)
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
        if isinstance(move, RequestStop):
            stop: Stop = "for good" if move.is_for_good else "plain"
            if stop != shared.stop:
                yield f"ranks are asked to stop: {stop}", state._replace(shared=shared._replace(stop=stop))
        if isinstance(move, Finish):
            self.check_end(state, move)
            yield f"the run ends: {move.reason}", self.over(state, move)
        if isinstance(move, MakeEpoch) and all(
            p.leader != shared.leader or p.after != shared.epoch for p in shared.proposals
        ):
            yield from self.decision(state, move)
        if isinstance(move, EvictNode):
            raise Violation(f"{move} although every node with a lease answers")

    def over(self, state: State, move: Finish) -> State:
        """The end of the job. Unless all is saved, nodes keep what they have."""
        nodes = state.nodes
        if move.exit_code and not self.rules.keeps_copies:
            nodes = tuple(node._replace(held=frozenset()) for node in nodes)
        end = FINISHED if move.exit_code == 0 else move.reason
        return State(nodes, state.shared._replace(end=end))

    def decision(self, state: State, move: MakeEpoch) -> Iterator[tuple[str, State]]:
        shared = state.shared
        left = [
            (i, node.held, node.seen, node.knows)
            for i, node in enumerate(state.nodes)
            if node.leased and self.answered(state, i)
        ]
        # Whoever is to be started again is out of reach until then.
        is_there = shared.lost + sum(node.ended for node in state.nodes) <= shared.tolerated
        must_be_kept = is_there and shared.saved < len(shared.committed)
        found = self.find(left, shared)
        restore = found.restore
        if restore is None:
            # Where the store has forgotten whether a step was committed, nobody may begin again.
            if must_be_kept and (shared.committed or not self.rewinds):
                raise Violation("no whole step is found")
            if not isinstance(self.leaders_move(state, no_step=True), Wait):
                raise Violation("the leader does not wait for nodes with copies")
            end = self.leaders_move(state, no_step=True, is_late=True)
            if not isinstance(end, Finish) or end.exit_code != 1:
                raise Violation(f"without a whole step the leader makes the move {end}")
            yield "no step is whole", self.over(state, end)
            return
        if must_be_kept:
            self.check_committed(shared, left, "")
        # Where the store has forgotten, a node that was not there cannot know either.
        remembers = not self.rewinds or any(
            knows or not self.ancestry(shared.epoch).follows(self.ancestry(seen)) for _, _, seen, knows in left
        )
        is_lost = restore.start.step == 0 and shared.saved < len(shared.committed)
        if is_lost and remembers and shared.lost <= shared.tolerated:
            raise Violation(f"{shared.committed} was committed, and the run begins with the initial weights")
        stopped = {node.rank.step for node in state.nodes if node.rank and self.phase(shared, node) == "stopped"}
        if not shared.broken and stopped and must_be_kept and {restore.start.step} != stopped:
            raise Violation(f"a planned stop at {stopped} goes on from step {restore.start.step}")
        index = self.record(state, move, found, left)
        self.decided.add((self.number(index), move.nodes, restore.start, tuple(found.newest.lineage.items())))
        start = self.history_of(found.newest, restore.start.step)[: restore.start.step]
        gives_up = not must_be_kept and start[: len(shared.committed)] != shared.committed
        proposal = Proposal(shared.leader, shared.epoch, index, gives_up)
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
            shared = self.with_epoch(shared, proposal)
        yield f"transaction of node {proposal.leader}: {valid}", state._replace(shared=shared)

    def with_epoch(self, shared: Shared, proposal: Proposal) -> Shared:
        """The store with a new epoch."""
        noted = shared.noted or proposal.epoch in self.after_commit
        noted_by = shared.noted_by | ({self.name(proposal.epoch)} if self.rewinds and noted else set())
        lost = max(shared.lost, shared.tolerated + 1) if proposal.gives_up else shared.lost
        return shared._replace(epoch=proposal.epoch, broken=False, stop="", lost=lost, noted=noted, noted_by=noted_by)

    def store_events(self, state: State) -> Iterator[tuple[str, State]]:
        """The store goes back to an earlier record, or takes no writes for a while, in which agents give up."""
        shared = state.shared
        if shared.rewinds and not shared.refuses:
            for name in ("", *self.ancestry(shared.epoch).ids.values()):
                index = self.plain(self.index_of_name[name])
                back = shared._replace(
                    epoch=index,
                    broken=False,
                    stop="",
                    noted=name in shared.noted_by,
                    went_back=True,
                    rewinds=shared.rewinds - 1,
                )
                yield f"!the store goes back to epoch {self.number(index)}", state._replace(shared=back)
        if shared.refusals and not shared.refuses:
            refusing = shared._replace(refuses=True, refusals=shared.refusals - 1)
            yield "!the store takes no writes", state._replace(shared=refusing)
        if shared.refuses:
            yield "the store takes writes again", state._replace(shared=shared._replace(refuses=False))
            for i, node in enumerate(state.nodes):
                if not node.leased or (node.rank is not None and node.rank.status not in ("stopped", "finished")):
                    continue
                if node.rank is not None and node.rank.status == "finished":
                    if shared.saved < node.rank.step:
                        raise Violation(f"node {i} ends with exit code 0 and nothing is saved")
                    after = GONE
                else:
                    after = self.given_up(node)
                yield f"node {i} gives up on the store", self.with_node(state, i, after)

    def noticing(self, state: State) -> Iterator[tuple[str, State]]:
        """After the store went back: what was decided before may be written yet; then all agents notice, and end.

        That they end in one moment leaves nothing out: until all have, nobody is asked for an inventory who has not,
        and what a rank does meanwhile it could do before the store went back.
        """
        shared = state.shared
        for proposal in shared.proposals:
            rest = tuple(each for each in shared.proposals if each != proposal)
            if self.name(proposal.after) == self.name(shared.epoch):
                # The store may have gone back to a time in which this node led.
                made = self.with_epoch(shared._replace(proposals=rest), proposal)
                yield f"transaction of node {proposal.leader}, which has not noticed", state._replace(shared=made)
        # A node that was cut off notices when it reaches the store again.
        nodes = tuple(
            self.given_up(node)._replace(knows=True) if node.up and not node.ended else node for node in state.nodes
        )
        yield (
            "the agents notice that the store went back",
            State(nodes, shared._replace(went_back=False, proposals=())),
        )

    def reopening(self, state: State) -> Iterator[tuple[str, State]]:
        """All agents of a job that was given up are started again."""
        shared = state.shared
        if shared.end == FINISHED or not shared.reopens or not any(node.up for node in state.nodes):
            return
        nodes = tuple(self.started(node, shared) if node.up else node for node in state.nodes)
        shared = shared._replace(end="", reopens=shared.reopens - 1, proposals=())
        yield "the agents are started again", State(nodes, shared)

    def failures_of(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        node, shared = state.nodes[i], state.shared
        if not node.up:
            if shared.returns and not shared.refuses:
                empty = Node(True, True, node.incarnation, 0, None, frozenset())
                after = self.started(empty, shared)
                yield (
                    f"node {i} comes back empty",
                    self.with_node(state._replace(shared=shared._replace(returns=shared.returns - 1)), i, after),
                )
            return
        if not shared.failures:
            return
        state = state._replace(shared=shared._replace(failures=shared.failures - 1))
        is_there = node.leased or node.ended
        hurt = state._replace(shared=state.shared._replace(lost=shared.lost + 1)) if is_there else state
        lost = self.with_node(hurt, i, GONE._replace(incarnation=node.incarnation, fence=node.fence))
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
