"""Lists plans on uniform grids of ranks: Megatron-LM's own, and Whale's with layers and samples by peak FLOPS."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero.cost.cost_model import StageConfig
from hetero.plan.ir import Plan, Ranks, Recompute, Replica, Stage
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.reference.listed_plans import MICRO_BATCH_SIZES, MOST_STAGES, Listing
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
    """Every tp and pp that fit, with pipelines across the rank order as in Megatron-LM, and along it."""
    ranks = [rank for node_type in node_types for rank in node_type.ranks]
    for tp in range(1, min(node_type.gpus_per_node for node_type in node_types) + 1):
        if any(node_type.gpus_per_node % tp for node_type in node_types) or tp not in stage_options.legal_tps(tp):
            continue
        groups = [tuple(ranks[i : i + tp]) for i in range(0, len(ranks), tp)]
        for pp in range(1, min(len(groups), problem.model.num_layers, MOST_STAGES) + 1):
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
        layers = [[num_layers // grid.pp] * grid.pp] * dp
        yield from _on_grid(problem, stage_options, grid, layers, [problem.global_batch_size // dp] * dp)


def whale_plans(problem: Problem, stage_options: StageOptionTable) -> Listing:
    """List grids whose layers and samples follow the peak FLOPS of the devices."""
    for arithmetic in ("fp32", "tf32") if problem.precision == "fp32" else (problem.precision,):
        flops = {}
        for node_type in problem.node_types:
            sheet = problem.cluster.device_types.of(node_type.device).data_sheet
            if sheet is None:
                return
            flops[node_type.index] = sheet.flops_per_s(arithmetic)
        for grid in _grids(problem, stage_options, stage_options.usable_node_types):
            power = [[flops[problem.node_type_of(group[0]).index] for group in pipeline] for pipeline in grid.pipelines]
            layers = [_proportional(problem.model.num_layers, row, least=1) for row in power]
            for micro_batch_size in MICRO_BATCH_SIZES:
                total, rest = divmod(problem.global_batch_size, micro_batch_size)
                if rest or total < len(power):
                    continue
                shares = _proportional(total, [sum(row) for row in power], least=1)
                samples = [share * micro_batch_size for share in shares]
                yield from _on_grid(problem, stage_options, grid, layers, samples, sizes=(micro_batch_size,))


def _on_grid(
    problem: Problem,
    stage_options: StageOptionTable,
    grid: _Grid,
    layers: Sequence[Sequence[int]],
    samples: Sequence[int],
    *,
    sizes: Sequence[int] = MICRO_BATCH_SIZES,
) -> Listing:
    """List the grid with given layers and samples per pipeline, for every microbatch size and recomputation."""
    for micro_batch_size, recompute in itertools.product(sizes, RECOMPUTES):
        if any(share % micro_batch_size for share in samples):
            continue
        # With how many ranks a distributed optimizer is shared, footprints do not know.
        if not problem.distributed_optimizer and not _fits(
            problem, stage_options, grid, layers, micro_batch_size, recompute
        ):
            yield None
            continue

        def make(micro_batch_size: int = micro_batch_size, recompute: Recompute = recompute) -> Plan:
            return _grid_plan(problem, grid, layers, samples, micro_batch_size, recompute)

        formula_s = 0.0
        for pipeline, row, share in {
            (tuple(problem.node_type_of(group[0]).index for group in pipeline), tuple(row), share): (
                pipeline,
                row,
                share,
            )
            for pipeline, row, share in zip(grid.pipelines, layers, samples, strict=True)
        }.values():
            times = [
                problem.costs.stage(
                    StageConfig(
                        device=problem.node_type_of(group[0]).device,
                        first_layer=sum(row[:s]),
                        end_layer=sum(row[: s + 1]),
                        tp=grid.tp,
                        micro_batch_size=micro_batch_size,
                        recompute=recompute,
                        fp8=_fp8(problem, grid, group, micro_batch_size),
                    )
                ).microbatch_s
                for s, group in enumerate(pipeline)
            ]
            formula_s = max(formula_s, sum(times) + (share // micro_batch_size - 1) * max(times))
        yield EstimatedPlan(formula_s, make)


def _fits(
    problem: Problem,
    stage_options: StageOptionTable,
    grid: _Grid,
    layers: Sequence[Sequence[int]],
    micro_batch_size: int,
    recompute: Recompute,
) -> bool:
    """Whether every stage holds its layers at the depths of 1F1B between equal stages."""
    seen = set()
    for pipeline, row in zip(grid.pipelines, layers, strict=True):
        for s, group in enumerate(pipeline):
            node_type = problem.node_type_of(group[0])
            key = node_type.index, s, row[s]
            if key in seen:
                continue
            seen.add(key)
            option = stage_options.option(Slot(node_type.index, grid.tp, grid.tp), micro_batch_size, recompute)
            if not option.fits(row[s], grid.pp - s, first=s == 0, last=s + 1 == grid.pp):
                return False
    return True


def _grid_plan(
    problem: Problem,
    grid: _Grid,
    layers: Sequence[Sequence[int]],
    samples: Sequence[int],
    micro_batch_size: int,
    recompute: Recompute,
) -> Plan:
    """The plan of a grid."""
    replicas = []
    for pipeline, row, share in zip(grid.pipelines, layers, samples, strict=True):
        ends = list(itertools.accumulate(row))
        stages = tuple(
            Stage(
                first_layer=ends[s] - row[s],
                end_layer=ends[s],
                ranks=group,
                device=problem.node_type_of(group[0]).device,
                tp=grid.tp,
                sequence_parallel=problem.splits_sequence(grid.tp),
                micro_batch_size=micro_batch_size,
                in_flight=min(grid.pp - s, share // micro_batch_size),
                recompute=recompute,
                fp8=_fp8(problem, grid, group, micro_batch_size),
            )
            for s, group in enumerate(pipeline)
        )
        replicas.append(Replica(num_samples=share, stages=stages))
    return problem.plan_of(replicas)


def _fp8(problem: Problem, grid: _Grid, group: Ranks, micro_batch_size: int) -> bool:
    device = problem.node_type_of(group[0]).device
    return problem.computes_in_fp8(device, tp=grid.tp, micro_batch_size=micro_batch_size)


def _proportional(total: int, weights: Sequence[float], *, least: int) -> list[int]:
    """Divide ``total`` into whole parts, each ``least`` at least, as near to ``weights`` as that allows."""
    parts = [least] * len(weights)
    for _ in range(total - sum(parts)):
        behind = [(part + 0.5) / weight for part, weight in zip(parts, weights, strict=True)]
        parts[behind.index(min(behind))] += 1
    return parts
