"""Ranks whose software does not fit together, or not their device, are told before anything is sent or computed."""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from hetero.distributed import runtime_versions as module
from hetero.distributed.found_devices import found_device
from hetero.distributed.kernel_architectures import has_kernels
from hetero.distributed.runtime_versions import (
    RuntimeVersions,
    check_kernels,
    difference_of,
    runtime_versions,
)
from hetero.errors import ConfigError

CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
"""As ``torch.cuda.get_arch_list()`` has it for the wheel with CUDA 13 (pytorch/pytorch issue 172352)."""

CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        (CU130, (7, 0), False),
        (CU126, (7, 0), True),
        (CU126, (10, 0), False),
        (CU130, (8, 9), True),  # sm_86 runs there
        (CU130, (9, 0), True),
        (CU130, (10, 3), True),  # sm_100
        (CU130, (11, 0), False),
        (CU130, (12, 1), True),
        (CU130, (13, 0), True),  # by compute_120
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["sm_100f"], (12, 0), False),
        (["compute_100f"], (12, 0), False),
        (["sm_86"], (8, 0), False),
        ([], (9, 0), True),
        (["gfx942"], (9, 4), False),
    ],
)
def test_which_devices_a_build_has_kernels_for(
    built_for: Sequence[str], capability: tuple[int, int], runs: bool
) -> None:
    assert has_kernels(built_for, capability) == runs


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, *, name: str, capability: tuple[int, int], built_for: Sequence[str]
) -> None:
    """Let torch tell of such a GPU, without one."""
    properties = SimpleNamespace(name=name, total_memory=16 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built_for))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(module, "loaded_nccl_version", lambda: None)


def test_a_v100_under_cuda_13_is_told_which_build_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, name="Tesla V100-SXM2-16GB", capability=(7, 0), built_for=CU130)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    with pytest.raises(ConfigError) as raised:
        check_kernels(CUDA)
    said = str(raised.value)
    assert said.startswith(
        "Tesla V100-SXM2-16GB has compute capability 7.0, and torch 2.13.0+cu130 has kernels for sm_75 "
    )
    assert (
        "torch 2.14 or older with CUDA 12.6 (pip install torch --index-url https://download.pytorch.org/whl/cu126)"
        in said
    )


def test_a_newer_gpu_than_the_build_is_told_to_take_another(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, name="NVIDIA B200", capability=(10, 0), built_for=CU126)
    with pytest.raises(ConfigError, match=r"B200 has compute capability 10\.0, .* install a build that has them"):
        check_kernels(CUDA)


def test_what_fits_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(torch.device("cpu"))
    on_gpu(monkeypatch, name="Tesla V100-SXM2-16GB", capability=(7, 0), built_for=CU126)
    check_kernels(CUDA)


def test_rocm_has_other_architectures_which_nobody_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, name="AMD Instinct MI300X", capability=(9, 4), built_for=["gfx942"])
    monkeypatch.setattr(torch.version, "hip", "7.2")
    check_kernels(CUDA)
    assert runtime_versions(CUDA).nccl == "RCCL 2.28.9"
    assert found_device(CUDA).compute_capability is None


def test_a_rank_says_what_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, name="NVIDIA A30", capability=(8, 0), built_for=CU130)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    said = runtime_versions(CUDA)
    assert (said.torch, said.torch_build, said.nccl) == ("2.13.0", "cu130", "2.28.9")
    monkeypatch.setattr(module, "loaded_nccl_version", lambda: "2.29.7")
    assert runtime_versions(CUDA).nccl == "2.29.7", "what is loaded counts, not what torch was built with"
    assert runtime_versions(torch.device("cpu")).nccl == "none"
    found = found_device(CUDA)
    assert (found.cuda_name, found.compute_capability, found.memory_bytes) == ("NVIDIA A30", (8, 0), 16 * 2**30)


OWN = RuntimeVersions(
    python="3.12", hetero="0.2.0", torch="2.13.0", torch_build="cu130", megatron_core="0.16.1", nccl="2.28.9"
)


def test_builds_for_several_versions_of_cuda_go_together() -> None:
    """The V100 beside the H100."""
    assert difference_of([OWN, dataclasses.replace(OWN, torch_build="cu126")]) == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"torch": "2.14.0"}, "different versions of torch: 2.13.0 on ranks 0,2, 2.14.0 on ranks 1; install one"),
        (
            {"hetero": "0.3.0"},
            "different versions of megatron-hetero: 0.2.0 on ranks 0,2, 0.3.0 on ranks 1; install one",
        ),
        ({"megatron_core": "0.16.2"}, "megatron-core: 0.16.1 on ranks 0,2, 0.16.2 on ranks 1; install one"),
        (
            {"nccl": "2.27.5", "torch_build": "cu126"},
            "NCCL: 2.28.9 (torch 2.13.0, cu130) on ranks 0,2, 2.27.5 (torch 2.13.0, cu126) on ranks 1; it does not "
            "connect two versions: install one on all hosts, by pip install --no-deps nvidia-nccl-cu12==V",
        ),
    ],
)
def test_what_differs_is_told_with_the_ranks(other: dict[str, str], message: str) -> None:
    assert message in difference_of([OWN, dataclasses.replace(OWN, **other), OWN])
