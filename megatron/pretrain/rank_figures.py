"""Gathers what only the ranks know: their memory, and where the seconds of their stages go beside the prediction."""

import dataclasses
import resource
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.commands.again import model_of, profile_run
from hetero.cost.simulation.simulator import simulate
from hetero.cost.simulation.stage_times import RankTimes, StageTimes, mean_times
from hetero.cost.wanted_profile import wanted_profile
from hetero.data.cost_models import plan_costs
from hetero.distributed.process_groups import ParallelContext
from hetero.errors import HeteroError
from hetero.plan.ir import Plan, StageKey
from hetero.report.tables.measurement import MEASURED_COLUMNS, stage_times_table
from hetero.runtime.compute_seconds import ComputeSeconds
from hetero.runtime.layer_choice import runs_cuda
from hetero.runtime.trainer import Trainer
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.text import number_ranges
from hetero.units import GIB
from megatron.pretrain.cli.config import PretrainConfig
from megatron.pretrain.cli.logging_config import LoggingConfig
from megatron.pretrain.metrics import Metrics
from megatron.pretrain.planning import launched_runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStages:
    """What was predicted of a step for each stage, or why nothing was.

    replan: for a device, lines on how to measure it and to plan anew.
    """

    stages: Mapping[StageKey, StageTimes] | None = None
    missing: str = ""
    replan: Callable[[str], Sequence[str]] = lambda device: ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes at the peak: of the device as its allocator sees them, 0 without CUDA, and of the process on its host."""

    allocated: int
    reserved: int
    device: int
    host: int

    @classmethod
    def now(cls, device: torch.device) -> "RankMemory":
        """That of this process, since it began."""
        # In KiB, on Linux.
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not runs_cuda(device):
            return cls(allocated=0, reserved=0, device=0, host=host)
        return cls(
            allocated=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            device=torch.cuda.get_device_properties(device).total_memory,
            host=host,
        )


class RankFigures:
    """Gathers figures of all ranks every so many steps, and lets rank 0 report them. Every rank has one.

    In other steps it does nothing; where nobody asks for figures of stages, their computes are not measured.

    Args:
        metrics: of the rank that reports, ``None`` on the others.
        predicted: on the rank that reports.
    """

    def __init__(
        self,
        config: LoggingConfig,
        context: ParallelContext,
        trainer: Trainer,
        metrics: Metrics | None,
        *,
        memory_interval: int | None,
        predicted: PredictedStages,
    ) -> None:
        self._config = config
        self._context = context
        self._trainer = trainer
        self._metrics = metrics
        self._memory_interval = memory_interval
        self._predicted = predicted
        self._timing = context.timing if isinstance(context.timing, ComputeSeconds) else None

    def before_step(self, step: int) -> None:
        """Begin to measure step number ``step``, if it is one of those."""
        if self._timing is not None and _is_due(step, self._config.stage_times_interval):
            self._timing.begin_step()

    def after_step(self, step: int, *, num_samples: int) -> None:
        """Gather and report what is due after ``step``; collective over the world (gather of a short object).

        Args:
            num_samples: of this step, which is predicted for the whole batch alone.
        """
        measures, looks = _is_due(step, self._config.stage_times_interval), _is_due(step, self._memory_interval)
        if not (measures or looks):
            return
        times = self._timing.times() if measures and self._timing is not None else None
        # The communicator of the world may be one in which weights are still gathered.
        self._trainer.finish_gather()
        own = times, RankMemory.now(self._context.device)
        every = [own] * self._context.plan.world_size
        dist.all_gather_object(every, own)
        if self._metrics is None:
            return
        if looks:
            self._report_memory(step, [memory for _, memory in every])
        if measures:
            self._report_stages(step, [rank_times for rank_times, _ in every], num_samples)

    def _report_memory(self, step: int, every: Sequence[RankMemory]) -> None:
        assert self._metrics is not None, "this rank reports"
        told, scalars = [], {}
        for device, ranks in _ranks_of_devices(self._context.plan).items():
            rank = max(ranks, key=lambda each: every[each].allocated)
            if (memory := every[rank]).device:
                told.append(
                    f"{device} {memory.allocated / GIB:.1f} GiB allocated and {memory.reserved / GIB:.1f} reserved of "
                    f"{memory.device / GIB:.1f} (rank {rank})"
                )
                scalars[f"mem-max-allocated-bytes/{device}"] = float(memory.allocated)
                scalars[f"mem-max-reserved-bytes/{device}"] = float(memory.reserved)
        rank = max(range(len(every)), key=lambda each: every[each].host)
        told.append(f"a rank's process {every[rank].host / GIB:.2f} GiB of its host (rank {rank})")
        scalars["mem-max-host-bytes"] = float(every[rank].host)
        self._metrics.say(f"memory up to step {step}, at most: {' | '.join(told)}")
        self._metrics.write(scalars, step)

    def _report_stages(self, step: int, every: Sequence[RankTimes | None], num_samples: int) -> None:
        assert self._metrics is not None, "this rank reports"
        plan, predicted = self._context.plan, self._predicted
        if num_samples < plan.global_batch_size:
            predicted = PredictedStages(
                missing=f"nothing is predicted of a step of {num_samples} samples: the plan is for "
                f"{plan.global_batch_size}"
            )
        measured = measured_stages(plan, every)
        times = {"measured": measured} | ({"predicted": predicted.stages} if predicted.stages is not None else {})
        self._metrics.say(stage_times_table(plan, times, MEASURED_COLUMNS, of=f"step {step}"))
        if predicted.missing:
            self._metrics.say(predicted.missing)
        for line in slow_stages(plan, measured, predicted, threshold=self._config.slow_stage):
            self._metrics.say(line)
        scalars = {}
        for what, stages in times.items():
            for (r, s), each in stages.items():
                for header, seconds_of in MEASURED_COLUMNS.items():
                    name = f"stage-{header.replace(chr(10), '-')}-{what}"
                    scalars[f"{name}/replica {r} stage {s}"] = seconds_of(each)
        self._metrics.write(scalars, step)


def measured_stages(plan: Plan, every: Sequence[RankTimes | None]) -> dict[StageKey, StageTimes]:
    """The mean times of the ranks of each stage, of which those that measured nothing are left out."""
    found: dict[StageKey, StageTimes] = {}
    for r, s, stage in plan.stages():
        ranks = [times for rank in stage.ranks if (times := every[rank]) is not None]
        if ranks:
            # The update ends the step of a rank, which none waits for.
            step_s = sum(times.summed_s + times.update_s for times in ranks) / len(ranks)
            found[r, s] = mean_times([(1 / len(ranks), times) for times in ranks], step_s=step_s)
    return found


def slow_stages(
    plan: Plan, measured: Mapping[StageKey, StageTimes], predicted: PredictedStages, *, threshold: float
) -> Iterator[str]:
    """A line that names the stages that compute so many times as long as predicted, and for each device what helps."""
    slow: list[str] = []
    devices: dict[str, None] = {}
    for r, replica in enumerate(plan.replicas):
        for s, *others in replica.device_groups:
            if predicted.stages is None or (r, s) not in measured:
                continue
            ratio = measured[r, s].busy_s / max(predicted.stages[r, s].busy_s, 1e-12)
            if ratio > threshold:
                stage = replica.stages[s]
                devices[stage.device] = None
                slow.append(
                    f"replica {r} stage {number_ranges([s, *others])} ({stage.device}, ranks "
                    f"{number_ranges(stage.ranks)}) {ratio:.2f}"
                )
    if slow:
        yield f"slow: computing takes so many times as long as predicted, more than {threshold:g}: {'; '.join(slow)}"
    for device in devices:
        yield from predicted.replan(device)


def predicted_stages(config: PretrainConfig, plan: Plan) -> PredictedStages:
    """What a step of ``plan`` is predicted to take: on the cluster of this launch, or on that it was made for."""
    path, provenance = config.parallel.hetero_cluster, plan.provenance
    if path is None and provenance is None:
        return PredictedStages(
            missing="nothing is predicted: the plan does not say for which cluster it is; give --hetero-cluster"
        )
    try:
        cluster = load(ClusterSpec, path) if path is not None else None
        if cluster is None:
            assert provenance is not None
            cluster = provenance.cluster
        costs = plan_costs(
            plan,
            cluster,
            profiles=config.logging.profiles,
            data_sheets=config.logging.data_sheets,
            runtime=launched_runtime(config).model(),
        )
        stages = simulate(plan, cluster, costs).stages
    except HeteroError as error:
        return PredictedStages(missing=f"nothing is predicted: {error}")
    made = provenance.shown_command if provenance is not None else f"hetero plan --cluster {shlex.quote(str(path))} ..."

    def replan(device: str) -> tuple[str, str]:
        # A plan may leave dropout to the launch, which knows.
        wanted = dataclasses.replace(
            wanted_profile(plan, costs, device=device),
            hidden_dropout=config.stage.hidden_dropout,
            attention_dropout=config.stage.attention_dropout,
        )
        measuring, profile = profile_run(wanted, model=model_of(plan))
        return (
            f"measure what it does: {measuring}",
            f"and plan anew with that: {made} --profile {shlex.quote(str(profile))}",
        )

    return PredictedStages(stages=stages, replan=replan)


def memory_interval(config: PretrainConfig) -> int | None:
    """Steps from one look at the memory of all ranks to the next."""
    logging = config.logging
    return logging.memory_interval or (logging.log_interval if config.scalars.memory else None)


def _ranks_of_devices(plan: Plan) -> dict[str, list[int]]:
    found: dict[str, dict[int, None]] = {}
    for _, _, stage in plan.stages():
        found.setdefault(stage.device, {}).update(dict.fromkeys(stage.ranks))
    return {device: list(ranks) for device, ranks in found.items()}


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
