"""Device types: what runs on which, which one a CUDA name means, and how a person describes others."""

from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.serialization import checked
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.shipped_devices import SHIPPED_DEVICES


def can(device: DeviceType) -> list[str]:
    """What it has of all that a device may have."""
    return [each for each in ("bf16", "transformer_engine", "fp8") if getattr(device, f"has_{each}")]


@pytest.mark.parametrize("name", ["V100-16", "V100-32", "T4", "RTX-2080Ti", "Titan-RTX"])
def test_before_ampere_there_is_no_bf16_and_no_transformer_engine(name: str) -> None:
    device = SHIPPED_DEVICES.of(name)
    assert "bf16" not in device.precisions
    assert "fp16" in device.precisions
    assert can(device) == []


@pytest.mark.parametrize("name", ["A100-40", "A30", "A6000", "RTX-3090", "L4", "H100", "GH200", "B200"])
def test_since_ampere_there_are_both(name: str) -> None:
    device = SHIPPED_DEVICES.of(name)
    assert "bf16" in device.precisions
    assert {"bf16", "transformer_engine"} <= set(can(device))


def test_fp8_begins_with_ada() -> None:
    names = {device.name for device in SHIPPED_DEVICES if device.has_fp8}
    assert {"L4", "L20", "RTX-4090", "RTX-6000-Ada", "H100", "H100-NVL", "H20", "B200"} <= names
    assert names.isdisjoint({"cpu", "V100-16", "A100-80", "A40", "A6000", "RTX-3090"})


def test_the_cpu_does_every_precision_without_transformer_engine() -> None:
    cpu = SHIPPED_DEVICES.of("cpu")
    assert set(cpu.precisions) == {"fp64", "fp32", "bf16", "fp16"}
    assert not cpu.has_transformer_engine
    assert cpu.memory_gib is None


@pytest.mark.parametrize("name", ["MI250X", "MI300X"])
def test_a_gpu_without_cuda_has_prices_and_nothing_that_is_cudas(name: str) -> None:
    """``torch.cuda.get_device_capability()`` says (9, 4) on an MI300X, which is not Hopper."""
    device = SHIPPED_DEVICES.of(name)
    assert "bf16" in device.precisions
    assert device.data_sheet is not None
    assert can(device) == ["bf16"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("A100", "'A100-40' or 'A100-80'"), ("a100-40", "'A100-40'"), ("A100_40", "'A100-40'"), ("RTX3090", "'RTX-3090'")],
)
def test_near_matches_are_offered(name: str, meant: str) -> None:
    """H100 is closer to A100 than A100-40 is, letter by letter."""
    with pytest.raises(ConfigError, match=rf"unknown device type '{name}' \(did you mean {meant}\?\)"):
        SHIPPED_DEVICES.of(name)


def test_without_a_near_match_all_are_listed() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown device type 'abacus' \(known: cpu, V100-16, .*\); a cluster file describes others"
    ):
        SHIPPED_DEVICES.of("abacus")


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("Tesla V100-PCIE-16GB", "V100-16"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla V100S-PCIE-32GB", "V100S-32"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A30", "A30"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L20", "L20"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
    ],
)
def test_cuda_names(cuda_name: str, name: str) -> None:
    assert [device.name for device in SHIPPED_DEVICES if device.is_called(cuda_name)] == [name]


@pytest.mark.parametrize(
    "cuda_name",
    [
        "NVIDIA GeForce GTX 1080",
        "NVIDIA RTX A4000",
        "NVIDIA L40",
        "Quadro RTX 6000",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM2e",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 144G HBM3e",
    ],
)
def test_an_unknown_cuda_name_is_no_device_type(cuda_name: str) -> None:
    """Also one that begins like one that ships, and is another device."""
    assert SHIPPED_DEVICES.called(cuda_name) is None


def described(**changes: Any) -> DeviceType:
    """As a person describes one: plain data of a file, with these ``changes``; ``None`` leaves a key out."""
    sheet = {
        "memory_gb_per_s": 448,
        "fp32_tflops": 19.2,
        "tf32_tflops": 38.4,
        "bf16_tflops": 76.7,
        "fp16_tflops": 76.7,
        "source": "its data sheet",
    } | changes.pop("sheet", {})
    data = {
        "name": "RTX-A4000",
        "memory_gib": 16,
        "compute_capability": [8, 6],
        "cuda_name": "NVIDIA RTX A4000",
        "data_sheet": {key: value for key, value in sheet.items() if value is not None},
    } | changes
    return checked(DeviceType, data, source="cluster.yaml")


def test_a_device_is_described_by_its_data_sheet() -> None:
    device = described()
    assert device.has_bf16
    assert not device.has_fp8
    assert device.is_called("nvidia rtx a4000")
    assert device.data_sheet is not None
    assert device.data_sheet.flops_per_s("bf16") == 76.7e12
    with pytest.raises(ConfigError, match=r"its data sheet.*no fp64_tflops; add it, or profile the device"):
        device.data_sheet.flops_per_s("fp64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sheet": {"bf16_tflops": None}}, "compute_capability 8.6 has bf16; state bf16_tflops in data_sheet"),
        ({"sheet": {"fp8_tflops": 150.0}}, "compute_capability 8.6 has no fp8, but data_sheet states fp8_tflops"),
        ({"compute_capability": [8, 9]}, "compute_capability 8.9 has fp8; state fp8_tflops"),
        ({"compute_capability": [7, 5]}, "compute_capability 7.5 has no tf32, but data_sheet states tf32_tflops"),
        ({"sheet": {"fp32_tflops": 0.0}}, "fp32_tflops is 0.0, must be above 0"),
        ({"sheet": {"memory_gb_per_s": -1.0}}, "memory_gb_per_s is -1.0, must be above 0"),
        ({"sheet": {"memory_gb_s": 448}}, r"unknown key 'data_sheet.memory_gb_s' \(did you mean 'memory_gb_per_s'"),
        ({"memory_gib": 0}, "memory_gib is 0, must be at least 1"),
        ({"memory": 16}, "unknown key 'memory'"),
        ({"name": ""}, "name is empty"),
    ],
)
def test_a_description_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        described(**changes)


def test_a_larger_catalogue_has_both_and_prefers_the_new() -> None:
    mine = DeviceType(name="A100-40", memory_gib=1)
    more = SHIPPED_DEVICES.plus([mine, described()])
    assert more.of("A100-40") is mine
    assert more.of("RTX-A4000") == described()
    assert more.called("NVIDIA RTX A4000") == described()
    assert more.of("H100") is SHIPPED_DEVICES.of("H100")
    assert SHIPPED_DEVICES.plus([]) is SHIPPED_DEVICES


def test_fp8_is_as_much_faster_as_the_peaks_say() -> None:
    sheet = DataSheet(
        memory_gb_per_s=1.0, fp32_tflops=1.0, bf16_tflops=4.0, fp16_tflops=4.0, fp8_tflops=10.0, source=""
    )
    assert sheet.fp8_speedup == 2.5
