"""Events of nodes that leave, up to all of them: notices, stops that ranks see, ends of agents, and who leads then."""

from collections.abc import Iterator

from hetero.elastic.job_store import JobState
from hetero.elastic.records import NodeReport, Notice, RankReport
from tests.helpers.protocol_invariants import ProtocolInvariants
from tests.helpers.protocol_state import GONE, Node, Shared, State, Stop, Violation, info


class LeavingMoves(ProtocolInvariants):
    """What a notice brings about, in addition to the stop that the leader asks for.

    The leader knows no deadline of a notice: a node that it knows to have no time is a loss. That the time of one is
    over before the others have gone on is a failure: its agent ends, keeps the copies, and is started again.
    """

    def after_failure(self, state: State, failed: int) -> State:
        """The state in which a failure of a node leaves the others."""
        return state

    def leaving_events(self, state: State, i: int) -> Iterator[tuple[str, State]]:
        """A notice, and the end of an agent that has one."""
        node, shared = state.nodes[i], state.shared
        if not node.leased or shared.refuses:
            return
        if not node.leaves:
            if shared.leaves and shared.epoch:
                noticed = state._replace(shared=shared._replace(leaves=shared.leaves - 1))
                yield f"node {i} is to leave", self.with_node(noticed, i, node._replace(leaves=True))
            return
        if shared.failures:
            late = state._replace(shared=shared._replace(failures=shared.failures - 1))
            late = self.with_node(late, i, self.given_up(node))
            yield f"!the time of node {i} is over", self.after_failure(late, i)
        if self.has_left(state, i):
            after = self.with_node(state, i, GONE._replace(incarnation=node.incarnation, fence=node.fence))
            self.check_left(after, i)
            yield f"node {i} has left", after

    def given_up(self, node: Node) -> Node:
        """A node whose agent has ended with another code than 0."""
        held = node.held if self.rules.keeps_copies else frozenset()
        return node._replace(leased=False, rank=None, fence=0, ended=True, leaves=False, held=held)

    def has_left(self, state: State, i: int) -> bool:
        """Whether the agent of a node that leaves ends with exit code 0: the others go on without it."""
        shared, rank = state.shared, state.nodes[i].rank
        if rank is None or rank.epoch != shared.epoch:
            return rank is None and self.job_state(state).goes_on_without(str(i))
        is_over = all(self.phase(shared, node) == "stopped" for node in state.nodes if node.leased)
        return not self.rules.stays_until_saved and is_over and not self.stays_without(state, i)

    def job_state(self, state: State) -> JobState:
        """What agents read of these nodes."""
        shared = state.shared
        reports = {
            str(i): NodeReport(
                node=str(i),
                incarnation=str(node.incarnation),
                ended=node.fence,
                ranks=(
                    RankReport(
                        epoch=self.number(node.rank.epoch),
                        rank=0,
                        phase=self.phase(shared, node) or "step",
                        committed=dict(node.rank.protocol)["committed"],
                    ),
                ),
            )
            for i, node in enumerate(state.nodes)
            if node.leased and node.rank is not None
        }
        leased = [(i, node) for i, node in enumerate(state.nodes) if node.leased]
        return JobState(
            nodes={str(i): info(i, node) for i, node in leased},
            notices={str(i): Notice(node=str(i), reason="", version="") for i, node in leased if node.leaves},
            epoch=self.records[shared.epoch],
            reports=reports,
        )

    def stays_without(self, state: State, i: int) -> bool:
        """Whether another node is there that has no notice."""
        return any(node.leased and not node.leaves for k, node in enumerate(state.nodes) if k != i)

    def may_lead(self, state: State, i: int) -> bool:
        """Who leaves leads only if no other stays."""
        node = state.nodes[i]
        return node.leased and not (node.leaves and self.stays_without(state, i))

    def stops_that_ranks_see(self, shared: Shared) -> list[Stop]:
        """What an all-reduce may find: the stop may have reached no rank yet, or only the one that was asked for first.

        Ranks ask each other in a second all-reduce whether the stop is for good. That comes to the same as one: what
        the leader asks for in between it could ask for before the first.
        """
        return ["", "plain", "for good"] if shared.stop == "for good" else ["", "plain"]

    def check_left(self, state: State, i: int) -> None:
        """A node deletes its copies when it has left: what is committed is on the others, or saved."""
        shared = state.shared
        if shared.saved >= len(shared.committed) or shared.lost > shared.tolerated:
            return
        left = [
            (k, node.held, node.seen, node.knows)
            for k, node in enumerate(state.nodes)
            if node.up and (node.leased or node.ended)
        ]
        if not left:
            raise Violation(f"node {i} ends with exit code 0, and step {len(shared.committed)} is nowhere")
        self.check_committed(shared, left, f" when node {i} has left")

    @staticmethod
    def with_node(state: State, i: int, node: Node) -> State:
        return State((*state.nodes[:i], node, *state.nodes[i + 1 :]), state.shared)
