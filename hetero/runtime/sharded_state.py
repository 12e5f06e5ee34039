"""Names training state as slices of global tensors, which a checkpoint saves from one plan and loads under another."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TensorSlice:
    """A block of a global tensor that this rank has.

    name: kind and canonical parameter name, as ``exp_avg/decoder.layers.3.mlp.linear_fc1.weight``. The kinds are
        ``weights`` (in the plan's precision), ``master`` (full precision, where weights are not), ``exp_avg`` and
        ``exp_avg_sq``.
    shape: of the whole global tensor.
    offsets: where the block begins in it, one index per dimension; it ends at ``offsets + tensor.shape``.
    tensor: the block itself. A view of what the runtime works on: reading it saves, writing it loads.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
