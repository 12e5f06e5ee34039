"""Device types: what runs on which, and which one a CUDA name means."""

import pytest

from hetero.errors import ConfigError
from hetero.spec.devices import device_type, device_type_of_cuda_name


@pytest.mark.parametrize("name", ["V100-16", "V100-32", "T4", "RTX-2080Ti", "Titan-RTX"])
def test_before_ampere_there_is_no_bf16_and_no_transformer_engine(name: str) -> None:
    assert "bf16" not in device_type(name).precisions
    assert "fp16" in device_type(name).precisions
    assert not device_type(name).has_transformer_engine


@pytest.mark.parametrize("name", ["A100-40", "RTX-3090", "L4", "H100", "GH200"])
def test_since_ampere_there_are_both(name: str) -> None:
    assert "bf16" in device_type(name).precisions
    assert device_type(name).has_transformer_engine


def test_the_cpu_does_every_precision_without_transformer_engine() -> None:
    assert set(device_type("cpu").precisions) == {"fp64", "fp32", "bf16", "fp16"}
    assert not device_type("cpu").has_transformer_engine
    assert device_type("cpu").memory_gib is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [("A100", "'A100-40' or 'A100-80'"), ("a100-40", "'A100-40'"), ("A100_40", "'A100-40'"), ("RTX3090", "'RTX-3090'")],
)
def test_near_matches_are_offered(name: str, meant: str) -> None:
    """H100 is closer to A100 than A100-40 is, letter by letter."""
    with pytest.raises(ConfigError, match=rf"unknown device type '{name}' \(did you mean {meant}\?\)"):
        device_type(name)


def test_without_a_near_match_all_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"unknown device type 'abacus' \(known: cpu, V100-16, "):
        device_type("abacus")


@pytest.mark.parametrize(
    ("cuda_name", "name"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
        ("NVIDIA TITAN RTX", "Titan-RTX"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A800-SXM4-80GB", "A800"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_cuda_names(cuda_name: str, name: str) -> None:
    device = device_type_of_cuda_name(cuda_name)
    assert device is not None
    assert device.name == name


@pytest.mark.parametrize("cuda_name", ["NVIDIA GeForce GTX 1080", "NVIDIA RTX A4000", "NVIDIA L40"])
def test_an_unknown_cuda_name_is_no_device_type(cuda_name: str) -> None:
    assert device_type_of_cuda_name(cuda_name) is None
