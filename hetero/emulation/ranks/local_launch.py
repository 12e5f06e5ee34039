"""Runs steps of a plan on an emulated cluster, without a launcher: one process per rank, forked from this one."""

import datetime
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from hetero.cost.cost_model import CostModel
from hetero.distributed.helper_processes import end_with_parent
from hetero.distributed.process_groups import create_groups
from hetero.distributed.world import join_world
from hetero.emulation.options import EmulationOptions
from hetero.emulation.ranks.setup import emulate
from hetero.emulation.records import EmulatedRun, StepRecord
from hetero.errors import ConfigError, HeteroError
from hetero.plan.ir import Plan
from hetero.plan.sample_order import microbatch_indices
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer, reads_data
from hetero.spec.cluster import ClusterSpec

VOCABULARY = 64
"""Words of the small model: its data are random."""

ADAM = AdamOptions(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, clip_grad=1.0)

STARTUP_S = 240.0
"""Wall seconds that starting and warming up may take beside the emulated steps. A heuristic: some seconds are usual,
and a machine with more ranks than cores needs minutes."""

REASON_S = 3.0
"""How long a rank that died may be survived by one that knows why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedLaunch:
    """What to emulate, for how many steps. ``data_parallel`` is of the described model."""

    plan: Plan
    cluster: ClusterSpec
    costs: CostModel
    options: EmulationOptions
    data_parallel: DataParallelOptions
    num_steps: int
    seed: int = 7
    adam: AdamOptions = ADAM


def run_emulated(
    emulated: EmulatedLaunch, *, timeout_s: float, on_step: Callable[[int], None] = lambda _: None
) -> EmulatedRun:
    """One step to warm up and ``num_steps`` emulated ones.

    Call it before any other use of torch in this process: its threads do not survive the fork.

    Args:
        on_step: called after each step, with the number of emulated steps that are done: 0 after the one to warm up.

    Raises:
        HeteroError: as the ranks did.
        ConfigError: they did not finish in time.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(emulated.plan.world_size)]
        ranks = [
            context.Process(target=_rank_main, args=(os.getpid(), rank, Path(folder) / "store", emulated, outbox))
            for rank, (_, outbox) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            deadline = time.monotonic() + STARTUP_S + timeout_s
            results = _collect(ranks, [inbox for inbox, _ in pipes], deadline, on_step)
        finally:
            for process in ranks:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    return EmulatedRun(
        plan=emulated.plan,
        time_scale=results[0].time_scale,
        ranks=tuple(each.steps for each in results),
        losses=results[0].losses,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What a rank found out.

    steps: the emulated ones.
    losses: of all steps.
    time_scale: wall seconds per emulated second, the same on all ranks.
    """

    steps: tuple[StepRecord, ...]
    losses: tuple[float, ...]
    time_scale: float


def _collect(
    ranks: Sequence[BaseProcess], pipes: Sequence[Connection], deadline: float, on_step: Callable[[int], None]
) -> list[RankResult]:
    """What every rank returned. One tells its steps before, as numbers.

    Raises:
        HeteroError: what a rank raised, or that one died; its own words are on stderr.
        ConfigError: they did not finish in time.
    """
    results: dict[int, RankResult] = {}
    dead: list[int] = []
    while len(results) < len(ranks):
        missing = [rank for rank in range(len(ranks)) if rank not in results and rank not in dead]
        handles = [handle for rank in missing for handle in (pipes[rank], ranks[rank].sentinel)]
        # One rank's failure makes others fail in ways that say less; the first may still be writing.
        timeout_s = REASON_S if dead else max(0.0, deadline - time.monotonic())
        if not wait(handles, timeout=timeout_s):
            break
        for rank in missing:
            if pipes[rank].poll():
                told = pipes[rank].recv()
                if isinstance(told, HeteroError):
                    raise told
                if isinstance(told, int):
                    on_step(told)
                else:
                    results[rank] = told
            elif ranks[rank].exitcode is not None:
                dead.append(rank)
    if dead:
        raise HeteroError(f"emulation: the process of rank {dead[0]} died (exit code {ranks[dead[0]].exitcode})")
    if len(results) < len(ranks):
        raise ConfigError("emulation: the ranks did not finish in time; is this machine busy with something else?")
    return [results[rank] for rank in range(len(ranks))]


def _rank_main(parent: int, rank: int, store: Path, emulated: EmulatedLaunch, outbox: Connection) -> None:
    end_with_parent(parent)
    torch.set_num_threads(1)
    world_size = emulated.plan.world_size
    join_world(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=30),
    )
    try:
        outbox.send(_steps(rank, emulated, on_step=outbox.send if rank == 0 else lambda _: None))
    except HeteroError as error:
        # Before the connections to the others close, at which these fail.
        outbox.send(error)
    finally:
        dist.destroy_process_group()


def _steps(rank: int, emulated: EmulatedLaunch, *, on_step: Callable[[int], None]) -> RankResult:
    described = emulated.data_parallel
    emulation = emulate(
        emulated.plan,
        emulated.cluster,
        emulated.costs,
        options=emulated.options,
        vocab_size=VOCABULARY,
        bucket_numel=described.bucket_numel,
    )
    context = create_groups(emulation.plan, device=torch.device("cpu"), timing=emulation.timing)
    trainer = Trainer(
        context,
        options=StageOptions(),
        adam=emulated.adam,
        seed=emulated.seed,
        data_parallel=DataParallelOptions(
            bucket_numel=emulation.bucket_numel,
            overlap_grad_reduce=described.overlap_grad_reduce,
            overlap_param_gather=described.overlap_param_gather,
        ),
    )
    data = (_microbatches(emulation.plan, rank, step=step) for step in itertools.count())
    session = TrainingSession(context, trainer, data=data if reads_data(context) else None)
    losses = []
    for step in range(1 + emulated.num_steps):
        losses.append(session.step().loss)
        on_step(step)
    return RankResult(steps=tuple(emulation.timing.steps), losses=tuple(losses), time_scale=emulation.timing.time_scale)


def _microbatches(plan: Plan, rank: int, *, step: int) -> list[Microbatch]:
    """Random tokens, the same samples at the same step under every plan."""
    place = plan.placement(rank)
    assert place is not None
    batches = []
    for indices in microbatch_indices(plan, place, first_sample=step * plan.global_batch_size):
        ids = torch.stack([_sample(i, plan) for i in indices])
        tokens = ids[:, :-1]
        positions = torch.arange(plan.seq_length).expand_as(tokens)
        batches.append(Microbatch(tokens, positions, ids[:, 1:], torch.ones(tokens.shape)))
    return batches


def _sample(index: int, plan: Plan) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, plan.model.vocab_size, (plan.seq_length + 1,), generator=generator)
