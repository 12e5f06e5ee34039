"""What a rank waits for while it is on the wire, and what it waits for otherwise."""

import pytest

from hetero.cost.simulation.exposed_communication import exposed_s


def test_a_transfer_beside_a_compute_is_hidden() -> None:
    assert exposed_s([(0, 2), (2, 4)], [(0, 2)]) == 0


def test_a_wait_for_a_transfer_is_exposed() -> None:
    assert exposed_s([(0, 2), (3, 4)], [(1, 3)]) == pytest.approx(1)


def test_a_wait_for_the_sender_is_a_bubble_and_no_exposure() -> None:
    assert exposed_s([(0, 2), (6, 7)], [(5, 6)]) == pytest.approx(1)


def test_what_arrives_during_a_wait_for_something_else_does_not_count() -> None:
    assert exposed_s([(0, 2), (6, 7)], [(3, 5)]) == 0


def test_the_first_input_counts_from_the_start() -> None:
    assert exposed_s([(3, 4)], [(2, 3)]) == pytest.approx(1)
