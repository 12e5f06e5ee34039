"""Bytes that ranks take of their hosts, and hosts that lack them."""

import dataclasses

import pytest

from hetero.cost.capacity import check_memory
from hetero.cost.host_memory import HostMemory, host_memory, host_memory_of_ranks
from hetero.cost.memory import memory_costs, plan_memory
from hetero.errors import PlanMemoryError
from hetero.plan.ir import Plan, Precision
from hetero.plan.offload import Offload
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.host import HostProfile
from hetero.spec.link import Link
from hetero.spec.parameters import stage_parameters
from hetero.units import GIB
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage

MODEL = llama_model(num_layers=4)


def left(offload: Offload, *, dp: int = 1, device: str = "A100-40", precision: Precision = "bf16") -> Plan:
    """One stage of four layers on ``dp`` ranks."""
    held = stage(layers=(0, 4), ranks=range(dp), dp=dp, device=device)
    made = replica(dataclasses.replace(held, offload=offload), num_samples=dp)
    return sharded(plan(MODEL, [made], precision=precision))


def numel_from(position: float) -> int:
    return sum(p.numel for p in stage_parameters(MODEL, first_layer=0, end_layer=4) if p.position >= position)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("position", [-1.0, 1.5, 4.0])
def test_the_end_of_a_stage_is_on_the_host(position: float, dp: int) -> None:
    made = left(Offload(optimizer_from=position), dp=dp)
    costs = memory_costs(made)
    owned = numel_from(position) // dp
    (held,) = host_memory(made, costs).values()
    assert held == HostMemory(optimizer=12 * owned, gradients=4 * owned, weights=2 * owned, checkpoint=12 * owned)
    assert held.held == 18 * owned
    on_device = plan_memory(made, costs)[0, 0].optimizer
    assert on_device == plan_memory(left(Offload(), dp=dp), costs)[0, 0].optimizer - 12 * owned
    assert {rank: each.total for rank, each in host_memory_of_ranks(made, costs).items()} == dict.fromkeys(
        range(dp), 30 * owned
    )


def test_previews_take_the_state_once_more_and_a_processor_no_weights() -> None:
    made = left(Offload(optimizer_from=0, speculate=True), device="cpu", precision="fp32")
    (held,) = host_memory(made, memory_costs(made)).values()
    numel = numel_from(0)
    # The layers' weights are in full precision, and the host has its own.
    assert held == HostMemory(
        optimizer=12 * numel, previews=12 * numel, gradients=4 * numel, weights=0, checkpoint=12 * numel
    )


def test_a_plan_without_offload_takes_nothing() -> None:
    made = left(Offload())
    assert not host_memory(made, memory_costs(made))
    assert not host_memory_of_ranks(made, memory_costs(made))
    check_memory(made, cluster(None))


def cluster(host: HostProfile | None, *, host_memory_gib: int | None = None, count: int = 1) -> ClusterSpec:
    return ClusterSpec(
        node_types=(
            NodeType(
                name="box",
                device="A100-40",
                gpus_per_node=2,
                count=count,
                inside_node=Link(bandwidth_gb_per_s=200, latency_us=10),
                host=host,
                host_memory_gib=host_memory_gib,
            ),
        )
    )


def test_hosts_have_to_be_described() -> None:
    made = left(Offload(optimizer_from=0), dp=2)
    with pytest.raises(PlanMemoryError, match=r"node 0: .* does not say what node type 'box' has; add the output of"):
        check_memory(made, cluster(None))
    check_memory(made, cluster(None, host_memory_gib=4))


def test_all_ranks_of_a_node_share_its_memory() -> None:
    made = left(Offload(optimizer_from=0), dp=2)
    taken = sum(each.total for each in host_memory_of_ranks(made, memory_costs(made)).values())
    check_memory(made, cluster(HostProfile(source="a test", memory_gib=1.001 * taken / GIB)))
    with pytest.raises(PlanMemoryError, match=r"node 0: its ranks leave .* a checkpoint .* included .* set speculate"):
        check_memory(made, cluster(HostProfile(source="a test", memory_gib=0.999 * taken / GIB)))
