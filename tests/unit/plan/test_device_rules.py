"""Devices of a plan: known or described, able to compute what is asked, and fp8 where it can be."""

import dataclasses
from typing import Any

import pytest

from hetero.errors import ConfigError, PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from hetero.serialization import from_json, to_json
from hetero.spec.cluster import ClusterSpec, NodeType
from hetero.spec.devices import DeviceType
from hetero.spec.model import ModelSpec
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan, replica, stage

MINE = DeviceType(name="mine", memory_gib=24, compute_capability=(8, 6), cuda_name="NVIDIA X1")


def one_stage(device: str = "mine", *, devices: tuple[DeviceType, ...] = (MINE,), precision: Any = "bf16") -> Plan:
    made = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,), device=device))], precision=precision)
    return dataclasses.replace(made, devices=devices)


def test_a_plan_carries_the_devices_that_do_not_ship() -> None:
    made = one_stage()
    validate(made)
    read = from_json(Plan, to_json(made), source="plan.json")
    assert read == made
    assert read.device_types.of("mine") == MINE


def test_an_unknown_device_is_refused_with_its_stage() -> None:
    with pytest.raises(ConfigError, match=r"replica 0 stage 0: unknown device type 'mine'"):
        validate(one_stage(devices=()))


def test_a_device_is_described_once() -> None:
    with pytest.raises(PlanError, match="plan: devices: it describes 'mine' more than once"):
        validate(one_stage(devices=(MINE, dataclasses.replace(MINE, memory_gib=12))))


def test_a_described_device_without_bf16_is_refused() -> None:
    old = dataclasses.replace(MINE, compute_capability=(7, 5))
    with pytest.raises(PlanError, match="device mine has no bf16; choose fp16 for the whole plan"):
        validate(one_stage(devices=(old,)))
    validate(one_stage(devices=(old,), precision="fp16"))


def test_plan_and_cluster_describe_a_device_alike() -> None:
    node = NodeType(name="a", device="mine", gpus_per_node=1)
    check_plan_on_cluster(one_stage(), ClusterSpec(devices=(MINE,), node_types=(node,)))
    other = dataclasses.replace(MINE, memory_gib=12)
    with pytest.raises(PlanError, match="device mine with another memory_gib than the cluster does: 24 and 12"):
        check_plan_on_cluster(one_stage(), ClusterSpec(devices=(other,), node_types=(node,)))


def test_a_uniform_plan_takes_its_device_along() -> None:
    layout = UniformLayout(
        model=gpt2_model(),
        world_size=2,
        pp=2,
        micro_batch_size=1,
        global_batch_size=2,
        seq_length=16,
        device="mine",
        devices=(MINE,),
    )
    validate(uniform_plan(layout))


WIDE = llama_model(hidden_size=64, num_attention_heads=4, kv_channels=16, num_query_groups=4, ffn_hidden_size=128)
"""Of sizes that fp8 can multiply with tp 2."""


def in_fp8(model: ModelSpec = WIDE, *, precision: Any = "bf16", seq_length: int = 16, **fields: Any) -> Plan:
    fields = {"layers": (0, model.num_layers), "ranks": (0,), "device": "H100"} | fields
    made = plan(model, [replica(stage(**fields))], precision=precision, seq_length=seq_length)
    return made.with_replica(0, made.replicas[0].with_stage(0, fp8=True))


@pytest.mark.parametrize(
    "made",
    [
        in_fp8(),
        in_fp8(device="RTX-4090"),
        in_fp8(ranks=(0, 1), tp=2, sp=True, mbs=2),
        in_fp8(ranks=(0, 1), tp=2),
        in_fp8(delay=1),
        in_fp8(seq_length=8, mbs=2),
    ],
)
def test_fp8_where_it_can_be(made: Plan) -> None:
    validate(made)
    assert from_json(Plan, to_json(made), source="plan.json") == made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (in_fp8(device="A100-40"), r"device A100-40 has compute capability 8\.0, fp8 begins with 8\.9"),
        (in_fp8(device="cpu"), r"device cpu has no CUDA, fp8 begins with 8\.9"),
        (in_fp8(device="MI300X"), "device MI300X has no CUDA"),
        (in_fp8(precision="fp16"), "the plan's precision is fp16, fp8 goes with bf16"),
        (in_fp8(precision="fp32"), "the plan's precision is fp32, fp8 goes with bf16"),
        (in_fp8(seq_length=8), "a rank has 8 tokens of a microbatch, which must be a multiple of 16"),
        (in_fp8(ranks=(0, 1), tp=2, sp=True), "a rank has 8 tokens of a microbatch, which must be a multiple of 16"),
        (
            in_fp8(dataclasses.replace(WIDE, ffn_hidden_size=144), ranks=(0, 1), tp=2),
            "tp 2 leaves a rank 72 of ffn_hidden_size 144, which must be a multiple of 16",
        ),
        (
            in_fp8(dataclasses.replace(WIDE, hidden_size=72)),
            "the model's hidden_size is 72, which must be a multiple of 16",
        ),
        (in_fp8(moe_model()), "the model has experts"),
    ],
)
def test_fp8_where_it_cannot_be_is_refused(made: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=rf"replica 0 stage 0: fp8 is true, but .*{message}.*; set it to false"):
        validate(made)


def test_a_uniform_plan_may_be_in_fp8() -> None:
    layout = UniformLayout(
        model=WIDE,
        world_size=2,
        pp=2,
        micro_batch_size=1,
        global_batch_size=2,
        seq_length=16,
        device="H100",
        precision="bf16",
        fp8=True,
    )
    made = uniform_plan(layout)
    validate(made)
    assert [stage.fp8 for _, _, stage in made.stages()] == [True, True]


def test_stages_in_turns_are_alike_in_fp8() -> None:
    stages = (
        stage(layers=(0, 1), ranks=(0,), device="H100"),
        stage(layers=(1, 2), ranks=(1,), device="H100"),
        stage(layers=(2, 3), ranks=(0,), device="H100"),
        stage(layers=(3, 6), ranks=(1,), device="H100"),
    )
    model = dataclasses.replace(WIDE, num_layers=6)
    made = plan(model, [replica(*stages)], precision="bf16")
    with pytest.raises(PlanError, match="replica 0 stage 2: fp8 is False, but stage 0 on the same ranks has True"):
        validate(made.with_replica(0, made.replicas[0].with_stage(0, fp8=True)))


def test_a_stage_in_fp8_stands_beside_one_in_bf16() -> None:
    made = plan(
        WIDE,
        [
            replica(stage(layers=(0, WIDE.num_layers), ranks=(0,), device="H100")),
            replica(stage(layers=(0, WIDE.num_layers), ranks=(1,), device="A100-40")),
        ],
        precision="bf16",
    )
    validate(made.with_replica(0, made.replicas[0].with_stage(0, fp8=True)))
