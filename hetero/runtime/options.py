"""Options of the runtime: what layers are built with beside their shapes, and how gradients are summed.

The same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AuxiliaryLoss = Literal["none", "aux_loss", "seq_aux_loss"]
"""Which loss spreads tokens over experts, by Megatron-LM's names: of each microbatch, or of each sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """Settings that change training but neither a parameter's shape nor who holds it.

    Dropout draws from per-rank generators, so with dropout on the loss depends on the plan.
    init_method_std: of the initial weights; ``None`` leaves whatever is in their memory, where all are loaded next.
    transformer_impl: ``auto`` takes TransformerEngine's layers where it is installed and the device can, in bf16 and
        fp16, else megatron-core's local ones (:mod:`.layer_choice`).
    attention_backend: which kernels attention tries first. A device without them takes what it has: all give the same
        result but for rounding. ``local`` is torch's attention in TransformerEngine's layers as well.
    masked_softmax_fusion: of Megatron-LM's scripts; no attention here has a softmax of its own.
    bias_gelu_fusion, bias_swiglu_fusion, bias_dropout_fusion: on CUDA, let the compiler make one kernel of these.
    rope_fusion: in TransformerEngine's layers, rotate queries and keys by its kernel.
    persist_layer_norm: where Apex normalizes, by its persistent kernel if it has one for the hidden size.
    cross_entropy_loss_fusion: the loss by megatron-core's compiled functions, which round its gradient to bf16.
    fp8_format, fp8_recipe: of the stages that the plan has in fp8; see TransformerEngine's recipes. Without a format,
        ``hybrid``: e4m3 forward, e5m2 backward.
    fp8_amax_history_len, fp8_amax_compute_algo: of the recipe ``delayed``: over how many microbatches the largest
        values are kept, and whether a scale follows the newest or the largest of them. Megatron-LM's defaults.
    gradient_accumulation_fusion: let the product that is a weight's gradient add it to the sum over microbatches, where
        it can, and an embedding the gradients of its rows.
    moe_router_load_balancing: the auxiliary loss of experts. ``aux_loss`` is a mean over each microbatch, so that it
        depends on the plan; ``seq_aux_loss`` is one over each sequence and does not.
    moe_aux_loss_coeff: factor of that loss; 0 leaves it out.
    """

    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float | None = 0.02
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    gradient_accumulation_fusion: bool = True
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    masked_softmax_fusion: bool = True
    bias_gelu_fusion: bool = True
    bias_swiglu_fusion: bool = True
    bias_dropout_fusion: bool = True
    rope_fusion: bool = True
    persist_layer_norm: bool = True
    cross_entropy_loss_fusion: bool = False
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "delayed"
    fp8_amax_history_len: int = 1
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    moe_router_load_balancing: AuxiliaryLoss = "none"
    moe_aux_loss_coeff: float = 0.0

    @property
    def aux_loss_is_per_microbatch(self) -> bool:
        """Whether an auxiliary loss depends on which samples share a microbatch, and so on the plan."""
        return self.moe_router_load_balancing == "aux_loss" and self.moe_aux_loss_coeff > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataParallelOptions:
    """How the holders of a segment sum its gradients and update it.

    bucket_numel: elements of gradient that are reduced by one collective, about, where the plan says nothing else.
    overlap_grad_reduce: reduce gradients beside the last backward instead of after it.
    overlap_param_gather: under a plan with a distributed optimizer, gather updated weights beside the next forward
        instead of before it; so they are anyway where hosts update.
    host_cores: of this rank, on which its host updates what the plan leaves to it; all that it may use, if ``None``.
    """

    bucket_numel: int
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    host_cores: Sequence[int] | None = None
