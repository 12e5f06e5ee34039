"""Says which torch dtype each precision of a plan computes in, and which one its gradients have."""

import torch

from hetero.plan.ir import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

PRECISIONS = {dtype: precision for precision, dtype in DTYPES.items()}
"""The other way round, for weights that were saved in a dtype."""

GRADIENT_DTYPES: dict[Precision, torch.dtype] = {**DTYPES, "bf16": torch.float32, "fp16": torch.float32}
"""Gradients and master weights are in full precision, whatever the layers compute in."""
