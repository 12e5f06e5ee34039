"""Lists plans on uniform grids of ranks: Megatron-LM's own, and Whale's with layers and samples by peak FLOPS."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.cost.cost_model import StageConfig
from hetero.plan.ir import Plan, Ranks, Recompute, Replica, Stage
from hetero.planner.listed.listed_plans import MICRO_BATCH_SIZES, Listing, TooLarge
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import RECOMPUTES, Slot, StageOptionTable
from hetero.planner.scoring import EstimatedPlan

MOST_COMBINED = 4
"""Node types of a cluster for which uniform plans on any of their combinations are searched."""


def every_uniform(problem: Problem, stage_options: StageOptionTable) -> dict[str, Listing]:
    """List the uniform plans on all GPUs, and on those of some node types, by the name of the yardstick."""
    every = {"uniform": _uniform(problem, stage_options, problem.node_types)}
    for node_types in _parts(problem, stage_options.usable_node_types):
        every[f"uniform, {' + '.join(node_type.name for node_type in node_types)}"] = _uniform(
            problem, stage_options, node_types
        )
    return every


def _parts(problem: Problem, node_types: Sequence[PlannerNodeType]) -> Iterator[tuple[PlannerNodeType, ...]]:
    """The choices of fewer than all node types; of many types, each alone."""
    most = min(len(problem.node_types) - 1, len(node_types)) if len(problem.node_types) <= MOST_COMBINED else 1
    for count in range(1, most + 1):
        yield from itertools.combinations(node_types, count)


@dataclass(frozen=True, slots=True)
class _Grid:
    """A uniform arrangement: ``pipelines`` of groups of tp ranks, each group on one node."""

    tp: int
    pipelines: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def pp(self) -> int:
        return len(self.pipelines[0])


def _grids(problem: Problem, stage_options: StageOptionTable, node_types: Sequence[PlannerNodeType]) -> Iterator[_Grid]:
    """Every tp and pp that fit, with pipelines across the rank order as in Megatron-LM, and along it; none on devices
    that lack the precision."""
    if not set(node_types) <= set(stage_options.usable_node_types):
        return
    ranks = [rank for node_type in node_types for rank in node_type.ranks]
    for tp in range(1, min(node_type.gpus_per_node for node_type in node_types) + 1):
        if any(node_type.gpus_per_node % tp for node_type in node_types) or tp not in stage_options.legal_tps(tp):
            continue
        groups = [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)]
        for pp in range(1, min(len(groups), problem.model.num_layers) + 1):
            if len(groups) % pp:
                continue
            dp = len(groups) // pp
            across = tuple(tuple(groups[s * dp + d] for s in range(pp)) for d in range(dp))
            along = tuple(tuple(groups[d * pp + s] for s in range(pp)) for d in range(dp))
            for pipelines in dict.fromkeys((across, along)):
                yield _Grid(tp, pipelines)


def _uniform(problem: Problem, stage_options: StageOptionTable, node_types: Sequence[PlannerNodeType]) -> Listing:
    """List Megatron-LM's own plans on the GPUs of some node types."""
    num_layers = problem.model.num_layers
    for grid in _grids(problem, stage_options, node_types):
        dp = len(grid.pipelines)
        if num_layers % grid.pp or problem.global_batch_size % dp:
            yield None
            continue
        pipelines = [
            _GridPipeline(groups, (num_layers // grid.pp,) * grid.pp, problem.global_batch_size // dp)
            for groups in grid.pipelines
        ]
        yield from _on_grid(problem, stage_options, grid.tp, pipelines)


def whale_plans(problem: Problem, stage_options: StageOptionTable) -> Listing:
    """List grids whose layers and samples follow the peak FLOPS of the devices."""
    for arithmetic in ("fp32", "tf32") if problem.precision == "fp32" else (problem.precision,):
        flops = {}
        for node_type in stage_options.usable_node_types:
            sheet = problem.cluster.device_types.of(node_type.device).data_sheet
            if sheet is None:
                return
            flops[node_type.index] = sheet.flops_per_s(arithmetic)
        for grid in _grids(problem, stage_options, stage_options.usable_node_types):
            power = [[flops[problem.node_type_of(group[0]).index] for group in pipeline] for pipeline in grid.pipelines]
            layers = [tuple(_proportional(problem.model.num_layers, row, least=1)) for row in power]
            for micro_batch_size in MICRO_BATCH_SIZES:
                total, rest = divmod(problem.global_batch_size, micro_batch_size)
                if rest or total < len(power):
                    continue
                shares = _proportional(total, [sum(row) for row in power], least=1)
                pipelines = [
                    _GridPipeline(groups, row, share * micro_batch_size)
                    for groups, row, share in zip(grid.pipelines, layers, shares, strict=True)
                ]
                yield from _on_grid(problem, stage_options, grid.tp, pipelines, sizes=(micro_batch_size,))


@dataclass(frozen=True, slots=True)
class _GridPipeline:
    """One pipeline of a grid: ``layers`` on each of its ``groups`` of ranks, and its part of the samples of a step."""

    groups: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]
    samples: int


def _unlike_pipelines(pipelines: Sequence[_GridPipeline], problem: Problem) -> list[_GridPipeline]:
    """One of each set of pipelines with the same node types, layers and samples."""
    unlike: dict[object, _GridPipeline] = {}
    for pipeline in pipelines:
        node_types = tuple(problem.node_type_of(group[0]).index for group in pipeline.groups)
        unlike.setdefault((node_types, pipeline.layers, pipeline.samples), pipeline)
    return list(unlike.values())


def _on_grid(
    problem: Problem,
    stage_options: StageOptionTable,
    tp: int,
    pipelines: Sequence[_GridPipeline],
    *,
    sizes: Sequence[int] = MICRO_BATCH_SIZES,
) -> Listing:
    """List the plans of these pipelines, for every microbatch size and recomputation."""
    unlike = _unlike_pipelines(pipelines, problem)
    for micro_batch_size, recompute in itertools.product(sizes, RECOMPUTES):
        if any(pipeline.samples % micro_batch_size for pipeline in unlike):
            continue
        grid_plan = _GridPlan(problem, tp, pipelines, micro_batch_size, recompute)
        # With how many ranks a distributed optimizer is shared, footprints do not know.
        short: list[TooLarge] = []
        if not problem.distributed_optimizer:
            short = [each for pipeline in unlike for each in grid_plan.shortages(pipeline, stage_options)]
        if short:
            yield max(short, key=lambda each: each.missing_bytes)
        else:
            yield EstimatedPlan(max(map(grid_plan.formula_s, unlike)), grid_plan.make)


@dataclass(frozen=True, slots=True)
class _GridPlan:
    """A plan on a grid before it is made: ``pipelines`` of stages of tp ranks, all with one microbatch size and
    recomputation."""

    problem: Problem
    tp: int
    pipelines: Sequence[_GridPipeline]
    micro_batch_size: int
    recompute: Recompute

    def shortages(self, pipeline: _GridPipeline, stage_options: StageOptionTable) -> Iterator[TooLarge]:
        """The stages of ``pipeline`` that do not hold their layers at the depths of 1F1B between equal stages."""
        pp = len(pipeline.groups)
        for s, (group, num_layers) in enumerate(zip(pipeline.groups, pipeline.layers, strict=True)):
            slot = Slot(self.problem.node_type_of(group[0]).index, self.tp, self.tp)
            option = stage_options.option(slot, self.micro_batch_size, self.recompute)
            needed = option.memory.bytes(num_layers, pp - s, first=s == 0, last=s + 1 == pp)
            if needed > option.capacity_bytes:
                yield TooLarge(
                    device=self.problem.node_type_of(group[0]).device,
                    tp=self.tp,
                    num_layers=num_layers,
                    needed_bytes=int(needed),
                    capacity_bytes=option.capacity_bytes,
                )

    def formula_s(self, pipeline: _GridPipeline) -> float:
        """Seconds of a step of ``pipeline``: its fill, and for each other microbatch its longest stage."""
        times = [
            self.problem.costs.stage(
                StageConfig(
                    device=self.problem.node_type_of(group[0]).device,
                    first_layer=end - num_layers,
                    end_layer=end,
                    tp=self.tp,
                    micro_batch_size=self.micro_batch_size,
                    sequence_parallel=self.problem.splits_sequence(self.tp),
                    recompute=self.recompute,
                    fp8=self._fp8(group),
                )
            ).microbatch_s
            for group, num_layers, end in self._stages(pipeline)
        ]
        return sum(times) + (pipeline.samples // self.micro_batch_size - 1) * max(times)

    def make(self) -> Plan:
        """Make the plan, with the depths of 1F1B between equal stages."""
        replicas = []
        for pipeline in self.pipelines:
            pp, num_microbatches = len(pipeline.groups), pipeline.samples // self.micro_batch_size
            stages = tuple(
                Stage(
                    first_layer=end - num_layers,
                    end_layer=end,
                    ranks=group,
                    device=self.problem.node_type_of(group[0]).device,
                    tp=self.tp,
                    sequence_parallel=self.problem.splits_sequence(self.tp),
                    micro_batch_size=self.micro_batch_size,
                    in_flight=min(pp - s, num_microbatches),
                    recompute=self.recompute,
                    fp8=self._fp8(group),
                )
                for s, (group, num_layers, end) in enumerate(self._stages(pipeline))
            )
            replicas.append(Replica(num_samples=pipeline.samples, stages=stages))
        return self.problem.plan_of(replicas)

    def _fp8(self, group: Ranks) -> bool:
        device = self.problem.node_type_of(group[0]).device
        return self.problem.computes_in_fp8(device, tp=self.tp, micro_batch_size=self.micro_batch_size)

    def _stages(self, pipeline: _GridPipeline) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """The ranks of each stage, how many layers it has, and where they end."""
        return zip(pipeline.groups, pipeline.layers, itertools.accumulate(pipeline.layers), strict=True)


def _proportional(total: int, weights: Sequence[float], *, least: int) -> list[int]:
    """Divide ``total`` into whole parts, each ``least`` at least, as near to ``weights`` as that allows."""
    parts = [least] * len(weights)
    for _ in range(total - sum(parts)):
        behind = [(part + 0.5) / weight for part, weight in zip(parts, weights, strict=True)]
        parts[behind.index(min(behind))] += 1
    return parts
