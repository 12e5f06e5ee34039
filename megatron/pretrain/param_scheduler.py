"""Sets learning rate and weight decay step by step: megatron-core's own scheduler, built from the flags."""

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretrain.cli.training_config import OptimizerConfig


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, *, train_samples: int
) -> OptimizerParamScheduler:
    """Build a scheduler that counts samples. Call ``step(increment=SAMPLES)`` after each step that was not skipped.

    Args:
        train_samples: length of the run.
    """
    decay_samples = lr_decay_samples(config, train_samples=train_samples)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=lr_warmup_samples(config, train_samples=train_samples),
        lr_decay_steps=decay_samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.start_weight_decay,
        end_wd=config.end_weight_decay,
        wd_incr_steps=train_samples,
        wd_incr_style=config.weight_decay_incr_style,
        wsd_decay_steps=config.lr_wsd_decay_samples,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
    )


def lr_decay_samples(config: OptimizerConfig, *, train_samples: int) -> int:
    """Return after how many samples the decay of the learning rate ends."""
    return config.lr_decay_samples if config.lr_decay_samples is not None else train_samples


def lr_warmup_samples(config: OptimizerConfig, *, train_samples: int) -> float:
    """Return in how many samples the learning rate rises; megatron-core takes fractions of one."""
    if config.lr_warmup_fraction is None:
        return config.lr_warmup_samples
    return config.lr_warmup_fraction * lr_decay_samples(config, train_samples=train_samples)
