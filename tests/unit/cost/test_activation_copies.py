"""How much longer computes take whose activations wait on the host, and how many bytes stay on the device."""

import dataclasses

import pytest

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.simulation.simulator import simulate
from hetero.cost.stage_memory import ACTIVATION_SLOTS, blocks_on_host
from hetero.errors import ConfigError
from hetero.plan.ir import Plan, Stage
from hetero.plan.offload import Offload
from hetero.spec.cluster import ClusterSpec
from hetero.spec.host import HostProfile
from hetero.spec.link import Link
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.synthetic_profiles import cost_model, nodes, profile

MODEL = gpt2_model(tied_embeddings=False)
COSTS = cost_model(MODEL, [profile(MODEL)])
FORWARD_S, BACKWARD_S = 1.0, 2.0
LAYERS, SAMPLES = 6, 4


def one_stage(until: float | None, *, depth: int = 1) -> Plan:
    held = stage(layers=(0, LAYERS), ranks=(0,), device="A100-40", depth=depth)
    return plan(MODEL, [replica(dataclasses.replace(held, offload=Offload(activations_until=until)), num_samples=4)])


def cluster(copy_s: float) -> ClusterSpec:
    """A device whose link brings what a layer saves in ``copy_s`` seconds, either way."""
    (saved,) = {block.num_bytes for block in blocks_on_host(first(one_stage(5)), COSTS).values() if block.num_bytes}
    copy = Link(bandwidth_gb_per_s=saved / copy_s / 1e9, latency_us=0.0)
    return nodes(1, host=HostProfile(source="a test", memory_gib=64, to_device=copy, to_host=copy))


def first(made: Plan) -> Stage:
    return made.replicas[0].stages[0]


def longer_s(made: Plan, copy_s: float) -> float:
    kept = simulate(one_stage(None), cluster(copy_s), COSTS)
    return simulate(made, cluster(copy_s), COSTS).step_s - kept.step_s


@pytest.mark.parametrize("copy_s", [0.1, 0.9])
def test_copies_beside_other_blocks_cost_nothing(copy_s: float) -> None:
    """Of the first three layers: before their backward come the forwards and backwards of three others."""
    assert longer_s(one_stage(2), copy_s) == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("copy_s", [0.1, 0.9])
def test_the_last_block_has_to_leave_and_to_come_back(copy_s: float) -> None:
    """With one microbatch in flight its backward follows its forward at once, and again in each microbatch."""
    assert longer_s(one_stage(LAYERS - 1), copy_s) == pytest.approx(SAMPLES * 2 * copy_s, rel=1e-6)


@pytest.mark.parametrize("copy_s", [3.0, 5.0])
def test_where_copies_are_slower_they_decide(copy_s: float) -> None:
    """The last block has left a forward and six copies after the begin, and each comes back one copy later."""
    microbatch_s = FORWARD_S + 2 * LAYERS * copy_s + BACKWARD_S
    kept_s = LAYERS * (FORWARD_S + BACKWARD_S)
    assert longer_s(one_stage(LAYERS - 1), copy_s) == pytest.approx(SAMPLES * (microbatch_s - kept_s), rel=1e-6)


def test_what_waits_on_the_host_is_not_on_the_device() -> None:
    """But for the blocks on their way."""
    costs = memory_costs(one_stage(None, depth=3))
    kept, left = (plan_memory(one_stage(until, depth=3), costs)[0, 0] for until in (None, 3))
    made = one_stage(3, depth=3)
    block, *others = (each.num_bytes for each in blocks_on_host(first(made), costs).values() if each.kind == "block")
    assert others == [block] * 3
    embedding = blocks_on_host(first(made), costs)[-1].num_bytes
    assert kept.activations - left.activations == 3 * (4 * block + embedding)
    assert left.working - kept.working == ACTIVATION_SLOTS * block
    assert host_memory(made, costs)[0, 0].activations == 3 * (4 * block + embedding)
    assert host_memory(made, costs)[0, 0].held == 0


def test_the_heads_are_its_softmax() -> None:
    costs = memory_costs(one_stage(None))
    assert plan_memory(one_stage(LAYERS), costs)[0, 0].logits == 0 < plan_memory(one_stage(5), costs)[0, 0].logits


def test_hosts_have_to_be_described() -> None:
    with pytest.raises(ConfigError, match="the cluster file has under host neither to_host and to_device nor memory_"):
        simulate(one_stage(2), nodes(1), COSTS)


@pytest.mark.parametrize(
    ("until", "start", "end", "left"),
    [
        (2, 0, 6, 2),
        (4, 0, 3, 2),
        (4, 0, 2.5, 2),
        (1, 2, 6, None),
        (2, 2.5, 6, 2.5),
        (-1, 0, 3, -1),
        (-1, 1, 3, None),
        (6, 2, 6, 6),
        (6, 2, 4, 3),
    ],
)
def test_when_layers_move_the_blocks_that_are_left_stay_on_the_host(
    until: float, start: float, end: float, left: float | None
) -> None:
    held = dataclasses.replace(stage(layers=(0, LAYERS), ranks=(0,)), offload=Offload(activations_until=until))
    assert held.with_layers(start, end).offload.activations_until == left
