"""Pretraining: join, agree, build, loop."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils.data import Dataset

from hetero.distributed.agreement import on_all_ranks
from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.distributed.watch import Watch
from hetero.plan.ir import Plan
from hetero.report.tables import plan_picture, plan_table
from hetero.runtime.batch import Microbatch
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions
from hetero.runtime.trainer import Trainer, reads_data
from megatron.training.arguments import model_spec
from megatron.training.config import OptimizerConfig, PretrainConfig
from megatron.training.data import build_datasets, microbatches
from megatron.training.launch import Launch, agree_on_plan, join
from megatron.training.metrics import Metrics
from megatron.training.schedules import build_scheduler
from megatron.training.tokenizer import build_tokenizer

LOG_COLUMNS = 130
"""Width of tables where the output is no terminal."""


def pretrain(config: PretrainConfig, launch: Launch) -> None:
    """Train a GPT under the plan of this launch. Every rank of the launch calls it.

    Raises:
        ConfigError: input that is wrong, on every rank and before training starts.
        PlanError: the plan does not fit the devices.
        MembershipError: another rank was lost on the way.
    """
    device, store = join(launch, config.parallel)
    try:
        plan, dataset = agree(config, device)
        with Watch(
            store,
            rank=launch.rank,
            world_size=launch.world_size,
            describe=lambda rank: describe_rank(plan, rank),
        ):
            context = create_groups(plan, device=device)
            data = read_ahead(config, context, dataset)
            trainer = build_trainer(config, context)
            with _metrics(config, context) as metrics:
                _loop(config, context, trainer, data, metrics)
    finally:
        dist.destroy_process_group()


def agree(config: PretrainConfig, device: torch.device) -> tuple[Plan, Dataset[Any]]:
    """The plan of this launch and the data it trains on, the same on every rank; collective over the world.

    Raises:
        ConfigError: some rank's tokenizer, plan or data is wrong; on every rank.
        PlanError: a rank sits on another device than its stage is planned for.
    """
    tokenizer = on_all_ranks(
        lambda: build_tokenizer(
            tokenizer_type=config.data.tokenizer_type,
            tokenizer_model=config.data.tokenizer_model,
            vocab_size=config.model.vocab_size,
        )
    )
    model = on_all_ranks(lambda: model_spec(config.model, tokenizer_vocab_size=tokenizer.vocab_size))
    plan = agree_on_plan(config, model, device)
    dataset = build_datasets(config.data, tokenizer, train_samples=config.run.train_iters * plan.global_batch_size)
    return plan, dataset


def read_ahead(
    config: PretrainConfig, context: ParallelContext, dataset: Dataset[Any]
) -> Iterator[list[Microbatch]] | None:
    """This rank's microbatches, one list per step; ``None`` if it needs none."""
    if context.work is None or not reads_data(context):
        return None
    return microbatches(
        dataset,
        context.plan,
        context.work.placement,
        first_step=0,
        num_steps=config.run.train_iters,
        num_workers=config.data.num_workers,
    )


def build_trainer(config: PretrainConfig, context: ParallelContext) -> Trainer:
    """This rank's stage, gradient sums and optimizer, as the flags say."""
    return Trainer(
        context,
        options=config.stage,
        adam=adam_options(config.optimizer),
        seed=config.run.seed,
        data_parallel=DataParallelOptions(
            bucket_numel=config.parallel.bucket_size,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            distributed_optimizer=config.parallel.use_distributed_optimizer,
            overlap_param_gather=config.parallel.overlap_param_gather,
        ),
        loss_scale=config.loss_scale,
    )


def adam_options(config: OptimizerConfig) -> AdamOptions:
    return AdamOptions(
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        clip_grad=config.clip_grad,
    )


def describe_rank(plan: Plan, rank: int) -> str:
    """``rank 3 (replica 0 stage 1, A100-40)``."""
    place = plan.placement(rank)
    if place is None:
        return f"rank {rank} (idle)"
    device = plan.replicas[place.replica].stages[place.stage].device
    return f"rank {rank} (replica {place.replica} stage {place.stage}, {device})"


def _metrics(config: PretrainConfig, context: ParallelContext) -> contextlib.AbstractContextManager[Metrics | None]:
    """Rank 0 reports; every rank knows the same numbers after a step, an idle one too."""
    if context.rank != 0:
        return contextlib.nullcontext()
    # A log file is as wide as it needs to be.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=LOG_COLUMNS)
    console.print(plan_table(context.plan))
    console.print(plan_picture(context.plan))
    return Metrics(
        train_iters=config.run.train_iters,
        global_batch_size=context.plan.global_batch_size,
        seq_length=context.plan.seq_length,
        log_interval=config.run.log_interval,
        tensorboard_dir=config.run.tensorboard_dir,
        progress=config.run.progress,
    )


def _loop(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    data: Iterator[list[Microbatch]] | None,
    metrics: Metrics | None,
) -> None:
    optimizer = trainer.torch_optimizer
    scheduler = build_scheduler(optimizer, config.optimizer, train_iters=config.run.train_iters)
    for step in range(1, config.run.train_iters + 1):
        batches = [to_device(batch, context.device) for batch in next(data)] if data is not None else None
        lr = optimizer.param_groups[0]["lr"]
        result = trainer.step(batches)
        if not result.skipped:
            scheduler.step(increment=1)
        if metrics is not None:
            metrics.record(step, result, lr=lr)


def to_device(batch: Microbatch, device: torch.device) -> Microbatch:
    """``batch`` on ``device``."""
    return Microbatch(
        tokens_BS=batch.tokens_BS.to(device, non_blocking=True),
        position_ids_BS=batch.position_ids_BS.to(device, non_blocking=True),
        labels_BS=batch.labels_BS.to(device, non_blocking=True),
        loss_mask_BS=batch.loss_mask_BS.to(device, non_blocking=True),
    )
