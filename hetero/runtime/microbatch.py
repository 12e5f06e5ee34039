"""Holds the tokens of one microbatch.

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


def to_device(batch: Microbatch, device: torch.device) -> Microbatch:
    """``batch`` on ``device``."""
    return Microbatch(
        tokens_BS=batch.tokens_BS.to(device, non_blocking=True),
        position_ids_BS=batch.position_ids_BS.to(device, non_blocking=True),
        labels_BS=batch.labels_BS.to(device, non_blocking=True),
        loss_mask_BS=batch.loss_mask_BS.to(device, non_blocking=True),
    )
