"""When hosts bring weights back, and how long a step takes then."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.cost.offload.host_rates import PREVIEW_FACTOR
from hetero.cost.simulation.simulator import Simulation, simulate
from hetero.errors import ConfigError
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.offload import Offload
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from hetero.spec.parameters import stage_parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.strategies import legal_plans, offloaded_plans
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

A100 = "A100-40"
MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL)])
FORWARD_S, BACKWARD_S = 1.0, 2.0


def cluster(count: int, *, rate: float, copy_gb_per_s: float = 1.0) -> ClusterSpec:
    """Nodes of one device, whose hosts update ``rate`` parameters per second."""
    copy = Link(bandwidth_gb_per_s=copy_gb_per_s, latency_us=0.0)
    updates = (UpdateRate(threads=1, elements_per_s=rate),)
    host = HostProfile(source="a test", memory_gib=64, updates=updates, to_device=copy, to_host=copy)
    return nodes(count, gb_per_s=1000.0, host=host)


def one_stage(offload: Offload) -> Plan:
    held = stage(layers=(0, 6), ranks=(0,), device=A100, depth=1)
    made = sharded(plan(MODEL, [replica(dataclasses.replace(held, offload=offload), num_samples=4)]))
    return dataclasses.replace(made, gradient_sync=GradientSyncPlan(bucket_numel=10**9))


def numel_from(position: float) -> int:
    return sum(p.numel for p in stage_parameters(MODEL, first_layer=0, end_layer=6) if p.position >= position)


def exposed_s(result: Simulation) -> float:
    return result.step_s - 4 * 6 * (FORWARD_S + BACKWARD_S)


@pytest.mark.parametrize("update_s", [1.0, 4.0, 7.0, 40.0])
def test_a_layer_waits_for_what_is_updated_once_the_norm_is_known(update_s: float) -> None:
    """Layer 5 is reached after 5 forwards of a layer; its gradients had left long before the norm was known."""
    numel = numel_from(5)
    copy_s = 4 * numel / 1e9
    result = simulate(one_stage(Offload(optimizer_from=5)), cluster(1, rate=numel / update_s), COSTS)
    assert exposed_s(result) == pytest.approx(max(0.0, update_s + copy_s - 5 * FORWARD_S), abs=1e-6)


@pytest.mark.parametrize("update_s", [1.0, 7.0])
def test_without_overlap_the_first_layer_waits_for_all_of_it(update_s: float) -> None:
    numel = numel_from(5)
    offload = Offload(optimizer_from=5, overlap=False)
    result = simulate(one_stage(offload), cluster(1, rate=numel / update_s), COSTS)
    assert exposed_s(result) == pytest.approx(update_s + 4 * numel / 1e9, abs=1e-6)


@pytest.mark.parametrize("update_s", [1.0, 9.0, 14.0, 20.0, 40.0])
def test_a_preview_begins_with_the_gradients(update_s: float) -> None:
    """Those of layer 5 are whole when the backwards of five layers are still to come."""
    numel = numel_from(5)
    copy_s = 4 * numel / 1e9
    result = simulate(one_stage(Offload(optimizer_from=5, speculate=True)), cluster(1, rate=numel / update_s), COSTS)
    before_s = 5 * BACKWARD_S
    preview_s = PREVIEW_FACTOR * update_s
    assert exposed_s(result) == pytest.approx(max(0.0, 2 * copy_s + preview_s - before_s - 5 * FORWARD_S), abs=1e-6)


def test_what_has_not_been_previewed_by_then_is_updated_as_it_is_needed() -> None:
    """Two buckets, of layers 5 and 4, of which the first keeps the host until the norm is known."""
    made = dataclasses.replace(
        one_stage(Offload(optimizer_from=4, speculate=True)), gradient_sync=GradientSyncPlan(bucket_numel=numel_from(5))
    )
    sizes = numel_from(5), numel_from(4) - numel_from(5)
    rate = PREVIEW_FACTOR * sizes[0] / 11.0
    result = simulate(made, cluster(1, rate=rate, copy_gb_per_s=1e6), COSTS)
    # Previewed from -10 to 1; then the other one, for which layer 4 waits that is reached at 4.
    assert exposed_s(result) == pytest.approx(max(0.0, 1.0 + sizes[1] / rate - 4 * FORWARD_S), abs=1e-4)


def test_slow_copies_of_gradients_hold_updates_up() -> None:
    numel = numel_from(5)
    gb_per_s = 4 * numel / 1e9 / 13.0
    result = simulate(one_stage(Offload(optimizer_from=5)), cluster(1, rate=numel / 1.0, copy_gb_per_s=gb_per_s), COSTS)
    # They leave 10 s before the end and take 13; the update takes 1, the way back 13 again.
    assert exposed_s(result) == pytest.approx(3.0 + 1.0 + 13.0 - 5 * FORWARD_S, abs=1e-6)


@pytest.mark.slow
@given(offloaded_plans(of=legal_plans(of=st.just(MODEL))))
@settings(max_examples=25, deadline=None)
def test_faster_hosts_and_previews_never_take_longer(described: Plan) -> None:
    """Than slower hosts, and than updates once the norm is known."""
    described = dataclasses.replace(described, seq_length=16)
    described = described.with_replicas(
        {r: each.with_each_stage(device=[A100] * len(each.stages)) for r, each in enumerate(described.replicas)}
    )
    steps = [
        simulate(described, cluster(described.world_size, rate=rate), COSTS).step_s for rate in (1e3, 1e4, 1e6, 1e12)
    ]
    assert all(slow >= fast * (1 - 1e-3) for slow, fast in pairwise(steps))


def test_hosts_that_nobody_has_described_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"node type 'node': the plan lets its hosts update, .* `hetero profile host`"
    ):
        simulate(one_stage(Offload(optimizer_from=5)), nodes(1), COSTS)
    no_copies = HostProfile(source="a test", memory_gib=1, updates=(UpdateRate(threads=1, elements_per_s=1e9),))
    with pytest.raises(ConfigError, match="under host neither to_host and to_device nor memory_copy_gb_per_s"):
        simulate(one_stage(Offload(optimizer_from=5)), nodes(1, host=no_copies), COSTS)
