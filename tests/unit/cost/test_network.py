"""What crosses a boundary, and how long messages and sums take on shared wires."""

import dataclasses

import pytest

from hetero.cost.network import (
    RING_SHARE,
    Topology,
    hierarchical_all_reduce_cost,
    ring_all_reduce_cost,
    transfer_cost,
)
from hetero.plan.ir import Stage
from hetero.plan.reshard import Transfer, transfers, transfers_by_phase
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import GroupLink, Link
from hetero.units import GB
from tests.helpers.plans import stage
from tests.helpers.synthetic_profiles import nodes

SECOND = GB
"""Bytes that a link of the default 1 GB/s takes a second for."""


def message(sender: int, receiver: int) -> Transfer:
    """One token."""
    one = slice(0, 1)
    return Transfer(sender, receiver, 0, 0, 1, one, one, one, one)


def num_bytes(sender: Stage, receiver: Stage) -> int:
    """Of a slice of 8 rows x 10 bytes."""
    messages = transfers(sender, receiver, seq_length=8, phase=0)
    return transfer_cost(messages, Topology(nodes(3)), row_bytes=10).num_bytes


def test_without_sequence_parallelism_every_tensor_parallel_rank_gets_a_copy() -> None:
    assert num_bytes(stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=(1, 2), tp=2)) == 2 * 80


def test_with_it_every_rank_gets_its_rows() -> None:
    assert num_bytes(stage(layers=(0, 1), ranks=(0,)), stage(layers=(1, 2), ranks=(1, 2), tp=2, sp=True)) == 2 * 40


class TestTransfers:
    def test_a_device_sends_one_message_after_the_other(self) -> None:
        cost = transfer_cost([message(0, 1), message(0, 2)], Topology(nodes(1, gpus_per_node=3)), row_bytes=SECOND)
        assert cost.seconds == pytest.approx(2.0)
        assert cost.ports == (), "inside a node there is no interface"

    def test_other_devices_send_at_the_same_time(self) -> None:
        cost = transfer_cost([message(0, 2), message(1, 3)], Topology(nodes(1, gpus_per_node=4)), row_bytes=SECOND)
        assert cost.seconds == pytest.approx(1.0)

    def test_but_not_through_the_same_interface(self) -> None:
        messages = [message(0, 2), message(1, 3)]
        cost = transfer_cost(messages, Topology(nodes(2, gpus_per_node=2)), row_bytes=SECOND)
        assert cost.seconds == pytest.approx(2.0)
        assert dict(cost.ports) == pytest.approx({("out", 0, 0): 2.0, ("in", 1, 0): 2.0})

    def test_unless_each_has_its_own(self) -> None:
        messages = [message(0, 2), message(1, 3)]
        cost = transfer_cost(messages, Topology(nodes(2, gpus_per_node=2, nics_per_node=2)), row_bytes=SECOND)
        assert cost.seconds == pytest.approx(1.0)

    def test_the_latency_counts_once(self) -> None:
        topology = Topology(nodes(1, gpus_per_node=2, latency_us=1000.0))
        cost = transfer_cost([message(0, 1), message(0, 1)], topology, row_bytes=SECOND)
        assert cost.seconds == pytest.approx(2.001)

    def test_parts_are_gathered_where_they_arrive(self) -> None:
        """A GB each to ranks 2 and 3, a second on interfaces of their own; half a ring of both parts inside the node is
        2 (2 - 1) / 2 times 2 GB, halved."""
        topology = Topology(nodes(2, gpus_per_node=2, nics_per_node=2))
        messages = [message(0, 2), message(1, 3)]
        parts = transfer_cost(messages, topology, row_bytes=SECOND)
        whole = transfer_cost(messages, topology, row_bytes=SECOND, gathers_over=2)
        assert (parts.seconds, whole.seconds) == pytest.approx((1.0, 1.0 + 1.0))
        assert (parts.ports, parts.num_bytes) == (whole.ports, whole.num_bytes), "the gather is not on the wire"

    def test_a_host_that_waits_makes_it_later_but_no_longer(self) -> None:
        cost = transfer_cost([message(0, 1)], Topology(nodes(2)), row_bytes=SECOND)
        assert cost.later(0.5).seconds == pytest.approx(1.5)
        assert cost.later(0.5).ports == cost.ports

    def test_the_slices_of_a_boundary(self) -> None:
        """One sample of 10 rows x 0.1 GB from each rank of dp 2 to one rank."""
        topology = Topology(nodes(3))
        sender = stage(layers=(0, 1), ranks=(0, 1), dp=2)
        receiver = stage(layers=(1, 2), ranks=(2,), mbs=2)
        slices = transfers_by_phase(sender, receiver, seq_length=10)
        costs = [transfer_cost(messages, topology, row_bytes=SECOND // 10) for messages in slices]
        assert max(cost.seconds for cost in costs) == pytest.approx(2.0)


class TestSums:
    def test_a_ring_inside_a_node(self) -> None:
        topology = Topology(nodes(1, gpus_per_node=4))
        cost = ring_all_reduce_cost(SECOND, (0, 1, 2, 3), topology)
        assert cost.seconds == pytest.approx(2 * 3 / 4)
        assert cost.ports == ()

    def test_a_measured_group_wins(self) -> None:
        """Devices that share a bus are far slower together than two of them are."""
        slow = GroupLink(size=4, bus=Link(bandwidth_gb_per_s=0.1, latency_us=0))
        topology = Topology(nodes(1, gpus_per_node=4, all_reduce_inside_node=(slow,)))
        assert ring_all_reduce_cost(SECOND, (0, 1, 2, 3), topology).seconds == pytest.approx(15.0)
        assert ring_all_reduce_cost(SECOND, (0, 1), topology).seconds == pytest.approx(10.0)

    def test_a_ring_between_nodes_uses_every_interface_that_all_nodes_have(self) -> None:
        one = ring_all_reduce_cost(SECOND, (0, 1, 2, 3), Topology(nodes(2, gpus_per_node=2, gb_per_s=100.0)))
        cluster = nodes(2, gpus_per_node=2, gb_per_s=100.0, nics_per_node=2)
        two = ring_all_reduce_cost(SECOND, (0, 1, 2, 3), Topology(cluster))
        assert one.seconds == pytest.approx(0.015 / RING_SHARE)
        assert two.ports[0][1] == pytest.approx(0.015), "the links inside the nodes are no faster"
        assert {port for port, _ in two.ports} == {
            (way, n, nic) for way in ("out", "in") for n in (0, 1) for nic in (0, 1)
        }

    def test_the_node_with_the_fewest_interfaces_counts(self) -> None:
        """Wherever it stands in the ring."""
        (one,), (two,) = (nodes(1, gpus_per_node=2, gb_per_s=100.0, nics_per_node=count).node_types for count in (1, 2))
        link = Links(between_nodes=Link(bandwidth_gb_per_s=1.0, latency_us=0.0))
        one, two = dataclasses.replace(one, name="one"), dataclasses.replace(two, name="two")
        for node_types in ((one, two), (two, one)):
            topology = Topology(ClusterSpec(node_types=node_types, links=link))
            cost = ring_all_reduce_cost(SECOND, (0, 1, 2, 3), topology)
            assert cost.seconds == pytest.approx(2 * 3 / 4 / RING_SHARE)

    def test_between_nodes_a_ring_gets_a_share_of_what_a_message_gets(self) -> None:
        between, inside = nodes(2), nodes(1, gpus_per_node=2)
        assert ring_all_reduce_cost(SECOND, (0, 1), Topology(between)).seconds == pytest.approx(1.0 / RING_SHARE)
        assert ring_all_reduce_cost(SECOND, (0, 1), Topology(inside)).seconds == pytest.approx(1.0)

    def test_latency_counts_for_every_step_of_the_ring(self) -> None:
        cost = ring_all_reduce_cost(1, (0, 1, 2), Topology(nodes(3, latency_us=1000.0)))
        assert cost.seconds == pytest.approx(0.004, rel=1e-3)

    def test_a_ring_of_one_interface_leaves_the_others_free(self) -> None:
        """As measured: a quarter of the bandwidth of four interfaces, and only the first of each node is busy."""
        spec = nodes(
            2,
            gpus_per_node=4,
            gb_per_s=1.0,
            nics_per_node=4,
            inside_node=Link(bandwidth_gb_per_s=100.0, latency_us=0.0),
        )
        both, one = (
            ring_all_reduce_cost(SECOND, tuple(range(8)), Topology(cluster))
            for cluster in (spec, spec.with_ring_interfaces("one"))
        )
        assert one.seconds == pytest.approx(4 * both.seconds)
        assert {port for port, _ in both.ports} == {
            (way, n, i) for way in ("in", "out") for n in (0, 1) for i in range(4)
        }
        assert {port for port, _ in one.ports} == {(way, n, 0) for way in ("in", "out") for n in (0, 1)}
        last = ring_all_reduce_cost(SECOND, (2, 3, 6, 7), Topology(spec.with_ring_interfaces("one")))
        assert {port for port, _ in last.ports} == {(way, n, 2) for way in ("in", "out") for n in (0, 1)}

    @pytest.mark.parametrize(("num_bytes", "ranks"), [(SECOND, (0,)), (0, (0, 1))])
    def test_nothing_to_sum(self, num_bytes: int, ranks: tuple[int, ...]) -> None:
        assert ring_all_reduce_cost(num_bytes, ranks, Topology(nodes(2))).seconds == 0.0


class TestHierarchicalSums:
    def cluster(self, *, nics_per_node: int = 1, latency_us: float = 0.0) -> Topology:
        """Two nodes of four devices: 10 GB/s inside, and per interface 1 GB/s of a ring between them."""
        inside = Link(bandwidth_gb_per_s=10.0, latency_us=0.0)
        spec = nodes(
            2,
            gpus_per_node=4,
            gb_per_s=1 / RING_SHARE,
            latency_us=latency_us,
            inside_node=inside,
            nics_per_node=nics_per_node,
        )
        return Topology(spec)

    def test_equal_domains(self) -> None:
        """Inside and back half a ring of four: 3/4 of a GB at 10 GB/s. Across, four rails of 1/4 GB, each a ring of
        two, 2 (2 - 1) / 2 of its bytes, take turns on one interface."""
        cost = hierarchical_all_reduce_cost(SECOND, [(0, 1, 2, 3), (4, 5, 6, 7)], self.cluster())
        assert [phase.seconds for phase in cost.phases] == pytest.approx([0.075, 1.0, 0.075])
        assert dict(cost.phases[1].ports) == pytest.approx({(way, n, 0): 1.0 for way in ("in", "out") for n in (0, 1)})
        assert cost.phases[0].ports == ()
        flat = ring_all_reduce_cost(SECOND, tuple(range(8)), self.cluster())
        assert flat.seconds == pytest.approx(2 * 7 / 8)

    def test_rails_on_interfaces_of_their_own_do_not_wait(self) -> None:
        topology = self.cluster(nics_per_node=2)
        cost = hierarchical_all_reduce_cost(SECOND, [(0, 1, 2, 3), (4, 5, 6, 7)], topology)
        assert cost.phases[1].seconds == pytest.approx(0.5)

    def test_unequal_domains(self) -> None:
        """Two rails; the domain of four reduces instead of scattering, and all of its GB passes every link."""
        cost = hierarchical_all_reduce_cost(SECOND, [(0, 1, 2, 3), (4, 5)], self.cluster())
        assert [phase.seconds for phase in cost.phases] == pytest.approx([0.1, 1.0, 0.1])

    def test_the_latency_of_the_slow_link_counts_twice_instead_of_at_every_step_of_a_ring(self) -> None:
        topology = self.cluster(latency_us=1000.0)
        cost = hierarchical_all_reduce_cost(8, [(0, 1, 2, 3), (4, 5, 6, 7)], topology)
        assert cost.seconds == pytest.approx(0.002, rel=1e-3)
        flat = ring_all_reduce_cost(8, tuple(range(8)), topology)
        assert flat.seconds == pytest.approx(0.014, rel=1e-3)
