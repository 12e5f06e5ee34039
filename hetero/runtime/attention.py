"""Causal attention of the local layers, by torch's ``scaled_dot_product_attention``: no device keeps its scores.

Tensor shapes: S tokens of the whole sequence, B samples of a microbatch, N heads of queries and G of keys and values on
this tensor-parallel rank, D channels of a head.
"""

import contextlib
import math
import sys
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
from hetero.spec.profile import AttentionKernel

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

_IN_PROFILES: Mapping[SDPBackend, AttentionKernel] = MappingProxyType(
    {
        SDPBackend.FLASH_ATTENTION: "flash",
        SDPBackend.CUDNN_ATTENTION: "cudnn",
        SDPBackend.EFFICIENT_ATTENTION: "efficient",
        SDPBackend.MATH: "unfused",
    }
)
"""What a profile calls torch's kernels."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [B, N, S, D], keys and values [B, G, S, D]."""


class ScaledDotProductAttention(torch.nn.Module):
    """Stands for megatron-core's core attention, whose arguments it takes; causal whatever mask it is handed.

    Without sequence parallelism, tensor-parallel ranks have equal rows outside of attention and unequal heads inside:
    there, dropout draws from the generator that differs among them, as in megatron-core. With it, the default one does.

    Args:
        attn_mask_type: causal; there is no other here.
        softmax_scale: of the scores; ``None`` is 1 / sqrt(D).

    Attributes:
        kernel: the one that the last forward ran by; ``None`` before the first.
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
        self.kernel: SDPBackend | None = None

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
        heads = _heads_first(query_SBND, key_SBGD, value_SBGD)
        dropout = self._dropout if self.training else 0.0
        with self._generator(dropout), _preferring(self._kernels):
            self.kernel, (query, key, value) = _choose_kernel(heads, dropout=dropout)
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
    """Return what attention of ``stage`` runs by, for a log; which kernel TransformerEngine takes, it logs itself.

    torch is asked with the heads of one microbatch, as a layer hands them over in training: the kernel depends on their
    shape, strides and dtype, on dropout, and on whether there will be a backward.
    """
    if not choice.torch_attention:
        return f"TransformerEngine {options.attention_backend}"
    with torch.enable_grad(), _preferring(KERNELS.get(AttnBackend[options.attention_backend])):
        heads = _made_up_heads(plan, stage, device=device, dtype=dtype)
        kernel, _ = _choose_kernel(heads, dropout=options.attention_dropout)
    return f"torch {kernel.name.lower()}"


def attention_that_ran(module: torch.nn.Module) -> AttentionKernel | None:
    """Return the kernel by which the last forward of ``module`` computed attention, ``None`` if it has no attention."""
    for each in module.modules():
        if isinstance(each, ScaledDotProductAttention) and each.kernel is not None:
            return _IN_PROFILES[each.kernel]
        for base in type(each).__mro__:
            if base.__name__ == "DotProductAttention" and base.__module__.startswith("transformer_engine."):
                return _chosen_by_transformer_engine(base)
    return None


def _chosen_by_transformer_engine(attention: type) -> AttentionKernel | None:
    """Return the kernel of TransformerEngine's last forward, ``None`` where it does not say.

    It keeps its choice in a global of the module that defines ``attention``, under the same names from 1.7 to 2.11.
    """
    chosen = getattr(sys.modules[attention.__module__], "_attention_backends", {})
    names: dict[str, AttentionKernel] = {
        "use_flash_attention": "flash",
        "use_fused_attention": "cudnn",
        # Its softmax is one kernel with scale and mask.
        "use_unfused_attention": "fused-softmax",
    }
    return next((kernel for name, kernel in names.items() if chosen.get(name)), None)


def _made_up_heads(plan: Plan, stage: Stage, *, device: torch.device, dtype: torch.dtype) -> Heads:
    """Make the heads of one microbatch without content, cut from one product as megatron-core's layers cut them."""
    model = plan.model
    heads, groups = (max(1, n // stage.tp) for n in (model.num_attention_heads, model.num_query_groups))
    per_group = heads // groups
    shape = (plan.seq_length, stage.micro_batch_size, groups, per_group + 2, model.kv_channels)
    mixed = torch.empty(shape, device=device, dtype=dtype, requires_grad=True)
    query, key, value = mixed.split([per_group, 1, 1], dim=3)
    key = key.flatten(2, 3)
    # Rotated keys are a tensor of their own.
    key = key.contiguous() if model.position_embedding == "rope" else key
    return _heads_first(query.flatten(2, 3), key, value.flatten(2, 3))


def _heads_first(query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor) -> Heads:
    query, key, value = (each.permute(1, 2, 0, 3) for each in (query_SBND, key_SBGD, value_SBGD))
    return query, key, value


def _choose_kernel(heads: Heads, *, dropout: float) -> tuple[SDPBackend, Heads]:
    """Return the kernel that attention runs by, and the heads to hand to it.

    The memory-efficient kernel, all that a V100 has, does not know groups: it gets a copy of keys and values for every
    head. The copies are small compared with the scores, which the only other kernel would keep.
    """
    query, key, value = heads
    kernel, copies = kernel_of(query, key, value, dropout=dropout), query.shape[1] // key.shape[1]
    if kernel == SDPBackend.MATH and copies > 1:
        key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        kernel = kernel_of(query, key, value, dropout=dropout)
    return kernel, (query, key, value)


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, dropout: float) -> SDPBackend:
    """The kernel that ``scaled_dot_product_attention`` takes for causal attention of [B, N, S, D] to [B, G, S, D]."""
    grouped = key.shape[1] < query.shape[1]
    return SDPBackend(torch._fused_sdp_choice(query, key, value, None, dropout, True, enable_gqa=grouped))


def _preferring(kernels: tuple[SDPBackend, ...] | None) -> contextlib.AbstractContextManager[None]:
    if kernels is None:
        return contextlib.nullcontext()
    return sdpa_kernel(list(kernels), set_priority=True)
