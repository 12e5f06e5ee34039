"""Yardsticks: how others would plan the same cluster, each at its best, scored by the same simulator.

uniform         Megatron-LM: one (tp, pp, dp, microbatch, recomputation) for all GPUs, by exhaustive search
uniform, <types> the same on the GPUs of some of the node types, the others idle
whale           Whale (arXiv 2011.09208): a uniform grid whose layers and samples follow the devices' peak FLOPS
autohet         AutoHet (arXiv 2512.20953): replicas of near-equal power with equal shares, one tp, layers by measured
                speed and memory
harp            HARP (arXiv 2509.24859): one pipeline over all sub-clusters, tensor and data parallelism inside one

Each is our reading of a published idea with this project's costs, memory check and runtime, not the authors' program.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Recompute, Replica, Stage
from hetero.planner.cover.cover import Copies, score_cover
from hetero.planner.cover.expand import expand
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.deadline import Deadline
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.boundary_costs import PlacedSlot
from hetero.planner.replica.stage_options import RECOMPUTES, Slot, StageOptions
from hetero.planner.replica.templates import TemplateFactory
from hetero.planner.scoring import EstimatedPlan, ScoredPlan, score_plan, score_with_smaller_depths
from hetero.planner.time_shares import TimeShare
from hetero.spec.devices import device_type

MICRO_BATCH_SIZES = (1, 2, 4, 8)

CLOSE = 1.1
"""Plans whose seconds by a formula are above so many times the best simulated ones are not simulated."""

LARGE_CLUSTER = 256

MOST_SIMULATED, SIMULATED_IF_LARGE = 200, 12
"""Plans of one yardstick that are simulated, the best by the formula first."""

MOST_STAGES = 32

MOST_COMBINED = 4
"""Node types of a cluster for which uniform plans on any of their combinations are searched."""


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """A yardstick's best plan; ``None`` if none of its plans fits."""

    name: str
    best: ScoredPlan | None


Listing = Iterator[EstimatedPlan | None]
"""``None`` stands for what was looked at in vain, so that whoever lists can look at the deadline."""


def yardsticks(problem: Problem, *, limit_s: float = 60.0) -> tuple[Yardstick, ...]:
    """All yardsticks of ``problem`` in the order of this file's head; each is searched for ``limit_s`` seconds at most.

    Half of the time goes into listing plans with their seconds by a formula, half into simulating the best of them.
    """
    stage_options = StageOptions(problem)
    every = every_uniform(problem, stage_options) | {
        "whale": _whale(problem, stage_options),
        "autohet": autohet_plans(problem, stage_options),
        "harp": harp_plans(problem, stage_options),
    }
    return tuple(
        Yardstick(name=name, best=best_plan(plans, problem, Deadline(limit_s))) for name, plans in every.items()
    )


def best_uniform(problem: Problem, *, limit_s: float = 60.0) -> Yardstick | None:
    """The fastest uniform plan, on all GPUs or on those of some node types; ``None`` if none fits."""
    every = every_uniform(problem, StageOptions(problem))
    found = [Yardstick(name=name, best=best_plan(plans, problem, Deadline(limit_s))) for name, plans in every.items()]
    return min(
        (each for each in found if each.best is not None),
        key=lambda each: each.best.step_s if each.best is not None else 0.0,
        default=None,
    )


def every_uniform(problem: Problem, stage_options: StageOptions) -> dict[str, Listing]:
    """The uniform plans on all GPUs, and on those of some node types, by the name of the yardstick."""
    every = {"uniform": _uniform(problem, stage_options, problem.node_types)}
    for node_types in _parts(problem, stage_options.usable_node_types):
        every[f"uniform, {' + '.join(node_type.name for node_type in node_types)}"] = _uniform(
            problem, stage_options, node_types
        )
    return every


def _parts(problem: Problem, node_types: Sequence[PlannerNodeType]) -> Iterator[tuple[PlannerNodeType, ...]]:
    """Choices of fewer than all node types; of many types, each alone."""
    most = min(len(problem.node_types) - 1, len(node_types)) if len(problem.node_types) <= MOST_COMBINED else 1
    for count in range(1, most + 1):
        yield from itertools.combinations(node_types, count)


def best_plan(listing: Iterable[EstimatedPlan | None], problem: Problem, deadline: Deadline) -> ScoredPlan | None:
    """The best of the listed plans by the simulator: half of the time lists them, half simulates the best by formula;
    ``None`` if none fits."""
    if deadline.is_over():
        return None
    until = TimeShare.LISTING.of(deadline)
    listed = [each for each in itertools.takewhile(lambda _: not until.is_over(), listing) if each is not None]
    best: ScoredPlan | None = None
    simulated = 0
    most = MOST_SIMULATED if problem.cluster.num_devices <= LARGE_CLUSTER else SIMULATED_IF_LARGE
    for candidate in sorted(listed, key=lambda candidate: candidate.step_s):
        if deadline.is_over() or (best is not None and (candidate.step_s > CLOSE * best.step_s or simulated >= most)):
            break
        try:
            plan = candidate.make()
            found = score_plan(plan, problem, deadline) or score_with_smaller_depths(plan, problem, deadline)
        except (PlanError, ConfigError):
            continue  # A grid that tears a tensor-parallel group apart, for instance.
        if found is not None:
            simulated += 1
            if best is None or found.step_s < best.step_s:
                best = found
    return best


@dataclass(frozen=True, slots=True)
class _Grid:
    """A uniform arrangement: ``pipelines`` of groups of tp ranks, each group on one node."""

    tp: int
    pipelines: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def pp(self) -> int:
        return len(self.pipelines[0])


def _grids(problem: Problem, stage_options: StageOptions, node_types: Sequence[PlannerNodeType]) -> Iterator[_Grid]:
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


def _uniform(problem: Problem, stage_options: StageOptions, node_types: Sequence[PlannerNodeType]) -> Listing:
    num_layers = problem.model.num_layers
    for grid in _grids(problem, stage_options, node_types):
        dp = len(grid.pipelines)
        if num_layers % grid.pp or problem.global_batch_size % dp:
            yield None
            continue
        layers = [[num_layers // grid.pp] * grid.pp] * dp
        yield from _on_grid(problem, stage_options, grid, layers, [problem.global_batch_size // dp] * dp)


def _whale(problem: Problem, stage_options: StageOptions) -> Listing:
    for arithmetic in ("fp32", "tf32") if problem.precision == "fp32" else (problem.precision,):
        flops = {}
        for node_type in problem.node_types:
            sheet = device_type(node_type.device).data_sheet
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
    stage_options: StageOptions,
    grid: _Grid,
    layers: Sequence[Sequence[int]],
    samples: Sequence[int],
    *,
    sizes: Sequence[int] = MICRO_BATCH_SIZES,
) -> Listing:
    """The grid with given layers and samples per pipeline, for every microbatch size and recomputation."""
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
                    device=problem.node_type_of(group[0]).device,
                    first_layer=sum(row[:s]),
                    end_layer=sum(row[: s + 1]),
                    tp=grid.tp,
                    micro_batch_size=micro_batch_size,
                    recompute=recompute,
                ).microbatch_s
                for s, group in enumerate(pipeline)
            ]
            formula_s = max(formula_s, sum(times) + (share // micro_batch_size - 1) * max(times))
        yield EstimatedPlan(formula_s, make)


def _fits(
    problem: Problem,
    stage_options: StageOptions,
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
            )
            for s, group in enumerate(pipeline)
        )
        replicas.append(Replica(num_samples=share, stages=stages))
    return problem.plan_of(replicas)


def autohet_plans(problem: Problem, stage_options: StageOptions) -> Listing:
    """Mixed replicas with an equal part of every node type, and replicas of one node type each; all take equal
    shares."""
    factory, sync_tiers = TemplateFactory(problem, stage_options), SyncTiers(problem)
    node_types = stage_options.usable_node_types
    for tp in sorted({tp for node_type in node_types for tp in stage_options.degrees(node_type.gpus_per_node)}):
        if any(node_type.gpus_per_node % tp for node_type in node_types):
            continue
        groups = [node_type.num_devices // tp for node_type in node_types]
        for samples in MICRO_BATCH_SIZES:
            for replicas in range(1, max(groups) + 1):
                if all(count % replicas == 0 for count in groups):
                    orders = itertools.permutations(
                        [(node_type, count // replicas) for node_type, count in zip(node_types, groups, strict=True)]
                    )
                    for parts in orders:
                        yield from _equal_shares(problem, sync_tiers, factory, [(parts, replicas)], tp, samples)
            divisors = [[n for n in range(1, count + 1) if count % n == 0] for count in groups]
            for numbers in itertools.product(*divisors):
                if len(node_types) > 1:
                    parts_of = [
                        (((node_type, count // n),), n)
                        for node_type, count, n in zip(node_types, groups, numbers, strict=True)
                    ]
                    yield from _equal_shares(problem, sync_tiers, factory, parts_of, tp, samples)


def _equal_shares(
    problem: Problem,
    sync_tiers: SyncTiers,
    factory: TemplateFactory,
    compositions: Sequence[tuple[Sequence[tuple[PlannerNodeType, int]], int]],
    tp: int,
    samples: int,
) -> Listing:
    """``compositions``: per sort of replica its (node type, number of tp groups) in stage order, and how many there
    are."""
    total = sum(count for _, count in compositions)
    each, rest = divmod(problem.global_batch_size, total * samples)
    if rest or not each:
        yield None
        return
    copies = []
    for parts, count in compositions:
        if sum(size for _, size in parts) > min(MOST_STAGES, problem.model.num_layers):
            yield None
            return
        placed_slots = tuple(
            PlacedSlot(
                Slot(node_type.index, tp, tp), i * tp // node_type.gpus_per_node, i * tp % node_type.gpus_per_node
            )
            for node_type, size in parts
            for i in range(size)
        )
        template = factory.balanced(placed_slots, samples)
        if template is None:
            yield None
            return
        copies.append(Copies(template, count, count * each))
    cover = tuple(copies)
    yield EstimatedPlan(score_cover(cover, problem, sync_tiers).step_s, lambda: expand(cover, problem))


def harp_plans(problem: Problem, stage_options: StageOptions) -> Listing:
    """One replica over everything: each node type is cut into equal stages, of any tp and as much dp as is left.

    Few stages and small tp come first, so that a search that is cut short has seen what is mostly best.
    """
    factory, sync_tiers = TemplateFactory(problem, stage_options), SyncTiers(problem)
    node_types = stage_options.usable_node_types
    choices = []
    for node_type in node_types:
        choices.append(
            [
                (node_type, num_stages, tp)
                for num_stages in range(1, min(node_type.num_devices, 16) + 1)
                if node_type.num_devices % num_stages == 0
                for tp in stage_options.degrees(node_type.gpus_per_node)
                if node_type.num_devices // num_stages % tp == 0
            ]
        )
    most = min(MOST_STAGES, problem.model.num_layers)
    for chosen in itertools.chain.from_iterable(
        _chosen(choices, stages) for stages in range(len(node_types), most + 1)
    ):
        for order in itertools.permutations(chosen):
            for samples in (2**i for i in range(11)):
                if problem.global_batch_size % samples:
                    continue
                placed_slots = tuple(
                    PlacedSlot(
                        Slot(node_type.index, size, tp),
                        i * size // node_type.gpus_per_node,
                        i * size % node_type.gpus_per_node,
                    )
                    for node_type, num_stages, tp in order
                    for size in [node_type.num_devices // num_stages]
                    for i in range(num_stages)
                )
                template = factory.balanced(placed_slots, samples)
                if template is None:
                    yield None
                else:
                    cover = (Copies(template, 1, problem.global_batch_size // samples),)
                    yield EstimatedPlan(
                        score_cover(cover, problem, sync_tiers).step_s,
                        lambda cover=cover: expand(cover, problem),  # type: ignore[misc]
                    )


_Choice = tuple[PlannerNodeType, int, int]
"""A node type, the number of its stages, and their tp."""


def _chosen(choices: Sequence[Sequence[_Choice]], stages: int) -> list[tuple[_Choice, ...]]:
    """One choice of each node type with ``stages`` stages in all, small tp first."""

    def extend(chosen: tuple[_Choice, ...], left: int) -> Iterator[tuple[_Choice, ...]]:
        if len(chosen) == len(choices):
            if not left:
                yield chosen
            return
        for choice in choices[len(chosen)]:
            if choice[1] <= left:
                yield from extend((*chosen, choice), left - choice[1])

    return sorted(extend((), stages), key=lambda chosen: sum(tp for _, _, tp in chosen))


def _proportional(total: int, weights: Sequence[float], *, least: int) -> list[int]:
    """``total`` in whole parts, each ``least`` at least, as near to ``weights`` as that allows."""
    parts = [least] * len(weights)
    for _ in range(total - sum(parts)):
        behind = [(part + 0.5) / weight for part, weight in zip(parts, weights, strict=True)]
        parts[behind.index(min(behind))] += 1
    return parts
