"""Pretrains: joins the world, agrees on the plan, builds model, data and optimizer, and runs the steps."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from rich.console import Console

from hetero.console import console as make_console
from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.model_flops import DeviceWork, Products, work_of_devices
from hetero.data.cost_models import plan_costs
from hetero.distributed.failure_detector import FailureDetector
from hetero.distributed.process_groups import ParallelContext, create_groups
from hetero.distributed.rank_consensus import on_all_ranks
from hetero.distributed.shutdown import is_busy, nccl_error
from hetero.emulation.ranks.setup import Emulation
from hetero.errors import DeviceMemoryError
from hetero.plan.batch_sizes import BatchSizes
from hetero.plan.ir import Plan
from hetero.plan.rank_description import describe_rank
from hetero.report.tables.layers import RankLayers, layers_table
from hetero.report.tables.plan import plan_picture, plan_table
from hetero.report.tables.static_memory import StaticBytes, static_memory_table
from hetero.runtime.attention import attention_kernel
from hetero.runtime.auxiliary_loss import microbatch_note
from hetero.runtime.compute_seconds import compute_seconds
from hetero.runtime.dtypes import DTYPES
from hetero.runtime.host_optimizer import update_cores
from hetero.runtime.layer_choice import choices_of
from hetero.runtime.optimizer import AdamOptions, DecoupledRate
from hetero.runtime.options import DataParallelOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from megatron.pretrain.checkpointing import load, saving, step_of_start
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.model_config import model_spec
from megatron.pretrain.cli.training_config import OptimizerConfig
from megatron.pretrain.data import SampleDataset, Split, build_dataset, microbatches
from megatron.pretrain.elastic import ElasticRank
from megatron.pretrain.emulation import emulated_config, emulation_notice, start_emulation
from megatron.pretrain.evaluation import Evaluation, evaluated_plan, evaluated_splits
from megatron.pretrain.flag_notes import flag_notes
from megatron.pretrain.generation_config import generation_config_of_run
from megatron.pretrain.launch import Launch, agree_on_plan, joined
from megatron.pretrain.metrics import Metrics, ReportedRun
from megatron.pretrain.param_scheduler import build_scheduler
from megatron.pretrain.profiler import check_profiler
from megatron.pretrain.rank_figures import PredictedStages, RankFigures, memory_interval, predicted_stages
from megatron.pretrain.resume_notes import run_settings
from megatron.pretrain.scalar_writers import check_writers, open_writers, settings_of
from megatron.pretrain.stopping import Stop, stop_on_signals
from megatron.pretrain.tokenizer import Tokenizer, build_tokenizer
from megatron.pretrain.training_loop import TrainingLoop

LOG_COLUMNS = 130
"""Width of tables where the output is no terminal."""


def pretrain(config: PretrainConfig, launch: Launch) -> None:
    """Train a GPT under the plan of this launch. Every rank of the launch calls it.

    Raises:
        ConfigError: input that is wrong, on every rank and before training starts.
        PlanError: the plan does not fit the devices.
        MembershipError: another rank was lost on the way.
    """
    if launch.rank == 0 and (notes := flag_notes(config)) is not None:
        _console().print(notes)
    stop, elastic = Stop(config.run), ElasticRank(launch.elastic, config, rank=launch.rank)
    with (
        elastic.failures(),
        joined(launch, config.parallel) as (device, detector),
        memory_errors(detector, launch.rank),
        elastic.failures(),
    ):
        elastic.report("joined")
        _pretrain(config, launch, device, detector, stop, elastic)


def _pretrain(
    config: PretrainConfig,
    launch: Launch,
    device: torch.device,
    detector: FailureDetector,
    stop: Stop,
    elastic: ElasticRank,
) -> None:
    detector.doing = "agreeing on the plan"
    plan, tokenizer = agree_on_plan_and_tokenizer(config, device, given=elastic.plan)
    detector.describe = functools.partial(describe_rank, plan)
    if launch.rank == 0 and config.data.eod_mask_loss:
        print(f"--eod-mask-loss leaves out the end of a document: {tokenizer.eod_origin}", flush=True)
    emulation = None
    if config.emulation is not None:
        emulation = start_emulation(config, plan, tokenizer, present=elastic.present)
        config, plan = emulated_config(config, emulation), emulation.plan
    detector.doing = "building the dataset"
    dataset, evaluations = build_datasets(config, plan, tokenizer)
    datasets: dict[Split, SampleDataset] = {each.split: each.dataset for each in evaluations}
    settings = on_all_ranks(lambda: run_settings(config, {"train": dataset, **datasets}))
    detector.doing = "making process groups"
    timing = emulation.timing if emulation is not None else elastic.timing(device)
    if timing is None and config.logging.stage_times_interval is not None:
        timing = compute_seconds(device, always=False)
    context = create_groups(plan, device=device, timing=timing)
    detector.progress = context.progress
    detector.device_is_busy = functools.partial(is_busy, device)
    detector.transport_error = functools.partial(nccl_error, context.groups)
    layers = layers_of_ranks(config, context)
    detector.doing = "looking for a checkpoint"
    step = None if elastic.goes_on_from_copies else step_of_start(config.checkpoint)
    detector.doing = "building the model"
    trainer = build_trainer(
        config,
        context,
        host_cores=update_cores(local_rank=launch.local_rank, ranks=launch.local_world_size),
        draws_weights=step is None and not elastic.goes_on_from_copies,
    )
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    with _metrics(config, context, trainer, emulation, layers) as metrics:
        elastic.report("built")
        detector.doing = "loading a checkpoint"
        if elastic.goes_on_from_copies:
            start = elastic.restore(context, trainer, scheduler, settings=settings)
        else:
            start = load(config, context, trainer, scheduler, step=step, settings=settings)
        start = dataclasses.replace(
            start, generation_config=generation_config_of_run(tokenizer, start.generation_config)
        )
        session = build_session(config, context, trainer, scheduler, dataset, start_step=start.step)
        predicted = PredictedStages()
        if config.logging.stage_times_interval is not None and context.rank == 0:
            detector.doing = "predicting the plan"
            predicted = predicted_stages(config, plan)
        # A second signal must not end the last save, which may still be written when the loop is over.
        with (
            stop_on_signals(stop, announce=context.rank == 0, has_agent=launch.elastic is not None),
            elastic.copying(context, trainer, scheduler, start=start),
            saving(
                config,
                context,
                trainer,
                scheduler,
                start=start,
                goes_on_from_copies=elastic.goes_on_from_copies,
                was_here_before=elastic.is_later_epoch,
            ) as saver,
        ):
            figures = RankFigures(
                config.logging,
                context,
                trainer,
                metrics,
                memory_interval=memory_interval(config),
                predicted=predicted,
            )
            detector.close_store()
            TrainingLoop(
                config, context, session, evaluations, saver, stop, metrics, figures, detector, elastic
            ).train()
    detector.doing = "leaving"


@contextlib.contextmanager
def memory_errors(detector: FailureDetector, rank: int) -> Iterator[None]:
    """Turn running out of device memory into an error that says what to change.

    Raises:
        DeviceMemoryError: in place of torch's.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        detail = str(error).splitlines()[0]
        raise DeviceMemoryError.of(detector.describe(rank), doing=detector.doing, detail=detail) from error


def agree_on_plan_and_tokenizer(
    config: PretrainConfig, device: torch.device, *, given: Plan | None = None
) -> tuple[Plan, Tokenizer]:
    """Get the plan of this launch and its tokenizer, the same everywhere; collective over the world.

    Args:
        given: see :func:`megatron.pretrain.launch.agree_on_plan`.

    Raises:
        ConfigError: some rank's tokenizer or plan is wrong; on every rank.
        PlanError: a rank sits on another device than its stage is planned for.
    """
    # Rank 0 alone reports, and what it cannot do is everybody's error.
    on_all_ranks(lambda: check_writers(config.scalars) if dist.get_rank() == 0 else None)
    on_all_ranks(lambda: check_profiler(config, world_size=dist.get_world_size()))
    tokenizer = on_all_ranks(
        lambda: build_tokenizer(
            tokenizer_type=config.data.tokenizer_type,
            tokenizer_model=config.data.tokenizer_model,
            vocab_size=config.model.vocab_size,
            vocab_file=config.data.vocab_file,
            merge_file=config.data.merge_file,
            null_eod=config.data.null_eod,
        )
    )
    model = on_all_ranks(lambda: model_spec(config.model, tokenizer_vocab_size=tokenizer.vocab_size))
    return agree_on_plan(config, model, device, given=given), tokenizer


def build_datasets(config: PretrainConfig, plan: Plan, tokenizer: Tokenizer) -> tuple[SampleDataset, list[Evaluation]]:
    """Build the training data and what is evaluated on; collective over the world.

    Raises:
        ConfigError: some rank's data is wrong; on every rank.
    """
    batches = BatchSizes(plan.global_batch_size, config.parallel.varying_batch)
    num_samples = batches.first_sample(config.run.train_iters)
    dataset = build_dataset(config.data, tokenizer, split="train", num_samples=num_samples)
    eval_plan = evaluated_plan(config, plan)
    evaluations = [
        Evaluation(
            split=split,
            plan=eval_plan,
            dataset=build_dataset(
                config.data, tokenizer, split=split, num_samples=config.run.eval_iters * eval_plan.global_batch_size
            ),
            num_batches=config.run.eval_iters,
            num_workers=config.data.num_workers,
        )
        for split in evaluated_splits(config)
    ]
    return dataset, evaluations


def start_session(config: PretrainConfig, context: ParallelContext, dataset: SampleDataset) -> TrainingSession:
    """Build a session with initial weights that runs the steps of ``config`` from the first on."""
    trainer = build_trainer(config, context)
    scheduler = build_scheduler(trainer.torch_optimizer, config.optimizer, train_samples=config.run.train_samples)
    return build_session(config, context, trainer, scheduler, dataset)


def build_session(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    scheduler: OptimizerParamScheduler,
    dataset: SampleDataset,
    *,
    start_step: int = 0,
) -> TrainingSession:
    """Build a session that goes on after ``start_step``, the state of ``trainer`` and ``scheduler``; it reads ahead."""
    data = None
    if context.work is not None and reads_data(context):
        data = microbatches(
            dataset,
            context.plan,
            context.work.placement,
            first_step=start_step,
            num_steps=max(0, config.run.train_iters - start_step),
            num_workers=config.data.num_workers,
            varying_batch=config.parallel.varying_batch,
        )
    return TrainingSession(
        context,
        trainer,
        data=data,
        schedule=scheduler,
        check_for_nan=config.run.check_for_nan,
        start_step=start_step,
        varying_batch=config.parallel.varying_batch,
    )


def build_trainer(
    config: PretrainConfig,
    context: ParallelContext,
    *,
    host_cores: Sequence[int] | None = None,
    draws_weights: bool = True,
) -> Trainer:
    """Build this rank's stage, gradient sums and optimizer, as plan and flags say.

    Args:
        host_cores: of this rank, for updates on the host; all that it may use, if ``None``.
        draws_weights: false where all weights are loaded next.
    """
    trainer = Trainer(
        context,
        options=config.stage if draws_weights else dataclasses.replace(config.stage, init_method_std=None),
        adam=adam_options(config.optimizer),
        seed=config.run.seed,
        data_parallel=DataParallelOptions(
            bucket_numel=config.parallel.bucket_size,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            host_cores=host_cores,
        ),
        loss_scale=config.loss_scale,
    )
    trainer.change_evaluation_batch(evaluated_plan(config, context.plan))
    return trainer


def adam_options(config: OptimizerConfig) -> AdamOptions:
    """What the flags of the optimizer say of Adam and of clipping."""
    return AdamOptions(
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        clip_grad=config.clip_grad,
        decoupled=decoupled_rate(config),
    )


def decoupled_rate(config: OptimizerConfig) -> DecoupledRate | None:
    """The bounds of the learning rate of embedding and output layer, if they have their own."""
    if config.decoupled_lr is None:
        return None
    min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return DecoupledRate(lr=config.decoupled_lr, min_lr=min_lr)


def layers_of_ranks(config: PretrainConfig, context: ParallelContext) -> list[list[RankLayers]]:
    """List by rank whose layers and which kernels its stages have; collective over the world (gather of the lines).

    Raises:
        ConfigError: flags or plan ask some rank for layers that it cannot have; on every rank.
    """
    plan, options = context.plan, config.stage
    choices = on_all_ranks(lambda: choices_of(context, options))
    own = [
        RankLayers(
            device=work.stage.device,
            layers=choice.layers,
            attention=attention_kernel(
                plan, work.stage, options, choice, device=context.device, dtype=DTYPES[plan.precision]
            ),
            fused=choice.fused,
        )
        for work, choice in zip(context.stages, choices, strict=True)
    ]
    every: list[list[RankLayers]] = [own] * plan.world_size
    dist.all_gather_object(every, own)
    return every


def _metrics(
    config: PretrainConfig,
    context: ParallelContext,
    trainer: Trainer,
    emulation: Emulation | None,
    layers: Sequence[Sequence[RankLayers]],
) -> contextlib.AbstractContextManager[Metrics | None]:
    """Print the plan and make the reporter, on rank 0: every rank knows its numbers. Collective over the world."""
    measured = _static_bytes(context, trainer) if config.emulation is None else None
    writers = on_all_ranks(
        lambda: open_writers(config.scalars, settings=settings_of(config)) if context.rank == 0 else []
    )
    if context.rank != 0:
        return contextlib.nullcontext()
    console = _console()
    console.print(plan_table(context.plan))
    console.print(plan_picture(context.plan, room=console.width))
    if measured is not None:
        console.print(layers_table(layers))
        costs = memory_costs(context.plan)
        predicted, on_hosts = plan_memory(context.plan, costs), host_memory(context.plan, costs)
        console.print(static_memory_table(context.plan, measured, predicted, on_hosts))
    if (note := microbatch_note(config.stage, context.plan)) is not None:
        console.print(note, soft_wrap=True)
    if config.emulation is not None:
        console.print(emulation_notice(config.emulation, context.plan))
    described = context.plan if emulation is None else emulation.described
    run = ReportedRun(
        train_iters=config.run.train_iters,
        batches=BatchSizes(described.global_batch_size, config.parallel.varying_batch),
        seq_length=described.seq_length,
        world_size=described.world_size,
        work=_work(config, described),
        emulated=emulation.timing if emulation is not None else None,
    )
    return Metrics(run, config.logging, config.scalars, writers)


def _work(config: PretrainConfig, plan: Plan) -> Mapping[Products, DeviceWork]:
    """The FLOPs of a step by device type, if anybody is to hear of them: it takes a moment to load the profiles."""
    wanted = config.logging.throughput or config.scalars.is_wanted
    return work_of_devices(plan, plan_costs(plan, profiles=config.logging.profiles, data_sheets=True)) if wanted else {}


def _console() -> Console:
    """The terminal, or a log file, which is as wide as tables need it to be."""
    return make_console(width=LOG_COLUMNS, highlight=False)


def _static_bytes(context: ParallelContext, trainer: Trainer) -> list[StaticBytes]:
    """List the bytes of weights, gradients and optimizer state by rank; gather of a short object over the world."""
    weights, gradients, optimizer = trainer.static_bytes()
    own = StaticBytes(weights=weights, gradients=gradients, optimizer=optimizer, host=trainer.host_bytes())
    every = [own] * context.plan.world_size
    dist.all_gather_object(every, own)
    return every
