"""Causal attention of the local layers, by torch's ``scaled_dot_product_attention``: no device keeps its scores.

Tensor shapes: S tokens of the whole sequence, B samples of a microbatch, N heads of queries and G of keys and values on
this tensor-parallel rank, D channels of a head.
"""

import contextlib
import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel

from hetero.plan.ir import Plan, Stage
from hetero.runtime.layer_choice import LayerChoice
from hetero.runtime.options import StageOptions

_FUSED = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)

KERNELS: Mapping[AttnBackend, tuple[SDPBackend, ...]] = MappingProxyType(
    {
        AttnBackend.flash: (SDPBackend.FLASH_ATTENTION, *_FUSED, SDPBackend.MATH),
        AttnBackend.fused: (*_FUSED, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
        AttnBackend.unfused: (SDPBackend.MATH,),
    }
)
"""torch's kernels by what ``--attention-backend`` asks for, the first that the device has; else torch chooses.

``MATH`` alone materialises the scores. It is the last resort: of float64 on CUDA and of dropout on a CPU.
"""


class ScaledDotProductAttention(torch.nn.Module):
    """Stands for megatron-core's core attention, whose arguments it takes; causal whatever mask it is handed.

    Without sequence parallelism, tensor-parallel ranks have equal rows outside of attention and unequal heads inside:
    there, dropout draws from the generator that differs among them, as in megatron-core. With it, the default one does.

    Args:
        attn_mask_type: causal; there is no other here.
        softmax_scale: of the scores; ``None`` is 1 / sqrt(D).
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        attn_mask_type: AttnMaskType,
        softmax_scale: float | None,
        **_: object,
    ) -> None:
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal, attn_mask_type
        self._dropout = config.attention_dropout
        self._ranks_differ = not config.sequence_parallel
        self._scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self._kernels = KERNELS.get(config.attention_backend)

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: None = None,
        **_: object,
    ) -> torch.Tensor:
        """Attention of every token to itself and those before it -> [S, B, N D]."""
        assert attention_mask is None, "the kernels are causal themselves; a mask would make them keep the scores"
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query_SBND, key_SBGD, value_SBGD))
        dropout = self._dropout if self.training else 0.0
        with self._generator(dropout), _preferring(self._kernels):
            if kernel_of(query, key, value, dropout=dropout) == SDPBackend.MATH:
                # The memory-efficient kernel, all that a V100 has, does not know groups. Its copies are small beside
                # the scores, which the only other one would keep.
                copies = query.shape[1] // key.shape[1]
                key, value = (each.repeat_interleave(copies, dim=1) if copies > 1 else each for each in (key, value))
            context = F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=self._scale,
                enable_gqa=key.shape[1] < query.shape[1],
            )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _generator(self, dropout: float) -> contextlib.AbstractContextManager[None]:
        draws = dropout > 0.0 and self._ranks_differ
        return get_cuda_rng_tracker().fork() if draws else contextlib.nullcontext()


def attention_kernel(
    plan: Plan, stage: Stage, options: StageOptions, choice: LayerChoice, *, device: torch.device, dtype: torch.dtype
) -> str:
    """What attention of ``stage`` runs by, for a log; which of its kernels TransformerEngine takes, it says itself."""
    if not choice.torch_attention:
        return f"TransformerEngine {options.attention_backend}"
    heads, groups = (max(1, n // stage.tp) for n in (plan.model.num_attention_heads, plan.model.num_query_groups))
    query, key = (torch.empty(1, n, 8, plan.model.kv_channels, device=device, dtype=dtype) for n in (heads, groups))
    with _preferring(KERNELS.get(AttnBackend[options.attention_backend])):
        found = kernel_of(query, key, key, dropout=options.attention_dropout)
        if found == SDPBackend.MATH:
            found = kernel_of(query, query, query, dropout=options.attention_dropout)
    return f"torch {found.name.lower()}"


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float) -> SDPBackend:
    """The kernel that ``scaled_dot_product_attention`` takes for causal attention of [B, N, S, D] to [B, G, S, D]."""
    grouped = key.shape[1] < query.shape[1]
    return SDPBackend(torch._fused_sdp_choice(query, key, value, None, dropout, True, enable_gqa=grouped))


def _preferring(kernels: tuple[SDPBackend, ...] | None) -> contextlib.AbstractContextManager[None]:
    if kernels is None:
        return contextlib.nullcontext()
    return sdpa_kernel(list(kernels), set_priority=True)
