"""Links are measured where a communicator is created by all of its ranks, or they wait for the others for ever.

NCCL creates it at the first call of a group. Two ranks that send over a group of more are in that call alone.
"""

import pytest
import torch

from hetero.doctor.links import measure_links
from hetero.profiling.rank_links import RankDevice, measure_transfers
from tests.helpers.first_contact import blocking_first_contacts
from tests.helpers.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

CPU = torch.device("cpu")
TIMEOUT_S = 10.0


def operations_of_a_profile(rank: int, nodes: str) -> list[tuple[str, tuple[int, ...]]]:
    """Return what ``hetero profile run`` measured among ranks on these nodes, a letter for each."""
    ranks = [RankDevice(node=node, device="cpu", hardware="a processor") for node in nodes]
    with blocking_first_contacts(timeout_s=TIMEOUT_S):
        transfers = measure_transfers(ranks, device=CPU, seconds=0.5, say=lambda _: None)
    assert all(transfer.fit.bandwidth_gb_per_s > 0 for transfer in transfers)
    return [(transfer.operation, transfer.ranks) for transfer in transfers]


@pytest.mark.parametrize(
    ("nodes", "pair"),
    [pytest.param("aaa", (0, 1), id="three-ranks-of-a-node"), pytest.param("aab", (0, 2), id="two-nodes")],
)
def test_a_profile_measures_a_pair_among_more_ranks(nodes: str, pair: tuple[int, int]) -> None:
    by_rank = run_ranks(operations_of_a_profile, len(nodes), nodes)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert ("send", pair) in by_rank[0]


def pairs_of_the_doctor(rank: int) -> list[tuple[int, int]]:
    with blocking_first_contacts(timeout_s=TIMEOUT_S):
        found = measure_links([(0, 1), (1, 2)], hosts=["a"] * 3, device=CPU, seconds=0.5)
    return [each.ranks for each in found]


def test_the_doctor_measures_pairs_of_a_world_that_has_not_met() -> None:
    assert run_ranks(pairs_of_the_doctor, 3) == [[(0, 1), (1, 2)]] * 3
