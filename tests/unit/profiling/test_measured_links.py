"""Lines through the times of transfers, and which transfers stand for a cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.profiling.measured_links import MeasuredTransfer, Operation, fit_link, measured_links
from hetero.profiling.rank_links import SIZES_BYTES, RankDevice, Task, measuring_ranks, tasks
from hetero.units import GB
from tests.helpers.synthetic_profiles import PROVENANCE


def line(latency_s: float, bytes_per_s: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, latency_s + size / bytes_per_s) for size in SIZES_BYTES)


@given(latency_us=st.floats(1, 1000), gb_per_s=st.floats(0.1, 1000))
def test_a_line_is_found_again(latency_us: float, gb_per_s: float) -> None:
    link, worst = fit_link(line(latency_us * 1e-6, gb_per_s * GB))
    assert link.latency_us == pytest.approx(latency_us, rel=2e-3)
    assert link.bytes_per_s(1) == pytest.approx(gb_per_s * GB, rel=2e-3)
    assert worst < 1e-6


def test_there_is_no_latency_below_none() -> None:
    """Small messages that are faster by the byte than large ones, as through a cache."""
    link, worst = fit_link([(1000, 1000 / GB), (10**6, 3e6 / GB)])
    assert link.latency_us == 0
    # The least squares of the relative errors of one factor for 1 and 1/3: (1 + 1/9) / (1 + 1/3) seconds per 1e9 bytes.
    assert link.bytes_per_s(1) == pytest.approx((1 + 1 / 9) / (1 + 1 / 3) * GB, rel=1e-3)
    assert worst == pytest.approx(0.6, abs=1e-3)


def test_messages_whose_size_does_not_matter_have_the_bandwidth_of_the_largest() -> None:
    link, _ = fit_link([(1000, 2e-3), (10**6, 1e-3)])
    assert link.bytes_per_s(1) == pytest.approx(1e9)


def transfer(operation: Operation, ranks: tuple[int, ...], nodes: str, bytes_per_s: float) -> MeasuredTransfer:
    times = line(0.0, bytes_per_s)
    link, worst = fit_link(times)
    return MeasuredTransfer(
        operation=operation,
        ranks=ranks,
        nodes=tuple(nodes),
        devices=("abacus",) * len(ranks),
        times=times,
        fit=link,
        worst_error=worst,
    )


def test_a_cluster_file_takes_over_what_it_has_a_place_for() -> None:
    found = measured_links(
        [
            transfer("send", (0, 1), "aa", 8 * GB),
            transfer("all_reduce", (0, 1, 2), "aaa", 3 * GB),
            transfer("all_reduce", (0, 1), "aa", 2 * GB),
            transfer("all_reduce", (0, 1, 2, 3), "aaab", GB),
            transfer("send", (0, 3), "ab", GB),
        ],
        PROVENANCE,
    )
    (inside,) = found.inside_nodes
    assert inside.inside_node.bytes_per_s(1) == pytest.approx(8 * GB)
    # What goes over the bus: 2 (n - 1) / n times the bytes.
    assert [(each.size, each.bus.bytes_per_s(1)) for each in inside.all_reduce_inside_node] == [
        (2, pytest.approx(2 * GB)),
        (3, pytest.approx(4 * GB)),
    ]
    assert [each.link.bytes_per_s(1) for each in found.between_nodes] == [pytest.approx(GB)]
    assert len(found.transfers) == 5


def rank(node: str, device: str) -> RankDevice:
    return RankDevice(node=node, device=device, hardware=f"an {device}")


def test_one_node_of_a_kind_stands_for_all() -> None:
    """Two nodes with two A each, and one with a B: rank numbers go through them."""
    places = [rank(node, device) for node, device in ("aA", "aA", "bA", "bA", "cB")]
    assert [each for each in tasks(places) if each.operation == "send"] == [
        Task("send", (0, 1)),
        Task("send", (0, 2)),
        Task("send", (0, 4)),
    ]
    sums = [each.ranks for each in tasks(places) if each.operation == "all_reduce"]
    assert sums == [(0, 1), (0, 1, 2, 3, 4)]


def test_sums_inside_a_node_are_measured_among_powers_of_two_and_all() -> None:
    found = tasks([rank("a", "A")] * 6)
    assert [len(each.ranks) for each in found if each.operation == "all_reduce"] == [2, 4, 6]


def test_one_rank_of_each_kind_measures() -> None:
    ranks = [rank("n", device) for device in "AABAC"]
    assert measuring_ranks(ranks) == {"A": 0, "B": 2, "C": 4}


def test_two_kinds_of_one_name_are_refused() -> None:
    ranks = [RankDevice(node="n", device="A", hardware=hardware) for hardware in ("this", "this", "that")]
    with pytest.raises(ConfigError, match="ranks 0 and 2 are both called 'A', but are this and that"):
        measuring_ranks(ranks)
