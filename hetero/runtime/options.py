"""Options of the runtime: what layers are built with beside their shapes, and how gradients are summed.

The same on every rank.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """Settings that change training but neither a parameter's shape nor who holds it.

    Dropout draws from per-rank generators, so with dropout on the loss depends on the plan.
    transformer_impl: ``auto`` takes TransformerEngine's layers where it is installed and the device can, else
        megatron-core's local ones. A stage that splits its backward has the local ones.
    gradient_accumulation_fusion: let the kernel that computes a weight's gradient add it up as well, where it can:
        TransformerEngine's, and in the local layers apex's if it is installed.
    moe_router_load_balancing: the auxiliary loss is a mean over microbatches, so it depends on their size.
    """

    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    gradient_accumulation_fusion: bool = True
    moe_router_load_balancing: Literal["none", "aux_loss"] = "none"
    moe_aux_loss_coeff: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelOptions:
    """How the holders of a segment sum its gradients and update it.

    bucket_numel: elements of gradient that are reduced by one collective, about, where the plan says nothing else.
    overlap_grad_reduce: reduce gradients beside the last backward instead of after it.
    overlap_param_gather: under a plan with a distributed optimizer, gather updated weights beside the next forward
        instead of before it.
    """

    bucket_numel: int
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
