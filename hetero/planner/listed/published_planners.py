"""Lists plans in the shapes that AutoHet and HARP look for, as covers by templates.

AutoHet (arXiv 2512.20953) makes replicas of near-equal power with equal shares, one tp, and layers by measured speed
and memory. HARP (arXiv 2509.24859) makes one pipeline over all sub-clusters, with tensor and data parallelism inside
one.
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

from hetero.planner.cover.cover import Copies, score_cover
from hetero.planner.cover.expand import expand
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.listed.listed_plans import (
    MICRO_BATCH_SIZES,
    MOST_STAGES_LISTED,
    Listing,
    TooLarge,
    pipeline_shortage,
)
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.replica.templates import TemplateFactory, place_in_order
from hetero.planner.scoring import EstimatedPlan

MOST_STAGES_PER_NODE_TYPE = 16
"""Stages into which HARP's plans cut the devices of one node type. A heuristic."""

CHOICES_PER_LOOK = 1000
"""Of HARP's choices that are counted through before one is looked at, so that the deadline is looked at meanwhile."""

HARP_SAMPLES = tuple(2**i for i in range(11))
"""Samples per microbatch of HARP's one pipeline: many, since its data-parallel ranks share them. A heuristic."""


def autohet_plans(problem: Problem, stage_options: StageOptionTable) -> Listing:
    """List mixed replicas with an equal part of every node type, and replicas of one node type each; all take equal
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
    """List the plan of such replicas with equal shares."""
    total = sum(count for _, count in compositions)
    each, rest = divmod(problem.global_batch_size, total * samples)
    if rest or not each:
        yield None
        return
    copies = []
    for parts, count in compositions:
        if sum(size for _, size in parts) > min(MOST_STAGES_LISTED, problem.model.num_layers):
            yield None
            return
        slots = [Slot(node_type.index, tp, tp) for node_type, size in parts for _ in range(size)]
        template = factory.balanced(place_in_order(slots, problem.node_types), samples)
        if template is None:
            yield partial(_shortage, factory, slots, samples)
            return
        copies.append(Copies(template, count, count * each))
    cover = tuple(copies)
    yield EstimatedPlan(score_cover(cover, problem, sync_tiers).step_s, lambda: expand(cover, problem))


def harp_plans(problem: Problem, stage_options: StageOptionTable) -> Listing:
    """List pipelines over everything: each node type is cut into equal stages, of any tp and as much dp as is left.

    Few stages and small tp come first, so that a search that is cut short has seen what is mostly best.
    """
    factory, sync_tiers = TemplateFactory(problem, stage_options), SyncTiers(problem)
    node_types = stage_options.usable_node_types
    choices = []
    for node_type in node_types:
        choices.append(
            [
                (node_type, num_stages, tp)
                for num_stages in range(1, min(node_type.num_devices, MOST_STAGES_PER_NODE_TYPE) + 1)
                if node_type.num_devices % num_stages == 0
                for tp in stage_options.degrees(node_type.gpus_per_node)
                if node_type.num_devices // num_stages % tp == 0
            ]
        )
    most = min(MOST_STAGES_LISTED, problem.model.num_layers)
    for chosen in itertools.chain.from_iterable(
        _chosen(choices, stages) for stages in range(len(node_types), most + 1)
    ):
        if chosen is None:
            yield None
            continue
        for order in itertools.permutations(chosen):
            for samples in HARP_SAMPLES:
                if problem.global_batch_size % samples:
                    continue
                slots = [
                    Slot(node_type.index, node_type.num_devices // num_stages, tp)
                    for node_type, num_stages, tp in order
                    for _ in range(num_stages)
                ]
                template = factory.balanced(place_in_order(slots, problem.node_types), samples)
                if template is None:
                    yield partial(_shortage, factory, slots, samples)
                else:
                    cover = (Copies(template, 1, problem.global_batch_size // samples),)
                    yield EstimatedPlan(
                        score_cover(cover, problem, sync_tiers).step_s,
                        partial(expand, cover, problem),
                    )


def _shortage(factory: TemplateFactory, slots: Sequence[Slot], samples: int) -> TooLarge | None:
    """What a pipeline of these slots is short of."""
    devices = [factory.problem.node_types[slot.node_type].device for slot in slots]
    options = [factory.stage_options.of(slot, samples) for slot in slots]
    return pipeline_shortage(
        [(device, slot.tp, found) for device, slot, found in zip(devices, slots, options, strict=True)],
        factory.problem.model.num_layers,
    )


_Choice = tuple[PlannerNodeType, int, int]
"""A node type, the number of its stages, and their tp."""


def _chosen(choices: Sequence[Sequence[_Choice]], stages: int) -> Iterator[tuple[_Choice, ...] | None]:
    """Every choice of one way per node type with ``stages`` stages in all, small tp first; before the first of them
    ``None`` for each few that were counted through, which may be very many."""

    def extend(chosen: tuple[_Choice, ...], left: int) -> Iterator[tuple[_Choice, ...]]:
        if len(chosen) == len(choices):
            if not left:
                yield chosen
            return
        for choice in choices[len(chosen)]:
            if choice[1] <= left:
                yield from extend((*chosen, choice), left - choice[1])

    found: list[tuple[_Choice, ...]] = []
    for chosen in extend((), stages):
        found.append(chosen)
        if len(found) % CHOICES_PER_LOOK == 0:
            yield None
    yield from sorted(found, key=lambda chosen: sum(tp for _, _, tp in chosen))
