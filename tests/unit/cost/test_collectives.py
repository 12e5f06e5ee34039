"""Who waits for whom among the collectives of a step, by hand."""

from collections.abc import Mapping, Sequence

from hetero.cost.gradient_volume import CountedBucket
from hetero.cost.network import CollectiveCost, Port, TransferCost
from hetero.cost.simulation.collectives import run_collectives
from hetero.cost.simulation.exposed_communication import TimeInterval

WIRE: Port = ("out", 0, 0)

Spans = dict[tuple[int, ...], tuple[float, float]]


def phase(seconds: float, *ports: Port) -> TransferCost:
    return TransferCost(seconds=seconds, ports=tuple((port, seconds) for port in ports), num_bytes=1)


def spans(
    costs: Mapping[tuple[int, ...], Sequence[TransferCost]],
    *,
    late: Mapping[tuple[int, int], float] | None = None,
    transfers: Sequence[TimeInterval] = (),
) -> Spans:
    """Start and end of one bucket per key, in this global order, the first at the highest position.

    ``late``: by rank and position, when gradients are complete that are not so at 0.
    """
    buckets = [CountedBucket(ranks, 1, len(costs) - 1 - i) for i, ranks in enumerate(costs)]
    found = run_collectives(
        buckets,
        cost_of=lambda bucket: CollectiveCost(tuple(costs[bucket.ranks])),
        ready_s=lambda rank, position: (late or {}).get((rank, position), 0.0),
        lane_of_rank={rank: rank for ranks in costs for rank in ranks},
        transfers={WIRE: transfers},
    )
    return {span.bucket.ranks: (span.start_s, span.end_s) for span in found.spans}


def test_sums_of_one_rank_follow_one_another() -> None:
    assert spans({(0, 1): [phase(3.0)], (1, 2): [phase(2.0)]}) == {(0, 1): (0.0, 3.0), (1, 2): (3.0, 5.0)}


def test_a_bucket_does_not_wait_for_an_earlier_one_that_lacks_a_holder() -> None:
    """Rank 0 is late; rank 1 has launched both at 0, and the second has all its holders."""
    found = spans({(0, 1): [phase(3.0)], (1, 2): [phase(2.0)]}, late={(0, 1): 10.0})
    assert found == {(1, 2): (0.0, 2.0), (0, 1): (10.0, 13.0)}


def test_but_a_rank_launches_its_buckets_in_order() -> None:
    """Rank 1 has the second bucket's gradients from the start, the first one's at 4 only."""
    found = spans({(0, 1): [phase(3.0)], (1, 2): [phase(2.0)]}, late={(0, 1): 10.0, (1, 1): 4.0})
    assert found == {(1, 2): (4.0, 6.0), (0, 1): (10.0, 13.0)}


def test_an_interface_serves_first_who_is_ready_first() -> None:
    found = spans({(0, 1): [phase(3.0, WIRE)], (2, 3): [phase(2.0, WIRE)]}, late={(0, 1): 1.0})
    assert found == {(2, 3): (0.0, 2.0), (0, 1): (2.0, 5.0)}
    apart = spans({(0, 1): [phase(3.0, WIRE)], (2, 3): [phase(2.0)]})
    assert apart == {(0, 1): (0.0, 3.0), (2, 3): (0.0, 2.0)}


def test_phases_take_an_interface_one_by_one() -> None:
    """1 s inside, 2 s across, 1 s back: the interface is free again at 3 s, the ranks at 4 s."""
    hierarchical = [phase(1.0), phase(2.0, WIRE), phase(1.0)]
    found = spans({(0, 1): hierarchical, (2, 3): [phase(2.0, WIRE)]})
    assert found == {(0, 1): (0.0, 4.0), (2, 3): (3.0, 5.0)}


def test_transfers_of_the_pipeline_go_first() -> None:
    """4 s from 1 on, beside transfers in 2-3 and 5-6: one second before, two between, one after."""
    found = spans({(0, 1): [phase(4.0, WIRE)]}, late={(0, 0): 1.0}, transfers=[(5.0, 6.0), (2.0, 2.5), (2.0, 3.0)])
    assert found == {(0, 1): (1.0, 7.0)}


def test_transfers_before_and_after_do_not_matter() -> None:
    found = spans({(0, 1): [phase(4.0, WIRE)]}, late={(0, 0): 1.0}, transfers=[(0.0, 1.0), (5.0, 9.0)])
    assert found == {(0, 1): (1.0, 5.0)}
