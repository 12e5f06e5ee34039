"""Turns a cover into a plan: nodes and ranks for every copy of every template."""

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.plan.ir import Plan, Replica, Stage
from hetero.planner.cover.cover import Copies
from hetero.planner.problem import PlannerNodeType, Problem
from hetero.planner.replica.templates import Template


@dataclass(frozen=True, slots=True)
class _Request:
    """A copy's need for ``size`` devices of one node, its ``node``-th of that node type."""

    size: int
    copy: int
    node: int


def expand(cover: Sequence[Copies], problem: Problem, *, extra_depth: int = 0) -> Plan:
    """Turn ``cover`` into a plan, with the replicas in the order of their first ranks.

    extra_depth: microbatches in flight beyond the smallest depths, where memory holds them.
    """
    copies = [(c.template, microbatches) for c in cover for microbatches in c.shares]
    first_ranks = {node_type.index: _allot(copies, node_type) for node_type in problem.node_types}
    replicas = []
    for number, (template, microbatches) in enumerate(copies):
        starts = {
            (index, node): rank
            for index, of_copies in first_ranks.items()
            for node, rank in of_copies.get(number, {}).items()
        }
        replicas.append(_replica(template, microbatches, starts, problem, extra_depth))
    replicas.sort(key=lambda replica: min(rank for stage in replica.stages for rank in stage.ranks))
    return problem.plan_of(replicas)


def _allot(copies: Sequence[tuple[Template, int]], node_type: PlannerNodeType) -> dict[int, dict[int, int]]:
    """Hand out the devices of a node type: the first rank of every node, or part of one, of every copy, as ``{copy:
    {node: rank}}``.

    Sizes are a node's devices halved any number of times. Handed out from the largest to the smallest, each finds its
    place without a gap if all together find room.
    """
    requests = []
    for number, (template, _) in enumerate(copies):
        sizes: dict[int, int] = {}
        for placed in template.placed_slots:
            if placed.slot.node_type == node_type.index:
                sizes[placed.node] = sizes.get(placed.node, 0) + placed.slot.gpus
        requests += [_Request(size, number, node) for node, size in sizes.items()]
    requests.sort(key=lambda request: (-request.size, request.copy, request.node))

    allotted: dict[int, dict[int, int]] = {}
    next_free = 0
    for request in requests:
        assert next_free + request.size <= node_type.num_devices, "the cover takes no more devices than there are"
        allotted.setdefault(request.copy, {})[request.node] = node_type.first_rank + next_free
        next_free += request.size
    return allotted


def _replica(
    template: Template, microbatches: int, starts: dict[tuple[int, int], int], problem: Problem, extra_depth: int
) -> Replica:
    """One copy of a template on the ranks that it got."""
    stages: list[Stage] = []
    layer = 0
    last = len(template.placed_slots) - 1
    depths: list[int] = []
    for s, stage in enumerate(template.stages):
        cap = stage.option.deepest(stage.num_layers, first=s == 0, last=s == last)
        depth = max(stage.depth, min(stage.depth + extra_depth, cap))
        # No deeper than the stage before: what that one does not send cannot be held.
        depths.append(min([depth, microbatches, *depths[-1:]]))
    for placed, stage, depth in zip(template.placed_slots, template.stages, depths, strict=True):
        first_rank = starts[placed.slot.node_type, placed.node] + _offset_within(
            template, placed.slot.node_type, placed.node, placed.offset
        )
        end = layer + stage.num_layers
        stages.append(
            Stage(
                first_layer=layer,
                end_layer=end,
                ranks=tuple(range(first_rank, first_rank + placed.slot.gpus)),
                device=problem.node_types[placed.slot.node_type].device,
                tp=placed.slot.tp,
                dp=placed.slot.dp,
                sequence_parallel=problem.splits_sequence(placed.slot.tp),
                micro_batch_size=stage.option.micro_batch_size,
                in_flight=depth,
                recompute=stage.option.recompute,
                fp8=stage.option.fp8,
                offload=stage.option.offload(layer),
            )
        )
        layer = end
    return Replica(num_samples=microbatches * template.samples, stages=tuple(stages))


def _offset_within(template: Template, node_type: int, node: int, offset: int) -> int:
    """``offset`` counted from the first device that the template takes of the node."""
    return offset - min(s.offset for s in template.placed_slots if (s.slot.node_type, s.node) == (node_type, node))
