"""Leaves out orders of events that lead to what others lead to, and takes for one state what nobody can tell apart."""

import dataclasses
from collections.abc import Iterator

from hetero.elastic.records import Epoch, RestorePoint
from hetero.elastic.recovery import Restore, last_steps
from tests.helpers.protocol_invariants import BEFORE
from tests.helpers.protocol_moves import RESULT, WRITTEN, ProtocolMoves
from tests.helpers.protocol_state import GONE, Held, History, Node, Shared, State, info

LAST = "last"
"""Id of an epoch that nothing can disturb any more."""


class ReducedMoves(ProtocolMoves):
    """Visits every state that can be reached.

    steps: of the run; failures: how many may happen; returns: how many nodes may come back.
    reduced: leave out orders that lead to what another order leads to:

        * The ranks of an epoch end in the moment in which it breaks. What they could do between the failure and their
          end touches no node that failed, so that they could do it before the failure just as well, and a failure may
          come at any time.

        and take for one what nobody can tell apart (only where nodes and leader follow the real rules, as some
        mutants read more):

        * A decision on an epoch that is not the newest is forgotten: its transaction changes nothing, now and later,
          unless the store may go back to that epoch.
        * Which epochs nodes remember is left out where the store never goes back: it is that of the store, or came
          before it, so that it decides nothing.
        * If no node ever comes back (none may return, no agent has ended that is started again, and the store can bring
          that about no more), one without a lease has nothing for anybody. A copy of an epoch that is over is
          forgotten if its step is beyond the lineage, or lacks a unit on all nodes together: copies of it do not
          become more, a lineage keeps its limits or loses the epoch, and ``choose_step`` takes whole steps within the
          lineage only. Where a node remembers an epoch that the store does not have, all copies are kept, and so they
          are where a decision that was made with fewer nodes waits for its transaction.
        * Which node had what is of no use in the record of an epoch that has restored, or never will.
        * If no more failure can happen either, of nodes or store: the choice among the copies that are left is made,
          so that others have no reader. If all that an epoch restores is whole somewhere, all its ranks restore it,
          and in one order: what a rank does that has restored already touches no copy of an epoch before. Once they
          all have, nobody reads a copy, and all that can be seen of writes, fetches and results is the next sum of
          votes, which is that of all (every copy was made), less than 0 (a damaged one was found), or neither. So
          results arrive at once, copies are all made before an all-reduce or none is, and good ones are forgotten, as
          they can be made again: what is not made before one all-reduce may be before the next, as in the other
          orders. A damaged one is kept, and so is the knowledge of it. What the epochs before were called makes no
          difference to these ranks.
    """

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        if not state.shared.end and self.trains_to_the_end(state):
            yield from self.events_to_the_end(state)
        else:
            yield from super().successors(state)

    def after_failure(self, state: State, failed: int) -> State:
        """Ends all ranks of an epoch that has lost one, see ``reduced``."""
        record = self.records[state.shared.epoch]
        if not self.reduced or record is None or str(failed) not in {each.node.name for each in record.nodes}:
            return state
        nodes = tuple(
            node._replace(rank=None, fence=record.number) if node.leased or len(record.nodes) > 1 else node
            for node in state.nodes
        )
        return State(nodes, state.shared._replace(broken=True))

    # What is left out, see ``reduced``.

    def without_what_is_over(self, state: State) -> State:
        """The state without what nobody reads any more, and with names that do not tell more than is read."""
        shared = state.shared
        if not self.forgets or shared.end:
            return state
        number = self.number(shared.epoch)
        nodes = tuple(
            node if node.fence in (0, number) else node._replace(fence=number if node.fence > number else 0)
            for node in state.nodes
        )
        proposals = shared.proposals
        if not shared.rewinds:
            proposals = tuple(each for each in proposals if each.after == shared.epoch)
        if not self.may_return(state):
            nodes = tuple(node if node.leased or node.rank else GONE for node in nodes)
            nodes = self.without_copies_that_are_over(nodes, shared)
            if not shared.failures:
                leader = next((i for i, node in enumerate(nodes) if node.leased), shared.leader)
                proposals = tuple(each for each in proposals if each.leader == leader)
                shared = shared._replace(leader=leader)
        state = self.with_plain_records(self.with_all_ranks(State(nodes, shared._replace(proposals=proposals))))
        return self.with_one_past(self.to_the_next_all_reduce(state)) if self.trains_to_the_end(state) else state

    def may_return(self, state: State) -> bool:
        """Whether a node without a lease may yet come back with what it has, or the store with an earlier record.

        Where nodes leave they may: one whose time is over is started again.
        """
        shared = state.shared
        if shared.leaves:
            return True
        if self.returns or shared.rewinds or shared.went_back or shared.refusals or shared.refuses or shared.reopens:
            return True
        return any(node.ended or node.leaves for node in state.nodes)

    def without_copies_that_are_over(self, nodes: tuple[Node, ...], shared: Shared) -> tuple[Node, ...]:
        key = (
            shared.epoch,
            shared.broken,
            shared.failures > 0,
            shared.proposals,
            tuple((n.leased, n.rank is None, n.held, n.seen, n.knows) for n in nodes),
        )
        if key not in self.kept:
            self.kept[key] = self.copies_that_count(nodes, shared)
        kept = zip(nodes, self.kept[key], strict=True)
        return tuple(node if node.held == held else node._replace(held=held) for node, held in kept)

    def copies_that_count(self, nodes: tuple[Node, ...], shared: Shared) -> tuple[frozenset[Held], ...]:
        """Of every node those that some leader may choose, or that a rank still votes on."""
        record = self.records[shared.epoch]
        newest = self.ancestry(shared.epoch)
        if record is None or not all(newest.follows(self.ancestry(node.seen)) for node in nodes):
            return tuple(node.held for node in nodes)
        is_quiet = shared.broken and all(node.rank is None for node in nodes)
        limits = last_steps(record.lineage)
        there: dict[tuple[int, int], set[int]] = {}
        for each in (each for node in nodes for each in node.held):
            there.setdefault((each.epoch, each.step), set()).add(each.owner)

        def counts(each: Held) -> bool:
            if each.epoch == shared.epoch and not is_quiet:
                return True
            limit = limits.get(self.number(each.epoch), -1)
            owners = {owner for owner, _ in self.units_of(each.epoch)}
            return (limit is None or each.step <= limit) and there[each.epoch, each.step] == owners

        held = tuple(frozenset(filter(counts, node.held)) for node in nodes)
        if shared.failures or (shared.broken and not is_quiet):
            return held
        restored = None
        if is_quiet:
            left = [(i, each, nodes[i].seen, nodes[i].knows) for i, each in enumerate(held) if nodes[i].leased]
            found = self.find(left, shared).restore
            if found is None or self.read({i: each for i, each, _, _ in left}, found)[0] is None:
                return held
            if any(self.start(each.epoch) != found.start for each in shared.proposals):
                return held
            restored = found.start
        elif any((rank := nodes[i].rank) is None or rank.epoch != shared.epoch for i in self.members(shared.epoch)):
            if not self.will_restore(nodes, record):
                return held
            restored = record.start
        return tuple(
            frozenset(
                each
                for each in of_node
                if (each.epoch == shared.epoch and not is_quiet)
                or (restored is not None and (self.number(each.epoch), each.step) == (restored.epoch, restored.step))
            )
            for of_node in held
        )

    def will_restore(self, nodes: tuple[Node, ...], record: Epoch) -> bool:
        """Whether all nodes of an epoch are there, and all that they restore is whole somewhere."""
        held = {i: node.held for i, node in enumerate(nodes) if node.leased}
        members = [(int(each.node.name), each.node) for each in record.nodes]
        return all(nodes[i].leased and info(i, nodes[i]) == node for i, node in members) and (
            self.read(held, Restore(start=record.start, sources=record.sources))[0] is not None
        )

    def with_plain_records(self, state: State) -> State:
        """With records that do not tell who had what, where that has been restored or will not be."""
        shared = state.shared
        members = self.members(shared.epoch)
        is_needed = not shared.broken and any(
            (rank := state.nodes[i].rank) is None or rank.epoch != shared.epoch for i in members
        )

        def of(index: int) -> int:
            return index if index == shared.epoch and is_needed else self.plain(index)

        indices = {shared.epoch, *(each.epoch for node in state.nodes for each in node.held)}
        if all(of(index) == index for index in indices):
            return state
        nodes = tuple(
            node._replace(
                held=frozenset(each._replace(epoch=of(each.epoch)) for each in node.held),
                rank=node.rank and node.rank._replace(epoch=of(node.rank.epoch)),
            )
            for node in state.nodes
        )
        proposals = tuple(each._replace(after=of(each.after)) for each in shared.proposals)
        return State(nodes, shared._replace(epoch=of(shared.epoch), proposals=proposals))

    def trains_to_the_end(self, state: State) -> bool:
        """Whether nothing can fail any more, no node ever comes back, and all ranks of an epoch have restored."""
        shared = state.shared
        if not self.forgets or self.may_return(state) or shared.went_back:
            return False
        if shared.failures or shared.broken or shared.proposals or shared.end:
            return False
        members = self.members(shared.epoch)
        ranks = [state.nodes[i].rank for i in members]
        return bool(ranks) and all(rank is not None and rank.epoch == shared.epoch for rank in ranks)

    def events_to_the_end(self, state: State) -> Iterator[tuple[str, State]]:
        """The next all-reduce, with nothing copied or with everything."""
        copied = state
        while events := self.local_events(copied):
            _, copied = events[0]
        for each in dict.fromkeys((state, copied)):
            yield from self.all_reduces(each)
        yield from self.saves(state)
        yield from self.leader_events(state)

    def local_events(self, state: State) -> list[tuple[str, State]]:
        """What ranks do by themselves; the arrival of results first, then writes, for which these may have to wait."""
        events = [event for i, node in enumerate(state.nodes) if node.up for event in self.rank_events(state, i)]
        return sorted(events, key=lambda event: (not event[0].endswith(RESULT), WRITTEN not in event[0]))

    def to_the_next_all_reduce(self, state: State) -> State:
        """With all results taken in; what a rank has to write before it can, it writes."""
        while any(node.rank is not None and node.rank.inbox is not None for node in state.nodes):
            _, state = self.local_events(state)[0]
        return state

    def with_all_ranks(self, state: State) -> State:
        """With the epoch restored everywhere, if nothing can disturb that."""
        shared, record = state.shared, self.records[state.shared.epoch]
        if self.may_return(state) or shared.went_back or record is None:
            return state
        if shared.failures or shared.broken or shared.proposals or shared.end:
            return state
        if not self.will_restore(state.nodes, record):
            return state
        while events := [event for i in self.members(shared.epoch) for event in self.agent_events(state, i)]:
            _, state = events[0]
        return state

    def with_one_past(self, state: State) -> State:
        """0 for all epochs before, 1 for the one that trains to the end; and only copies that cannot be made again."""
        shared, name = state.shared, self.name(state.shared.epoch)
        record = self.records[shared.epoch]
        assert record is not None
        start = RestorePoint(epoch=0, step=record.start.step)
        last = dataclasses.replace(
            record, number=1, start=start, ids={1: LAST}, lineage={1: start}, sources={}, failures=0
        )
        index = self.index_of(("last", record.nodes, start.step), last)
        ranks = [node.rank for node in state.nodes if node.rank is not None]
        pending = {dict(rank.protocol)["pending"] for rank in ranks}
        keepers = dict(self.units_of(shared.epoch))

        def is_fetched(copy: Held) -> bool:
            keeper = keepers[copy.owner]
            return keeper is None or any(each[:4] == copy[:4] for each in state.nodes[keeper].held)

        def of(history: History) -> History:
            return tuple(LAST if each == name else BEFORE for each in history)

        nodes = tuple(
            GONE
            if node.rank is None
            else node._replace(
                fence=0,
                seen=0,
                knows=False,
                held=frozenset(
                    each._replace(epoch=index, history=of(each.history))
                    for each in node.held
                    if each.step in pending and not each.good and not is_fetched(each)
                ),
                rank=node.rank._replace(epoch=index, history=of(node.rank.history)),
            )
            for node in state.nodes
        )
        return State(
            nodes,
            shared._replace(
                epoch=index, committed_epoch=0, committed=(), lost=0, tolerated=0, noted=True, noted_by=frozenset()
            ),
        )
