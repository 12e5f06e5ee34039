"""On a GPU: what CUDA says of it is understood, and torch has kernels for it."""

import pytest
import torch

from hetero.distributed.found_devices import found_device, short_of_memory
from hetero.distributed.runtime_versions import check_kernels, runtime_versions
from hetero.spec.shipped_devices import SHIPPED_DEVICES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

DEVICE = torch.device("cuda", 0)


def test_the_device_is_of_its_type() -> None:
    """One that ships, or what CUDA says of it; a part of a device is told by its memory."""
    found = found_device(DEVICE)
    device = found.type_among(SHIPPED_DEVICES)
    assert found.is_a(device)
    assert device.has_bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    assert "MIG" in str(found.cuda_name) or short_of_memory([found], [device.memory_gib]) == []


def test_its_torch_has_kernels_and_an_nccl() -> None:
    check_kernels(DEVICE)
    assert torch.ones(1, device=DEVICE).item() == 1.0
    assert runtime_versions(DEVICE).nccl != "none"
