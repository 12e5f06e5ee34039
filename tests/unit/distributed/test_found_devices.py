"""What a rank sits on is what its stage was planned for, or the error says what it is."""

import dataclasses

import pytest

from hetero.distributed.found_devices import check_devices, short_of_memory
from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.spec.devices import DeviceType
from hetero.spec.found_device import FoundDevice
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GIB
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

CPU = FoundDevice()
V100 = FoundDevice(cuda_name="Tesla V100-SXM2-16GB", compute_capability=(7, 0), memory_bytes=16_928_342_016)
A100 = FoundDevice(cuda_name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0), memory_bytes=42_297_786_368)
UNKNOWN = FoundDevice(cuda_name="NVIDIA X1 [beta]", compute_capability=(8, 6), memory_bytes=12 * GIB)

TWO_KINDS = plan(
    gpt2_model(),
    [
        replica(
            stage(layers=(0, 2), ranks=(1, 2), dp=2, device="A100-40"),
            stage(layers=(2, 6), ranks=(0,), device="V100-16"),
        )
    ],
    idle_ranks=(3,),
)


def test_every_working_rank_sits_on_its_stages_device() -> None:
    """What an idle rank sits on does not matter."""
    check_devices(TWO_KINDS, [V100, A100, A100, CPU])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            [A100, A100, V100, V100],
            "replica 0 stage 0: it is planned for A100-40, but ranks 2 sit on V100-16; "
            "reorder the hosts or make a plan for these devices",
        ),
        (
            [CPU] * 4,
            "replica 0 stage 0: it is planned for A100-40, but ranks 1-2 sit on cpu; "
            "reorder the hosts or make a plan for these devices",
        ),
        (
            [UNKNOWN, A100, A100, CPU],
            "replica 0 stage 1: it is planned for V100-16, but ranks 0 sit on NVIDIA X1 [beta]; "
            "reorder the hosts or make a plan for these devices",
        ),
    ],
    ids=["swapped", "no-gpu", "unknown-gpu"],
)
def test_a_stage_on_other_devices_is_refused(found: list[FoundDevice], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        check_devices(TWO_KINDS, found)
    assert str(raised.value) == message


def one_stage_on(device: DeviceType) -> Plan:
    made = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,), device=device.name))])
    return dataclasses.replace(made, devices=(device,))


def test_a_described_device_is_found_by_its_name_and_capability() -> None:
    mine = DeviceType(name="mine", memory_gib=12, compute_capability=(8, 6), cuda_name="*X1*")
    check_devices(one_stage_on(mine), [UNKNOWN])
    for other in (A100, V100, CPU):
        with pytest.raises(PlanError, match="it is planned for mine, but ranks 0 sit on"):
            check_devices(one_stage_on(mine), [other])


def test_without_a_name_the_capability_decides() -> None:
    mine = DeviceType(name="mine", memory_gib=12, compute_capability=(8, 6))
    check_devices(one_stage_on(mine), [UNKNOWN])
    with pytest.raises(PlanError, match=r"ranks 0 sit on A100-40 of compute capability 8\.0, not 8\.6"):
        check_devices(one_stage_on(mine), [A100])


def test_a_wrong_capability_is_told_where_the_name_is_right() -> None:
    wrong = DeviceType(name="mine", memory_gib=12, compute_capability=(9, 0), cuda_name="*X1*")
    with pytest.raises(PlanError, match=r"ranks 0 sit on NVIDIA X1 \[beta\] of compute capability 8\.6, not 9\.0"):
        check_devices(one_stage_on(wrong), [UNKNOWN])


def test_hosts_without_gpus_may_be_described() -> None:
    check_devices(one_stage_on(DeviceType(name="epyc", memory_gib=256)), [CPU])
    with pytest.raises(PlanError, match=r"for epyc, but ranks 0 sit on A100-40 of compute capability 8\.0, not none"):
        check_devices(one_stage_on(DeviceType(name="epyc", memory_gib=256)), [A100])


def test_a_gpu_that_nobody_described_is_what_cuda_says() -> None:
    """Its description in the plan is one by which it is found again, whatever characters its name has."""
    device = UNKNOWN.type_among(SHIPPED_DEVICES)
    assert (device.name, device.memory_gib, device.compute_capability) == ("NVIDIA X1 [beta]", 12, (8, 6))
    assert device.has_bf16
    made = one_stage_on(device)
    validate(made)
    check_devices(made, [UNKNOWN])


def test_known_gpus_are_of_their_type() -> None:
    assert [each.type_among(SHIPPED_DEVICES).name for each in (CPU, V100, A100)] == ["cpu", "V100-16", "A100-40"]


def test_a_name_says_more_than_a_capability() -> None:
    nameless = DeviceType(name="mine", memory_gib=12, compute_capability=(8, 0))
    assert A100.type_among(SHIPPED_DEVICES.plus([nameless])).name == "A100-40"
    other = dataclasses.replace(A100, cuda_name="NVIDIA X2")
    assert other.type_among(SHIPPED_DEVICES.plus([nameless])).name == "mine"


def test_less_memory_than_planned_with_is_told() -> None:
    """Not the tenth that error correction takes, nor the rounding of whoever names the card."""
    t4 = FoundDevice(cuda_name="Tesla T4", compute_capability=(7, 5), memory_bytes=15_634_661_376)
    part = dataclasses.replace(A100, cuda_name="NVIDIA A100-SXM4-40GB MIG 3g.20gb", memory_bytes=20 * GIB)
    assert part.is_a(SHIPPED_DEVICES.of("A100-40"))
    assert short_of_memory([V100, A100, t4, CPU], [16, 40, 16, None]) == []
    (line,) = short_of_memory([A100, part, part], [40, 40, 40])
    assert line.startswith("ranks 1-2: NVIDIA A100-SXM4-40GB MIG 3g.20gb has 20.0 GiB, the plan counts on 40; ")
    assert short_of_memory([part], [20]) == []
