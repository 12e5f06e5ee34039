"""How much longer computes take whose gradients add up on the host, and how many bytes stay on the device."""

import dataclasses

import pytest

from hetero.cost.gradient_volume import sync_buckets
from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.cost.stage_memory import GRADIENT_SLOTS, gradients_to_host, largest_gradient
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL)])
BACKWARD_S = 2.0
LAYERS, SAMPLES = 6, 4


def one_stage(gradients: float | None, *, ranks: tuple[int, ...] = (0,)) -> Plan:
    """Of which the optimizer of all layers and the head is on the host, and gradients from some position on."""
    held = stage(layers=(0, LAYERS), ranks=ranks, dp=len(ranks), device="A100-40", depth=1)
    offload = Offload(optimizer_from=0, gradients_from=gradients)
    samples = SAMPLES * len(ranks)
    return sharded(plan(MODEL, [replica(dataclasses.replace(held, offload=offload), num_samples=samples)]))


def elements(made: Plan) -> dict[float, int]:
    return gradients_to_host(made.replicas[0].stages[0], COSTS)


def cluster(add_s: float, *, copied_s: float) -> ClusterSpec:
    """A device whose link brings a layer's gradients to the host in ``copied_s``, where they are added in ``add_s``;
    updates take no time."""
    numel = elements(one_stage(0))[1.0]
    out = Link(bandwidth_gb_per_s=numel * COSTS.element_bytes / copied_s / 1e9, latency_us=0.0)
    host = HostProfile(
        source="a test",
        memory_gib=64,
        updates=(UpdateRate(threads=1, elements_per_s=1e15),),
        to_device=Link(bandwidth_gb_per_s=1e6, latency_us=0.0),
        to_host=out,
        memory_copy_gb_per_s=1.5 * numel * COSTS.gradient_bytes / add_s / 1e9,
    )
    return nodes(1, host=host)


def step_s(made: Plan, described: ClusterSpec) -> float:
    return simulate(made, described, COSTS).step_s


def test_copies_beside_backwards_cost_the_last_block_alone() -> None:
    """With one second for a layer, which computes for two: the step waits for the last microbatch's lowest."""
    described = cluster(0.25, copied_s=0.75)
    fast = step_s(one_stage(0), cluster(1e-6, copied_s=1e-6))
    assert step_s(one_stage(0), described) - fast == pytest.approx(1.0, rel=1e-3)


def test_where_copies_are_slower_they_decide() -> None:
    """With five seconds for a layer, which computes for two: in each microbatch, all blocks but two wait for the
    one before the last."""
    described = cluster(1.0, copied_s=4.0)
    longer = step_s(one_stage(0), described) - step_s(one_stage(0), cluster(1e-6, copied_s=1e-6))
    # Of the first microbatch: four of six layers begin 5 s after one another instead of 2 s.
    assert longer > SAMPLES * (LAYERS - 2) * (5.0 - BACKWARD_S)


def test_what_others_hold_too_goes_out_again_before_the_norm_is_known() -> None:
    """With half a second for a layer: of the sum of a bucket the half that the rank owns."""
    alone, shared = one_stage(0), one_stage(0, ranks=(0, 1))
    described = cluster(1e-6, copied_s=0.5)
    (node,) = described.node_types
    both = dataclasses.replace(described, node_types=(dataclasses.replace(node, gpus_per_node=2),))
    buckets = sync_buckets(shared, bucket_numel=COSTS.runtime.bucket_numel)
    (numel,) = (bucket.numel for bucket in buckets if bucket.position >= 0)
    layers = COSTS.gradient_bytes * numel / 2 / (COSTS.element_bytes * elements(alone)[1.0])
    assert step_s(shared, both) - step_s(alone, described) == pytest.approx(0.5 * layers, rel=1e-3)


def test_gradients_that_add_up_on_the_host_are_not_on_the_device() -> None:
    """But for those on their way; and on the host they are whole, where only what a rank owns is otherwise."""
    for ranks in ((0,), (0, 1)):
        kept, added = one_stage(None, ranks=ranks), one_stage(2.5, ranks=ranks)
        costs = memory_costs(added)
        before, after = (plan_memory(made, costs)[0, 0] for made in (kept, added))
        numel, held = elements(added), added.replicas[0].stages[0]
        assert list(numel) == [2.0, 3.0, 4.0, 5.0, 6.0]
        assert numel[2.0] == costs.parameter_counts.per_rank("mlp", 1), "of layer 2 the MLP alone"
        in_sums = sum(numel.values()) if len(ranks) > 1 else 0
        assert before.gradients - after.gradients == costs.gradient_bytes * (sum(numel.values()) - in_sums)
        one = largest_gradient(held, costs)
        assert after.working - before.working == costs.element_bytes * (GRADIENT_SLOTS * max(numel.values()) + one)
        more = host_memory(added, costs)[0, 0].gradients - host_memory(kept, costs)[0, 0].gradients
        owned = sum(numel.values()) / len(ranks)
        assert more == pytest.approx(costs.gradient_bytes * (sum(numel.values()) - owned + one), abs=8)


@pytest.mark.parametrize(
    ("first", "start", "end", "left"), [(2.5, 0, 6, 2.5), (2.5, 3, 6, 3), (-1, 2, 6, 2), (4, 0, 3, None)]
)
def test_when_layers_move_the_gradients_and_weights_that_are_left_stay_on_the_host(
    first: float, start: float, end: float, left: float | None
) -> None:
    offload = Offload(optimizer_from=first, gradients_from=first, weights_from=first)
    held = dataclasses.replace(stage(layers=(0, LAYERS), ranks=(0,)), offload=offload)
    moved = held.with_layers(start, end).offload
    assert moved.gradients_from == moved.weights_from == left
