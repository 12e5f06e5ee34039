"""Sets learning rate and weight decay step by step: megatron-core's own scheduler, built from the flags."""

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training.cli.training_config import OptimizerConfig


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, train_iters: int
) -> OptimizerParamScheduler:
    """Build a scheduler of optimizer steps. Call ``step(increment=1)`` after each step that was not skipped."""
    decay_iters = config.lr_decay_iters if config.lr_decay_iters is not None else train_iters
    warmup_iters = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup_iters = int(config.lr_warmup_fraction * decay_iters)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )
