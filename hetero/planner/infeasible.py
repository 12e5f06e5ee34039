"""Why there is no plan: which resource is short, by how much, and the nearest change that would fit.

Memory is judged at its thriftiest: one sample per microbatch, one microbatch in flight, full recomputation, the tp
that holds the most layers. What does not fit then fits in no plan.
"""

import math
from collections.abc import Iterator, Sequence

from hetero.errors import ConfigError, PlanError
from hetero.planner.candidates import Candidates, Slot, StageOption
from hetero.planner.constraints import milli_price
from hetero.planner.problem import NodeKind, Problem
from hetero.planner.templates import Template
from hetero.units import GIB


def check_links(problem: Problem) -> None:
    """Raise unless every two nodes that may have to talk have a link.

    Raises:
        ConfigError: naming the two and the key that is missing.
    """
    for i, kind in enumerate(problem.kinds):
        if kind.count > 1:
            problem.cluster.link_between(kind.first_rank, kind.first_rank + kind.gpus_per_node)
        if kind.gpus_per_node > 1:
            problem.cluster.link_between(kind.first_rank, kind.first_rank + 1)
        for other in problem.kinds[i + 1 :]:
            problem.cluster.link_between(kind.first_rank, other.first_rank)


def check_devices(problem: Problem, candidates: Candidates) -> None:
    """Raise unless some kind of node can do the precision, and all that can are profiled.

    Raises:
        PlanError: no device has the precision.
        ConfigError: a device has no profile.
    """
    if not candidates.usable_kinds:
        names = ", ".join(dict.fromkeys(kind.device for kind in problem.kinds))
        raise PlanError(f"planner: no device of this cluster ({names}) has {problem.precision}; choose fp16 or fp32")
    for kind in candidates.usable_kinds:
        try:
            problem.costs.layer("block", device=kind.device, tp=1, micro_batch_size=1)
        except ConfigError as error:
            raise ConfigError(f"node type {kind.name!r}: {error}") from None


def explain(problem: Problem, candidates: Candidates, templates: Sequence[Template]) -> str:
    """The message for a problem without a plan, whose replicas, if there are any, are ``templates``."""
    if templates and problem.budget_per_hour is not None:
        cheapest = min(milli_price(template, problem) for template in templates) / 1000
        return (
            f"planner: no plan within a budget of {problem.budget_per_hour:g} per hour; the cheapest replica that "
            f"holds the model costs {cheapest:g} per hour"
        )
    num_layers = problem.model.num_layers
    held = {kind.index: layers_per_node(kind, candidates) for kind in candidates.usable_kinds}
    total = sum(kind.count * held[kind.index] for kind in candidates.usable_kinds)
    if total < num_layers:
        missing = num_layers - total
        return (
            f"planner: the model does not fit: with full recomputation and one sample per microbatch the cluster holds "
            f"{total} of {num_layers} layers, memory is short by {_gib(problem, candidates, missing)}; "
            + _remedy(problem, candidates, held, missing)
        )
    return (
        "planner: the model does not fit: the cluster holds its layers, but no stage of any node type holds the "
        f"{_tight_end(candidates)} beside a layer; shorten the sequence of {problem.seq_length} tokens, or add nodes "
        "with more memory per device"
    )


def layers_per_node(kind: NodeKind, candidates: Candidates) -> int:
    """The most layers that one node of ``kind`` holds, all its devices together, embedding and head left aside."""
    return max(
        (
            kind.gpus_per_node // tp * option.most_layers(1, first=False, last=False)
            for tp, option in _thrifty(kind, candidates)
        ),
        default=0,
    )


def _thrifty(kind: NodeKind, candidates: Candidates) -> Iterator[tuple[int, StageOption]]:
    for tp in candidates.degrees(kind.gpus_per_node):
        yield tp, candidates.option(Slot(kind.index, tp, tp), 1, "full")


def _gib(problem: Problem, candidates: Candidates, num_layers: int) -> str:
    per_layer = min(
        tp * (option.memory.cases[0].per_layer + option.memory.cases[0].per_layer_flight)
        for kind in candidates.usable_kinds
        for tp, option in _thrifty(kind, candidates)
    )
    return f"{num_layers * per_layer / GIB:.0f} GiB"


def _remedy(problem: Problem, candidates: Candidates, held: dict[int, int], missing: int) -> str:
    """Fewest nodes of one type first; shorter sequences where no device holds even one layer."""
    options = [
        (math.ceil(missing / held[kind.index]), kind) for kind in candidates.usable_kinds if held[kind.index] > 0
    ]
    if not options:
        return (
            f"no device holds a single layer with {problem.seq_length} tokens: shorten the sequence, or take devices "
            "with more memory"
        )
    count, kind = min(options, key=lambda option: option[0])
    nodes = "node" if count == 1 else "nodes"
    return f"add {count} {nodes} of type {kind.name} ({count * kind.gpus_per_node} {kind.device})"


def _tight_end(candidates: Candidates) -> str:
    head = any(
        option.fits(1, 1, first=False, last=True)
        for kind in candidates.usable_kinds
        for _, option in _thrifty(kind, candidates)
    )
    return "embedding" if head else "head"
