"""Tokens of one microbatch.

Tensor shapes: B samples of a microbatch on this rank, S the whole sequence.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What a first or last stage reads: int64 ids, and 1.0 where a token's loss counts."""

    tokens_BS: torch.Tensor
    position_ids_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_mask_BS: torch.Tensor
