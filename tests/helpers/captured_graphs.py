"""Keeps torch's optimizers from asking CUDA's driver on a machine that only says it has CUDA.

A module of its own: who plays CUDA may have to do so before anybody imports megatron-core.
"""

from typing import Any
from unittest import mock

import torch


def no_graph_is_captured() -> Any:
    """Return a patch with which no step of an optimizer asks CUDA's driver whether a graph is being captured.

    Builds of torch for CUDA do, once ``torch.cuda.is_available()`` is true: torch 2.10 in
    ``_cuda_graph_capture_health_check``, 2.13 and newer in ``_accelerator_graph_capture_health_check``.
    """
    names = [name for name in vars(torch.optim.Optimizer) if name.endswith("_graph_capture_health_check")]
    assert names, "torch has renamed it"
    stand_ins: dict[str, Any] = {name: lambda _: None for name in names}
    return mock.patch.multiple(torch.optim.Optimizer, **stand_ins)
