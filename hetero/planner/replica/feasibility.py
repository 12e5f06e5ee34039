"""Tells whether any plan can fit, and why not: which resource is short, by how much, and the nearest change that would
help.

That a model does not fit is said only if its pipeline of least memory does not
(:mod:`hetero.planner.replica.least_memory`), which takes no search to find out and no time to speak of. A search that
ends with nothing says whether its time ran out.
"""

import contextlib
import math
from collections.abc import Mapping, Sequence

from hetero.cost.offload.host_rates import can_update
from hetero.errors import ConfigError, PlanError
from hetero.planner.deadline import Deadline, OutOfTime
from hetero.planner.problem import Problem
from hetero.planner.replica.least_memory import (
    BOTH_ENDS,
    EMBEDDING_END,
    FITTING_S,
    HEAD_END,
    Ends,
    LeastMemoryPipeline,
)
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.replica.templates import Template, milli_price
from hetero.units import GIB

NAMES_OF_ENDS: Mapping[Ends, str] = {
    EMBEDDING_END: "embedding",
    HEAD_END: "head",
    BOTH_ENDS: "embedding and the head",
}


def check_problem(problem: Problem) -> None:
    """Raise if no plan is possible, as far as no search is needed to know it.

    Raises:
        PlanError: no device has the precision, or the model does not fit.
        ConfigError: a link is missing, or a device has no profile.
    """
    check_links(problem)
    check_devices(problem, StageOptionTable(problem))
    with contextlib.suppress(OutOfTime):
        check_model_fits(problem, Deadline(FITTING_S))


def check_links(problem: Problem) -> None:
    """Raise unless every two nodes that may have to talk have a link.

    Raises:
        ConfigError: naming the two and the key that is missing.
    """
    for i, node_type in enumerate(problem.node_types):
        if node_type.count > 1:
            problem.cluster.link_between(node_type.first_rank, node_type.first_rank + node_type.gpus_per_node)
        if node_type.gpus_per_node > 1:
            problem.cluster.link_between(node_type.first_rank, node_type.first_rank + 1)
        for other in problem.node_types[i + 1 :]:
            problem.cluster.link_between(node_type.first_rank, other.first_rank)


def check_devices(problem: Problem, stage_options: StageOptionTable) -> None:
    """Raise unless some node type can do the precision, and fp8 if that is asked for, and all that can are profiled.

    Raises:
        PlanError: no device has the precision, or none computes in fp8.
        ConfigError: a device has no profile.
    """
    if not stage_options.usable_node_types:
        names = ", ".join(dict.fromkeys(node_type.device for node_type in problem.node_types))
        raise PlanError(f"planner: no device of this cluster ({names}) has {problem.precision}; choose fp16 or fp32")
    obstacles = {node_type.device: problem.fp8_obstacle_of(node_type.device) for node_type in problem.node_types}
    if problem.fp8 and all(obstacles.values()):
        raise PlanError(f"planner: fp8 is asked for, but {'; '.join(map(str, obstacles.values()))}; leave it out")
    for node_type in stage_options.usable_node_types:
        device, fp8 = node_type.device, problem.fp8 and obstacles[node_type.device] is None
        try:
            problem.costs.layer("block", device=device, tp=1, micro_batch_size=1, fp8=fp8)
        except ConfigError as error:
            raise ConfigError(f"node type {node_type.name!r}: {error}") from None


def check_model_fits(problem: Problem, deadline: Deadline | None = None) -> None:
    """Raise if no plan of whole layers fits, whatever it looks like.

    With a distributed optimizer, as if all ranks shared all of its state.

    Raises:
        PlanError: saying what is short by how much, and what would help.
        OutOfTime: nobody knows by the end of ``deadline``.
    """
    stage_options = StageOptionTable(
        problem, num_gradient_groups=0, optimizer_ways=problem.cluster.num_devices, hosts=problem.most_on_host
    )
    packed = LeastMemoryPipeline(problem, stage_options, deadline)
    total, num_layers = packed.most_layers(), problem.model.num_layers
    if total is None:
        raise PlanError(f"planner: the model does not fit: {_tight_end(problem, packed)}")
    if total < num_layers:
        missing = num_layers - total
        holds = "the cluster and its hosts hold" if problem.offloads else "the cluster holds"
        raise PlanError(
            f"planner: the model does not fit: with one sample per microbatch, one microbatch in flight and "
            f"recomputation where it helps {holds} {total} of {num_layers} layers, memory is short by "
            f"{_gib(stage_options, missing)}; {_remedy(packed, stage_options, missing)}{_hosts_instead(problem)}"
        )


def nothing_found(problem: Problem, templates: Sequence[Template], *, complete: bool) -> PlanError:
    """The error for a search that found no plan, of a problem that may have one.

    complete: no time limit cut the search short.
    """
    if not complete:
        return PlanError(
            f"planner: time ran out: no plan was found within {problem.time_limit_s:g} s, which does not mean that "
            "none fits; raise the time limit (--time-limit, at a launch --hetero-plan-time-limit)"
        )
    if templates and problem.budget_per_hour is not None:
        cheapest = min(milli_price(template, problem) for template in templates) / 1000
        return PlanError(
            f"planner: no plan within a budget of {problem.budget_per_hour:g} per hour; the cheapest replica that "
            f"holds the model costs {cheapest:g} per hour"
        )
    return PlanError(
        "planner: no plan was found, although the search is through. Layer by layer the model may fit, but only just: "
        "add a node, take devices with more memory, shorten the sequence, or write a plan by hand"
        f"{_hosts_instead(problem)}"
    )


def _hosts_instead(problem: Problem) -> str:
    """What would let hosts hold optimizer state, where they do not."""
    if problem.offloads:
        return ""
    lacking = [] if problem.distributed_optimizer else ["--use-distributed-optimizer"]
    lacking += [] if problem.offload == "auto" else ["offload auto"]
    if not any(can_update(node_type) for node_type in problem.cluster.node_types):
        lacking.append("the output of `hetero profile host` in the cluster file")
    return f"; or leave optimizer state to hosts, which takes {' and '.join(lacking)}" if lacking else ""


def _gib(stage_options: StageOptionTable, num_layers: int) -> str:
    """GiB that so many layers take at least."""
    per_layer = min(
        tp * (option.memory.cases[0].per_layer + option.memory.cases[0].per_layer_flight)
        for node_type in stage_options.usable_node_types
        for tp in stage_options.legal_tps(node_type.gpus_per_node)
        for option in stage_options.every(Slot(node_type.index, tp, tp), 1)
    )
    return f"{math.ceil(num_layers * per_layer / GIB)} GiB"


def _remedy(packed: LeastMemoryPipeline, stage_options: StageOptionTable, missing: int) -> str:
    """The fewest nodes of one type that hold the missing layers."""
    options = [
        (math.ceil(missing / packed.layers_of_node(node_type)), node_type)
        for node_type in stage_options.usable_node_types
        if packed.layers_of_node(node_type) > 0
    ]
    if not options:
        return "take devices with more memory, or shorten the sequence"
    count, node_type = min(options, key=lambda option: option[0])
    nodes = "node" if count == 1 else "nodes"
    return f"add {count} {nodes} of type {node_type.name} ({count * node_type.gpus_per_node} {node_type.device})"


def _tight_end(problem: Problem, packed: LeastMemoryPipeline) -> str:
    """Say that there is no place for embedding or head."""
    # The stage of a single layer has both ends.
    ends_of_stages = (EMBEDDING_END, HEAD_END) if problem.model.num_layers > 1 else (BOTH_ENDS,)
    missing = [ends for ends in ends_of_stages if not packed.has_place_for(ends)] or [BOTH_ENDS]
    device, tp, needed, has = packed.closest_stage(missing)
    held = " and the ".join(NAMES_OF_ENDS[ends] for ends in missing)
    return (
        f"no stage of any node type holds the {held} beside a layer "
        f"with {problem.seq_length} tokens; the closest is tp {tp} on {device}, where each device needs "
        f"{needed} bytes ({needed / GIB:.2f} GiB) and has {has} ({has / GIB:.2f} GiB); "
        "shorten the sequence, or take devices with more memory"
    )
