"""The newest whole step within the lineage is found, wherever its units are."""

import dataclasses

import pytest

from hetero.elastic.records import Ancestry, HeldStep, Inventory, NodeMemory, RestorePoint
from hetero.elastic.recovery import (
    INITIAL_WEIGHTS,
    OBJECT_STORE,
    BadCopy,
    Restore,
    choose_history,
    choose_step,
    last_steps,
    lineage_of,
    newest_epochs,
    why_none_is_whole,
)
from hetero.errors import CheckpointError

AB = frozenset({"a", "b"})
FIRST = {1: INITIAL_WEIGHTS}


def at(epoch: int, step: int) -> RestorePoint:
    return RestorePoint(epoch=epoch, step=step)


def held(epoch: int, step: int, units: str = "ab") -> HeldStep:
    return HeldStep(epoch=epoch, step=step, units=frozenset(units))


def node(name: str, *steps: HeldStep) -> Inventory:
    return Inventory(node=name, steps=steps, units_of_epoch={each.epoch: AB for each in steps}, id_of_epoch={})


def start_of(restore: Restore | None) -> tuple[int, int] | None:
    return None if restore is None else (restore.start.epoch, restore.start.step)


def test_units_may_lie_on_several_nodes() -> None:
    found = choose_step([node("x", held(1, 4, "a")), node("y", held(1, 4), held(1, 2))], lineage=FIRST)
    assert found == Restore(start=at(1, 4), sources={"a": ("x", "y"), "b": ("y",)})


def test_a_step_that_is_not_whole_does_not_count() -> None:
    inventories = [node("x", held(1, 4, "a"), held(1, 2, "a")), node("y", held(1, 2, "b"))]
    assert start_of(choose_step(inventories, lineage=FIRST)) == (1, 2)


def test_units_of_two_epochs_do_not_make_one_step() -> None:
    lineage = {1: INITIAL_WEIGHTS, 2: at(1, 4)}
    inventories = [node("x", held(1, 4, "a")), node("y", held(2, 4, "b"))]
    assert choose_step(inventories, lineage=lineage, committed=4) is None


def test_the_object_store_has_what_nodes_lack() -> None:
    nodes = [node("x", held(1, 4, "a"), held(1, 2, "a"))]
    found = choose_step(nodes, lineage=FIRST, stored=[held(1, 2)])
    assert found == Restore(start=at(1, 2), sources={"a": ("x",), "b": ()})
    assert found.from_store == {"b"}


def test_copies_of_a_history_that_was_given_up_do_not_count() -> None:
    lineage = lineage_of(3, at(1, 4), {1: INITIAL_WEIGHTS, 2: at(1, 4)})
    assert lineage == {1: INITIAL_WEIGHTS, 3: at(1, 4)}
    assert last_steps(lineage) == {0: 0, 1: 4, 3: None}
    inventories = [node("x", held(2, 9), held(1, 6), held(3, 5))]
    assert start_of(choose_step(inventories, lineage=lineage, stored=[held(2, 8)])) == (3, 5)


def test_the_newer_epoch_is_preferred_for_a_step_that_two_have() -> None:
    lineage = {1: INITIAL_WEIGHTS, 2: at(1, 4)}
    assert start_of(choose_step([node("x", held(1, 4), held(2, 4))], lineage=lineage)) == (2, 4)
    inventories = [node("x", held(1, 4), held(2, 4, "a"))]
    assert start_of(choose_step(inventories, lineage=lineage, stored=[held(2, 4)])) == (1, 4)


def test_the_first_epoch_takes_what_was_published_and_nothing_of_earlier_runs() -> None:
    leftover = [node("x", held(7, 50))]
    assert choose_step(leftover, lineage={}) == Restore(start=INITIAL_WEIGHTS, sources={})
    stored = [held(5, 60), held(6, 40), held(6, 30)]
    assert choose_step(leftover, lineage={}, stored=stored) == Restore(start=at(6, 40), sources={"a": (), "b": ()})


def test_what_was_there_before_the_run_belongs_to_every_lineage() -> None:
    assert start_of(choose_step([], lineage={4: at(0, 30)}, stored=[held(0, 30), held(0, 60)])) == (0, 30)


def test_bad_copies_are_out() -> None:
    nodes = [node("x", held(1, 4)), node("y", held(1, 4, "a"), held(1, 2))]
    bad = {BadCopy(node="x", epoch=1, step=4, unit="a")}
    assert choose_step(nodes, lineage=FIRST, bad=bad) == Restore(start=at(1, 4), sources={"a": ("y",), "b": ("x",)})
    bad.add(BadCopy(node="x", epoch=1, step=4, unit="b"))
    assert start_of(choose_step(nodes, lineage=FIRST, bad=bad)) == (1, 2)
    stored = [held(1, 4)]
    assert start_of(choose_step(nodes, lineage=FIRST, bad=bad, stored=stored)) == (1, 4)
    bad.add(BadCopy(node=OBJECT_STORE, epoch=1, step=4, unit="b"))
    assert start_of(choose_step(nodes, lineage=FIRST, bad=bad, stored=stored)) == (1, 2)


def test_every_bad_copy_leaves_fewer_to_try() -> None:
    """So recovery ends, however much is damaged."""
    nodes, bad = [node("x", held(1, 4), held(1, 2)), node("y", held(1, 4))], set()
    tries = 0
    while (found := choose_step(nodes, lineage=FIRST, bad=bad, committed=4)) is not None:
        unit, names = next((unit, names) for unit, names in found.sources.items() if names)
        bad.add(BadCopy(node=names[0], epoch=found.start.epoch, step=found.start.step, unit=unit))
        tries += 1
    assert tries == 3


def test_a_run_begins_anew_only_if_nothing_was_committed() -> None:
    lineage = {1: INITIAL_WEIGHTS, 2: INITIAL_WEIGHTS}
    assert choose_step([node("x")], lineage=lineage) == Restore(start=INITIAL_WEIGHTS, sources={})
    nodes = [node("x", held(1, 4, "a"))]
    assert choose_step(nodes, lineage=FIRST, committed=4) is None
    message = why_none_is_whole(nodes, lineage=FIRST, committed=4)
    assert "among x, and step 4 had been committed: of step 4 they lack b;" in message
    assert "no copies of this run" in why_none_is_whole([], lineage=FIRST, committed=4)
    assert "and etcd does not know any more" in why_none_is_whole([], lineage=FIRST, committed=None)


def epochs(*ids: str, lineage: dict[int, RestorePoint] | None = None) -> Ancestry:
    """An epoch and those before it, by their ids."""
    return Ancestry(ids=dict(enumerate(ids, start=1)), lineage=lineage or {1: INITIAL_WEIGHTS})


def remembers(name: str, newest: Ancestry, *steps: HeldStep, has_committed: bool = False) -> Inventory:
    """A node whose copies are of the epochs that it remembers."""
    memory = NodeMemory(newest=newest, has_committed=has_committed)
    return dataclasses.replace(node(name, *steps), id_of_epoch=newest.ids, memory=memory)


class TestStoreThatWentBack:
    NONE, ONE, TWO = Ancestry(), epochs("1"), epochs("1", "2", lineage={1: INITIAL_WEIGHTS, 2: at(1, 4)})

    def test_epochs_of_one_history_are_told_from_those_of_another(self) -> None:
        assert self.TWO.follows(self.ONE)
        assert self.TWO.follows(self.TWO)
        assert self.ONE.follows(self.NONE)
        assert not self.ONE.follows(self.TWO)
        assert not epochs("1", "other").follows(self.TWO)
        assert not epochs("other", "2").follows(self.ONE)

    @pytest.mark.parametrize(
        ("in_store", "known", "newest"),
        [
            (TWO, [], [TWO]),
            (TWO, [ONE, TWO, NONE], [TWO]),
            (ONE, [TWO, ONE], [TWO]),
            (NONE, [ONE, TWO], [TWO]),
            (NONE, [], [NONE]),
            # Others went on before it was noticed, and have ranks of it; or only wrote it.
            (epochs("1", "b"), [TWO, epochs("1", "b")], [epochs("1", "b"), TWO]),
            (epochs("1", "b"), [TWO, ONE], [TWO]),
            (epochs("1", "b"), [ONE], [epochs("1", "b")]),
        ],
    )
    def test_the_newest_epoch_is_that_of_the_store_or_one_that_followed_it(
        self, in_store: Ancestry, known: list[Ancestry], newest: list[Ancestry]
    ) -> None:
        assert newest_epochs(in_store, known) == newest

    @pytest.mark.parametrize("in_store", [NONE, ONE, TWO])
    def test_the_run_goes_on_from_the_copies_of_the_newest_epoch_that_nodes_remember(self, in_store: Ancestry) -> None:
        found = choose_history([remembers("x", self.TWO, held(2, 9)), remembers("y", self.ONE)], in_store=in_store)
        assert (found.newest, start_of(found.restore)) == (self.TWO, (2, 9))

    def test_what_was_done_beyond_the_lineage_stays_given_up(self) -> None:
        inventories = [remembers("x", self.TWO, held(1, 4)), remembers("y", self.ONE, held(1, 7))]
        assert start_of(choose_history(inventories, in_store=self.ONE).restore) == (1, 4)

    def test_copies_of_another_epoch_with_the_same_number_do_not_count(self) -> None:
        other = remembers("y", epochs("1", "b"), held(2, 9, "b"))
        found = choose_history([remembers("x", self.TWO, held(2, 9, "a")), other], in_store=self.TWO, noted=9)
        assert found.restore is None
        assert [each.steps for each in found.copies] == [(held(2, 9, "a"),), ()]

    def test_of_two_histories_the_one_with_the_newest_step_goes_on(self) -> None:
        other = epochs("1", "b", lineage={1: INITIAL_WEIGHTS, 2: at(1, 2)})
        for steps, newest in (((9, 7), self.TWO), ((7, 9), other), ((9, 9), other)):
            inventories = [remembers("x", self.TWO, held(2, steps[0])), remembers("y", other, held(2, steps[1]))]
            assert choose_history(inventories, in_store=other).newest == newest

    def test_nothing_begins_again_where_a_commit_may_have_been_forgotten(self) -> None:
        fresh = choose_history([remembers("x", self.ONE)], in_store=self.ONE)
        assert (fresh.committed, start_of(fresh.restore)) == (0, (0, 0))
        for in_store, has_committed in ((self.NONE, False), (self.ONE, True)):
            found = choose_history([remembers("x", self.ONE, has_committed=has_committed)], in_store=in_store)
            assert (found.committed != 0, found.restore) == (True, None)

    def test_a_node_remembers_what_followed_and_what_it_takes_part_in(self) -> None:
        other = epochs("1", "b")
        assert self.TWO.replaces(self.ONE, takes_part=False)
        assert not self.ONE.replaces(self.TWO, takes_part=True)
        assert not other.replaces(self.TWO, takes_part=False)
        assert other.replaces(self.TWO, takes_part=True)


def test_an_inventory_without_units_of_its_epoch_has_nothing() -> None:
    broken = Inventory(node="x", steps=(held(1, 4),), units_of_epoch={}, id_of_epoch={})
    empty = Inventory(node="y", steps=(held(1, 5, ""),), units_of_epoch={1: frozenset()}, id_of_epoch={})
    assert choose_step([broken], lineage=FIRST, committed=4) is None
    assert choose_step([empty], lineage=FIRST, committed=4) is None


def test_reports_of_bad_copies_are_read() -> None:
    bad = BadCopy(node="x", epoch=2, step=40, unit="rank_00001.held_00003")
    assert BadCopy.parse(str(bad)) == bad
    for detail in ("", "x/1/2", "x/one/2/u", "x/1/2/u/v"):
        with pytest.raises(CheckpointError, match="NODE/EPOCH/STEP/UNIT"):
            BadCopy.parse(detail)
