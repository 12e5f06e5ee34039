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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Recompute, Replica, Stage
from hetero.planner.boundaries import Seat
from hetero.planner.candidates import RECOMPUTES, Candidates, Slot
from hetero.planner.clock import Clock
from hetero.planner.cover import Copies, score
from hetero.planner.expand import expand
from hetero.planner.finalists import Scored, scored, scored_shallower
from hetero.planner.problem import NodeKind, Problem
from hetero.planner.rings import Rings
from hetero.planner.templates import TemplateFactory
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
    best: Scored | None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that is made only if it is among the best by the formula."""

    formula_s: float
    make: Callable[[], Plan]


Listing = Iterator[Candidate | None]
"""``None`` stands for what was looked at in vain, so that whoever lists can look at the clock."""


def yardsticks(problem: Problem, *, limit_s: float = 60.0) -> tuple[Yardstick, ...]:
    """All yardsticks of ``problem`` in the order of this file's head; each is searched for ``limit_s`` seconds at most.

    Half of the time goes into listing plans with their seconds by a formula, half into simulating the best of them.
    """
    candidates = Candidates(problem)
    every = every_uniform(problem, candidates) | {
        "whale": _whale(problem, candidates),
        "autohet": autohet_plans(problem, candidates),
        "harp": harp_plans(problem, candidates),
    }
    return tuple(Yardstick(name=name, best=best_plan(plans, problem, Clock(limit_s))) for name, plans in every.items())


def best_uniform(problem: Problem, *, limit_s: float = 60.0) -> Yardstick | None:
    """The fastest uniform plan, on all GPUs or on those of some node types; ``None`` if none fits."""
    every = every_uniform(problem, Candidates(problem))
    found = [Yardstick(name=name, best=best_plan(plans, problem, Clock(limit_s))) for name, plans in every.items()]
    return min(
        (each for each in found if each.best is not None),
        key=lambda each: each.best.step_s if each.best is not None else 0.0,
        default=None,
    )


def every_uniform(problem: Problem, candidates: Candidates) -> dict[str, Listing]:
    """The uniform plans on all GPUs, and on those of some node types, by the name of the yardstick."""
    every = {"uniform": _uniform(problem, candidates, problem.kinds)}
    for kinds in _parts(problem, candidates.usable_kinds):
        every[f"uniform, {' + '.join(kind.name for kind in kinds)}"] = _uniform(problem, candidates, kinds)
    return every


def _parts(problem: Problem, kinds: Sequence[NodeKind]) -> Iterator[tuple[NodeKind, ...]]:
    """Choices of fewer than all node types; of many types, each alone."""
    most = min(len(problem.kinds) - 1, len(kinds)) if len(problem.kinds) <= MOST_COMBINED else 1
    for count in range(1, most + 1):
        yield from itertools.combinations(kinds, count)


def best_plan(candidates: Iterable[Candidate | None], problem: Problem, clock: Clock) -> Scored | None:
    """The best of ``candidates`` by the simulator: half of the time lists them, half simulates the best by formula."""
    if clock.is_over():
        return None
    listing = clock.part(1 / 2)
    listed = [each for each in itertools.takewhile(lambda _: not listing.is_over(), candidates) if each is not None]
    best: Scored | None = None
    simulated = 0
    most = MOST_SIMULATED if problem.cluster.num_devices <= LARGE_CLUSTER else SIMULATED_IF_LARGE
    for candidate in sorted(listed, key=lambda candidate: candidate.formula_s):
        if clock.is_over() or (best is not None and (candidate.formula_s > CLOSE * best.step_s or simulated >= most)):
            break
        try:
            plan = candidate.make()
            found = scored(plan, problem, clock) or scored_shallower(plan, problem, clock)
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


def _grids(problem: Problem, candidates: Candidates, kinds: Sequence[NodeKind]) -> Iterator[_Grid]:
    """Every tp and pp that fit, with pipelines across the rank order as in Megatron-LM, and along it."""
    ranks = [rank for kind in kinds for rank in range(kind.first_rank, kind.first_rank + kind.num_devices)]
    for tp in range(1, min(kind.gpus_per_node for kind in kinds) + 1):
        if any(kind.gpus_per_node % tp for kind in kinds) or tp not in candidates.legal_tps(tp):
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


def _uniform(problem: Problem, candidates: Candidates, kinds: Sequence[NodeKind]) -> Listing:
    num_layers = problem.model.num_layers
    for grid in _grids(problem, candidates, kinds):
        dp = len(grid.pipelines)
        if num_layers % grid.pp or problem.global_batch_size % dp:
            yield None
            continue
        layers = [[num_layers // grid.pp] * grid.pp] * dp
        yield from _on_grid(problem, candidates, grid, layers, [problem.global_batch_size // dp] * dp)


def _whale(problem: Problem, candidates: Candidates) -> Listing:
    for arithmetic in ("fp32", "tf32") if problem.precision == "fp32" else (problem.precision,):
        flops = {}
        for kind in problem.kinds:
            sheet = device_type(kind.device).data_sheet
            if sheet is None:
                return
            flops[kind.index] = sheet.flops_per_s(arithmetic)
        for grid in _grids(problem, candidates, candidates.usable_kinds):
            power = [[flops[_kind_of(problem, group[0]).index] for group in pipeline] for pipeline in grid.pipelines]
            layers = [_proportional(problem.model.num_layers, row, least=1) for row in power]
            for micro_batch_size in MICRO_BATCH_SIZES:
                total, rest = divmod(problem.global_batch_size, micro_batch_size)
                if rest or total < len(power):
                    continue
                shares = _proportional(total, [sum(row) for row in power], least=1)
                samples = [share * micro_batch_size for share in shares]
                yield from _on_grid(problem, candidates, grid, layers, samples, sizes=(micro_batch_size,))


def _on_grid(
    problem: Problem,
    candidates: Candidates,
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
            problem, candidates, grid, layers, micro_batch_size, recompute
        ):
            yield None
            continue

        def make(micro_batch_size: int = micro_batch_size, recompute: Recompute = recompute) -> Plan:
            return _grid_plan(problem, grid, layers, samples, micro_batch_size, recompute)

        formula_s = 0.0
        for pipeline, row, share in {
            (tuple(_kind_of(problem, group[0]).index for group in pipeline), tuple(row), share): (pipeline, row, share)
            for pipeline, row, share in zip(grid.pipelines, layers, samples, strict=True)
        }.values():
            times = [
                problem.costs.stage(
                    device=_kind_of(problem, group[0]).device,
                    first_layer=sum(row[:s]),
                    end_layer=sum(row[: s + 1]),
                    tp=grid.tp,
                    micro_batch_size=micro_batch_size,
                    recompute=recompute,
                ).microbatch_s
                for s, group in enumerate(pipeline)
            ]
            formula_s = max(formula_s, sum(times) + (share // micro_batch_size - 1) * max(times))
        yield Candidate(formula_s, make)


def _fits(
    problem: Problem,
    candidates: Candidates,
    grid: _Grid,
    layers: Sequence[Sequence[int]],
    micro_batch_size: int,
    recompute: Recompute,
) -> bool:
    """Whether every stage holds its layers at the depths of 1F1B between equal stages."""
    seen = set()
    for pipeline, row in zip(grid.pipelines, layers, strict=True):
        for s, group in enumerate(pipeline):
            kind = _kind_of(problem, group[0])
            key = kind.index, s, row[s]
            if key in seen:
                continue
            seen.add(key)
            option = candidates.option(Slot(kind.index, grid.tp, grid.tp), micro_batch_size, recompute)
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
                device=_kind_of(problem, group[0]).device,
                tp=grid.tp,
                sequence_parallel=problem.splits_sequence(grid.tp),
                micro_batch_size=micro_batch_size,
                in_flight=min(grid.pp - s, share // micro_batch_size),
                recompute=recompute,
            )
            for s, group in enumerate(pipeline)
        )
        replicas.append(Replica(num_samples=share, stages=stages))
    working = {rank for pipeline in grid.pipelines for group in pipeline for rank in group}
    return Plan(
        model=problem.model,
        seq_length=problem.seq_length,
        global_batch_size=problem.global_batch_size,
        precision=problem.precision,
        distributed_optimizer=problem.distributed_optimizer,
        replicas=tuple(replicas),
        idle_ranks=tuple(rank for rank in range(problem.cluster.num_devices) if rank not in working),
    )


def autohet_plans(problem: Problem, candidates: Candidates) -> Listing:
    """Mixed replicas with an equal part of every kind, and replicas of one kind each; all take equal shares."""
    factory, rings = TemplateFactory(problem, candidates), Rings(problem)
    kinds = candidates.usable_kinds
    for tp in sorted({tp for kind in kinds for tp in candidates.degrees(kind.gpus_per_node)}):
        if any(kind.gpus_per_node % tp for kind in kinds):
            continue
        groups = [kind.num_devices // tp for kind in kinds]
        for samples in MICRO_BATCH_SIZES:
            for replicas in range(1, max(groups) + 1):
                if all(count % replicas == 0 for count in groups):
                    orders = itertools.permutations(
                        [(kind, count // replicas) for kind, count in zip(kinds, groups, strict=True)]
                    )
                    for parts in orders:
                        yield from _equal_shares(problem, rings, factory, [(parts, replicas)], tp, samples)
            divisors = [[n for n in range(1, count + 1) if count % n == 0] for count in groups]
            for numbers in itertools.product(*divisors):
                if len(kinds) > 1:
                    parts_of = [
                        (((kind, count // n),), n) for kind, count, n in zip(kinds, groups, numbers, strict=True)
                    ]
                    yield from _equal_shares(problem, rings, factory, parts_of, tp, samples)


def _equal_shares(
    problem: Problem,
    rings: Rings,
    factory: TemplateFactory,
    compositions: Sequence[tuple[Sequence[tuple[NodeKind, int]], int]],
    tp: int,
    samples: int,
) -> Listing:
    """``compositions``: per sort of replica its (kind, number of tp groups) in stage order, and how many there are."""
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
        seats = tuple(
            Seat(Slot(kind.index, tp, tp), i * tp // kind.gpus_per_node, i * tp % kind.gpus_per_node)
            for kind, size in parts
            for i in range(size)
        )
        template = factory.balanced(seats, samples)
        if template is None:
            yield None
            return
        copies.append(Copies(template, count, count * each))
    cover = tuple(copies)
    yield Candidate(score(cover, problem, rings).step_s, lambda: expand(cover, problem))


def harp_plans(problem: Problem, candidates: Candidates) -> Listing:
    """One replica over everything: each kind is cut into equal stages, of any tp and as much dp as is left.

    Few stages and small tp come first, so that a search that is cut short has seen what is mostly best.
    """
    factory, rings = TemplateFactory(problem, candidates), Rings(problem)
    kinds = candidates.usable_kinds
    choices = []
    for kind in kinds:
        choices.append(
            [
                (kind, num_stages, tp)
                for num_stages in range(1, min(kind.num_devices, 16) + 1)
                if kind.num_devices % num_stages == 0
                for tp in candidates.degrees(kind.gpus_per_node)
                if kind.num_devices // num_stages % tp == 0
            ]
        )
    most = min(MOST_STAGES, problem.model.num_layers)
    for chosen in itertools.chain.from_iterable(_chosen(choices, stages) for stages in range(len(kinds), most + 1)):
        for order in itertools.permutations(chosen):
            for samples in (2**i for i in range(11)):
                if problem.global_batch_size % samples:
                    continue
                seats = tuple(
                    Seat(Slot(kind.index, size, tp), i * size // kind.gpus_per_node, i * size % kind.gpus_per_node)
                    for kind, num_stages, tp in order
                    for size in [kind.num_devices // num_stages]
                    for i in range(num_stages)
                )
                template = factory.balanced(seats, samples)
                if template is None:
                    yield None
                else:
                    cover = (Copies(template, 1, problem.global_batch_size // samples),)
                    yield Candidate(
                        score(cover, problem, rings).step_s,
                        lambda cover=cover: expand(cover, problem),  # type: ignore[misc]  # the default binds it, and is no argument of theirs
                    )


_Choice = tuple[NodeKind, int, int]
"""A kind, the number of its stages, and their tp."""


def _chosen(choices: Sequence[Sequence[_Choice]], stages: int) -> list[tuple[_Choice, ...]]:
    """One choice of each kind with ``stages`` stages in all, small tp first."""

    def extend(chosen: tuple[_Choice, ...], left: int) -> Iterator[tuple[_Choice, ...]]:
        if len(chosen) == len(choices):
            if not left:
                yield chosen
            return
        for choice in choices[len(chosen)]:
            if choice[1] <= left:
                yield from extend((*chosen, choice), left - choice[1])

    return sorted(extend((), stages), key=lambda chosen: sum(tp for _, _, tp in chosen))


def _kind_of(problem: Problem, rank: int) -> NodeKind:
    return next(kind for kind in problem.kinds if kind.first_rank <= rank < kind.first_rank + kind.num_devices)


def _proportional(total: int, weights: Sequence[float], *, least: int) -> list[int]:
    """``total`` in whole parts, each ``least`` at least, as near to ``weights`` as that allows."""
    parts = [least] * len(weights)
    for _ in range(total - sum(parts)):
        behind = [(part + 0.5) / weight for part, weight in zip(parts, weights, strict=True)]
        parts[behind.index(min(behind))] += 1
    return parts
