"""All ranks begin the same copies and commit the same steps; a committed copy is never overwritten."""

import pytest

from hetero.elastic.copy_protocol import CopyProtocol


def protocol(*, start_step: int = 0, world_size: int = 2) -> CopyProtocol:
    return CopyProtocol(start_step=start_step, world_size=world_size)


def committed_at(every: int, *, duration: int, num_steps: int, start_step: int = 0) -> dict[int, int]:
    """By step, what its all-reduce commits, where a copy is whole so many steps after its own."""
    rank, found = protocol(start_step=start_step, world_size=1), {}
    if rank.wants_copy(start_step, every=every, last=False):
        rank.begin(start_step)
    for step in range(start_step + 1, start_step + num_steps + 1):
        whole = rank.pending if rank.pending is not None and step - rank.pending >= duration else None
        if (committed := rank.decide(rank.vote(whole))) is not None:
            found[step] = committed
        if rank.wants_copy(step, every=every, last=False):
            rank.begin(step)
    return found


def test_initial_weights_are_not_copied_and_a_restored_step_is_at_once() -> None:
    assert not protocol().wants_copy(0, every=1, last=False)
    assert protocol(start_step=7).wants_copy(7, every=5, last=False)
    assert committed_at(3, duration=1, num_steps=8) == {4: 3, 7: 6}
    assert committed_at(3, duration=1, num_steps=8, start_step=10) == {11: 10, 14: 13, 17: 16}


def test_a_copy_that_takes_longer_than_the_interval_delays_the_next() -> None:
    assert committed_at(2, duration=5, num_steps=13) == {7: 2, 12: 7}


@pytest.mark.parametrize("missing", [0.0, 1.0])
def test_only_all_votes_commit(missing: float) -> None:
    rank = protocol(world_size=3)
    rank.begin(4)
    assert rank.decide(3.0 - missing) == (None if missing else 4)
    assert (rank.committed, rank.pending) == ((0, 4) if missing else (4, None))


def test_votes_without_a_pending_step_commit_nothing() -> None:
    rank = protocol()
    assert rank.vote(0) == rank.vote(None) == 0.0
    assert rank.decide(2.0) is None


def test_a_rank_votes_for_the_pending_step_alone() -> None:
    rank = protocol()
    rank.begin(4)
    assert [rank.vote(whole) for whole in (None, 3, 4)] == [0.0, 0.0, 1.0]


def test_the_slot_of_the_committed_step_is_kept() -> None:
    rank = protocol(world_size=1)
    slots = []
    for step in (1, 2, 3, 4):
        slots.append(rank.begin(step))
        rank.decide(1.0)
    assert slots == [0, 1, 0, 1]


def test_the_last_step_takes_the_place_of_a_pending_one() -> None:
    rank = protocol(world_size=1)
    kept = rank.begin(1)
    rank.decide(1.0)
    pending = rank.begin(2)
    assert not rank.wants_copy(3, every=1, last=False)
    assert rank.wants_copy(3, every=1, last=True)
    assert rank.begin(3) == pending != kept
    assert (rank.committed, rank.pending) == (1, 3)
    assert rank.vote(2) == 0.0


def test_the_last_step_is_not_copied_twice() -> None:
    rank = protocol(world_size=1)
    rank.begin(3)
    assert not rank.wants_copy(3, every=1, last=True)
    rank.decide(1.0)
    assert not rank.wants_copy(3, every=1, last=True)


@pytest.mark.parametrize("world_size", [1, 2, 1000])
def test_a_copy_that_cannot_become_whole_is_given_up(world_size: int) -> None:
    rank = protocol(start_step=3, world_size=world_size)
    rank.begin(3)
    assert rank.decide(rank.vote(None, failed=True) + (world_size - 1)) is None
    assert (rank.committed, rank.pending) == (0, None)
    assert not rank.wants_copy(4, every=2, last=False)
    assert rank.wants_copy(5, every=2, last=False)
    assert rank.vote(None, failed=True) == 0.0


def test_a_last_copy_that_is_given_up_is_made_again() -> None:
    rank = protocol(world_size=1)
    kept = rank.begin(1)
    rank.decide(1.0)
    slot = rank.begin(2)
    rank.decide(rank.vote(None, failed=True))
    assert rank.wants_copy(2, every=1, last=True)
    assert rank.begin(2) == slot != kept
    assert rank.committed == 1
