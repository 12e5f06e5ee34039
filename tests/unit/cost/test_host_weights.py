"""How much longer computes take whose weights come from the host, and how many bytes stay on the device."""

import dataclasses

import pytest

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.cost.stage_memory import WEIGHT_SLOTS, fetched_weights, weights_to_host
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL)])
FORWARD_S, BACKWARD_S = 1.0, 2.0
LAYERS, SAMPLES = 6, 4


def one_stage(weights: float | None, *, ranks: tuple[int, ...] = (0,), model: ModelSpec = MODEL) -> Plan:
    """Of which gradients of all layers and the head add up on the host, and weights are there from some position on."""
    held = stage(layers=(0, LAYERS), ranks=ranks, dp=len(ranks), device="A100-40", depth=1)
    first = 0.0 if weights is None else min(0.0, weights)
    offload = Offload(optimizer_from=first, gradients_from=first, weights_from=weights)
    samples = SAMPLES * len(ranks)
    return sharded(plan(model, [replica(dataclasses.replace(held, offload=offload), num_samples=samples)]))


def cluster(fetch_s: float, *, update_s: float = 0.0, nodes_of_one: int = 1) -> ClusterSpec:
    """A device whose link brings a layer's weights in ``fetch_s``, and whose host updates a layer in ``update_s``."""
    numel = weights_to_host(one_stage(0).replicas[0].stages[0], COSTS)[1.0]
    fast = Link(bandwidth_gb_per_s=1e6, latency_us=0.0)
    host = HostProfile(
        source="a test",
        memory_gib=64,
        updates=(UpdateRate(threads=1, elements_per_s=numel / update_s if update_s else 1e15),),
        to_device=Link(bandwidth_gb_per_s=numel * COSTS.element_bytes / fetch_s / 1e9, latency_us=0.0),
        to_host=fast,
        memory_copy_gb_per_s=1e6,
    )
    return nodes(nodes_of_one, host=host)


def step_s(made: Plan, described: ClusterSpec) -> float:
    return simulate(made, described, COSTS).step_s


def test_copies_beside_computes_cost_what_nothing_is_beside() -> None:
    """With three quarters of a second for a layer, whose forward takes one: a step waits for its first layer."""
    fast = step_s(one_stage(0), cluster(1e-6))
    longer = step_s(one_stage(0), cluster(0.75)) - fast
    assert longer == pytest.approx(0.75, abs=0.01)


def test_where_copies_are_slower_they_decide() -> None:
    """With five seconds for a layer, which computes for one and two: all blocks of all passes come one by one, but for
    the two with which a pass begins where the one before has ended."""
    made = one_stage(0)
    elements = fetched_weights(made.replicas[0].stages[0], COSTS)
    layer = elements[1.0]
    there = SAMPLES * (elements[6.0] + layer) + (SAMPLES - 1) * 2 * layer
    copied_s = (2 * SAMPLES * sum(elements.values()) - there) / layer * 5.0
    found = step_s(made, cluster(5.0))
    # The link rests while the blocks that are there compute.
    assert copied_s < found < copied_s + SAMPLES * (FORWARD_S + BACKWARD_S)


def test_a_forward_waits_for_the_update_of_the_weights_that_it_fetches() -> None:
    """Which needs no copy to the device of its own."""
    at_once, late = (step_s(one_stage(0), cluster(1e-6, update_s=seconds)) for seconds in (0.0, 4.0))
    elements = weights_to_host(one_stage(0).replicas[0].stages[0], COSTS)
    updated_s = 4.0 * sum(elements.values()) / elements[1.0]
    assert late - at_once == pytest.approx(updated_s, rel=1e-3), "all is one bucket"


def test_what_several_ranks_hold_goes_through_their_devices() -> None:
    """So that the first forward also waits until it has come in, been gathered, and come in again."""
    shared, alone = one_stage(0, ranks=(0, 1)), one_stage(0)
    longer = step_s(shared, cluster(0.75, nodes_of_one=2)) - step_s(shared, cluster(1e-6, nodes_of_one=2))
    assert longer > step_s(alone, cluster(0.75)) - step_s(alone, cluster(1e-6)) + 0.1


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_weights_on_the_host_are_not_on_the_device(ranks: tuple[int, ...]) -> None:
    """But for two blocks; and on the host they are whole, where only what a rank owns is on its way otherwise."""
    kept, fetched = one_stage(None, ranks=ranks), one_stage(2.5, ranks=ranks)
    costs = memory_costs(fetched)
    before, after = (plan_memory(made, costs)[0, 0] for made in (kept, fetched))
    numel = weights_to_host(fetched.replicas[0].stages[0], costs)
    assert list(numel) == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert numel[2.0] == costs.parameter_counts.per_rank("mlp", 1), "of layer 2 the MLP alone"
    assert before.weights - after.weights == costs.element_bytes * sum(numel.values())
    assert after.working - before.working == costs.element_bytes * WEIGHT_SLOTS * max(numel.values())
    more = host_memory(fetched, costs)[0, 0].weights - host_memory(kept, costs)[0, 0].weights
    others = sum(numel.values()) * (1 - 1 / len(ranks))
    assert more == pytest.approx(costs.element_bytes * others, abs=8)


def test_a_tied_embedding_comes_for_the_head_of_the_same_stage_as_well() -> None:
    model = gpt2_model()
    held = one_stage(-1, model=model).replicas[0].stages[0]
    costs = cost_model(model, [profile(model)])
    there, comes = weights_to_host(held, costs), fetched_weights(held, costs)
    assert comes[6.0] - there[6.0] == costs.parameter_counts.word_embedding
    assert {p: n for p, n in comes.items() if p < 6} == {p: n for p, n in there.items() if p < 6}
