"""The verdict on memory: who is short, by how much, and a change with which it would fit."""

import dataclasses
import re

import pytest

from hetero.cost.capacity import check_memory
from hetero.cost.memory import device_memory, memory_costs, plan_memory
from hetero.errors import PlanMemoryError
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.units import GIB
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage

MODEL = gpt2_model(hidden_size=2048, kv_channels=512, ffn_hidden_size=8192, max_position_embeddings=2048)


def made(*, depth: int = 4, mbs: int = 1, delay: int | None = None, dp: int = 1, layers: float = 3) -> Plan:
    """Two stages on ranks 0 to ``dp`` - 1 and ``dp``; the first is of interest."""
    first = stage(layers=(0, layers), ranks=range(dp), dp=dp, mbs=mbs, depth=depth, delay=delay, device="A100-40")
    last = stage(layers=(layers, 6), ranks=(dp,), mbs=mbs * dp, depth=1, device="A100-40")
    return plan(MODEL, [replica(first, last, num_samples=8 * mbs * dp)], seq_length=2048)


def cluster(gib: int | None, *, dp: int = 1, device: str = "A100-40") -> ClusterSpec:
    """The first stage's devices have ``gib``; the other one's has more than enough."""
    nodes = [
        NodeType(name="node", device=device, gpus_per_node=dp, memory_gib=gib),
        NodeType(name="large", device=device, gpus_per_node=1, memory_gib=999),
    ]
    return ClusterSpec(node_types=tuple(nodes))


def peak_gib(described: Plan) -> float:
    return plan_memory(described, memory_costs(described))[0, 0].total / GIB


def test_what_fits_passes() -> None:
    least = int(peak_gib(made())) + 1
    check_memory(made(), cluster(least))
    with pytest.raises(PlanMemoryError):
        check_memory(made(), cluster(least - 1))


def test_devices_of_unknown_memory_hold_everything() -> None:
    described = made()
    (pipeline,) = described.replicas
    on_cpu = described.with_replica(0, pipeline.with_each_stage(device=["cpu"] * len(pipeline.stages)))
    check_memory(on_cpu, cluster(None, device="cpu"))


CHANGES = {
    "distributed_optimizer true in the plan": (made(dp=4, depth=1), 4),
    "wgrad_delay null": (made(delay=4), 8),
    "in_flight 2": (made(depth=8), 6),
    "recompute full": (made(depth=1, layers=5), 6),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_change_that_is_named_makes_it_fit(change: str) -> None:
    described, gib = CHANGES[change]
    changed = applied(described, change)
    validate(described)
    validate(changed)
    assert peak_gib(changed) <= gib < peak_gib(described)
    with pytest.raises(PlanMemoryError) as caught:
        check_memory(described, cluster(gib, dp=described.world_size - 1))
    assert str(caught.value).startswith("replica 0 stage 0 does not fit its devices: each A100-40 of ranks 0")
    assert str(caught.value).endswith(f"; it fits with {change}"), caught.value


def applied(described: Plan, change: str) -> Plan:
    if change.startswith("distributed"):
        return sharded(described)
    name, value = change.split()
    given = int(value) if value.isdigit() else None if value == "null" else value
    return described.with_replica(0, described.replicas[0].with_stage(0, **{name: given}))


def test_where_no_single_change_helps() -> None:
    with pytest.raises(PlanMemoryError, match="; give it fewer layers or more tp, together with") as caught:
        check_memory(made(), cluster(1))
    found = re.search(r"needs (\d+) bytes \([\d.]+ GiB\) and has (\d+) bytes", str(caught.value))
    assert found is not None, caught.value
    assert int(found[1]) > int(found[2]) == GIB


def interleaved(**options: object) -> Plan:
    """Two device groups of one rank with two stages of two layers each."""
    model = dataclasses.replace(MODEL, num_layers=8, tied_embeddings=False)
    given = {"world_size": 2, "pp": 2, "stages_per_rank": 2, "micro_batch_size": 1, "global_batch_size": 8, **options}
    made = uniform_plan(UniformLayout(model=model, seq_length=2048, device="A100-40", **given))  # type: ignore[arg-type]
    validate(made)
    return made


def largest_gib(described: Plan) -> float:
    devices = device_memory(described, plan_memory(described, memory_costs(described)))
    return max(parts.total for parts in devices.values()) / GIB


def two_nodes(gib: int) -> ClusterSpec:
    node = NodeType(name="node", device="A100-40", gpus_per_node=1, count=2, memory_gib=gib)
    return ClusterSpec(node_types=(node,))


def test_stages_of_one_device_have_to_fit_it_together() -> None:
    """Either would fit alone."""
    made = interleaved()
    gib = int(largest_gib(made))
    assert max(parts.total for parts in plan_memory(made, memory_costs(made)).values()) < gib * GIB
    check_memory(made, two_nodes(gib + 1))
    with pytest.raises(PlanMemoryError, match=r"^replica 0 stages 0,2 together do not fit their devices: each A100-40"):
        check_memory(made, two_nodes(gib))
    with pytest.raises(PlanMemoryError, match=r"\(so do 2 more stages\)"):
        check_memory(made, two_nodes(1))


@pytest.mark.parametrize(
    ("options", "gib", "change", "fields"),
    [
        ({}, 7, "in_flight 2 and 2", {"in_flight": (2, 2)}),
        ({"schedule": "gpipe"}, 11, "recompute full", {"recompute": ("full", "full")}),
        ({"micro_batch_size": 7, "global_batch_size": 7}, 11, "recompute full", {"recompute": ("full", "full")}),
    ],
    ids=["depths", "gpipe", "recompute"],
)
def test_the_change_is_one_of_all_stages_of_the_device(
    options: dict[str, object], gib: int, change: str, fields: dict[str, tuple[object, object]]
) -> None:
    described = interleaved(**options)
    with pytest.raises(PlanMemoryError, match=rf"it fits with {change}") as caught:
        check_memory(described, two_nodes(gib))
    (replica,) = described.replicas
    first = 0 if "stages 0,2" in str(caught.value) else 1
    for name, values in fields.items():
        for s, value in zip((first, first + 2), values, strict=True):
            replica = replica.with_stage(s, **{name: value})
    changed = described.with_replica(0, replica)
    validate(changed)
    assert device_memory(changed, plan_memory(changed, memory_costs(changed)))[0, first].total <= gib * GIB
