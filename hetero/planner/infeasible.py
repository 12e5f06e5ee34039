"""Why there is no plan: which resource is short, by how much, and the nearest change that would fit.

That a model does not fit is said only if its thriftiest pipeline does not (:mod:`hetero.planner.thriftiest`), which
takes no search to find out and no time to speak of. A search that ends with nothing says whether its time ran out.
"""

import math
from collections.abc import Sequence

from hetero.errors import ConfigError, PlanError
from hetero.planner.candidates import Candidates, Slot
from hetero.planner.constraints import milli_price
from hetero.planner.problem import Problem
from hetero.planner.templates import Template
from hetero.planner.thriftiest import EMBEDDING, HEAD, Thriftiest
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


def check_model_fits(problem: Problem) -> None:
    """Raise if no plan of whole layers fits, whatever it looks like.

    With a distributed optimizer, as if all ranks shared all of its state.

    Raises:
        PlanError: saying what is short by how much, and what would help.
    """
    candidates = Candidates(problem, num_gradient_groups=0, optimizer_ways=problem.cluster.num_devices)
    thriftiest = Thriftiest(problem, candidates)
    total, num_layers = thriftiest.most_layers(), problem.model.num_layers
    if total is None:
        raise PlanError(f"planner: the model does not fit: {_tight_end(problem, thriftiest)}")
    if total < num_layers:
        missing = num_layers - total
        raise PlanError(
            f"planner: the model does not fit: with one sample per microbatch, one microbatch in flight and "
            f"recomputation where it helps the cluster holds {total} of {num_layers} layers, memory is short by "
            f"{_gib(candidates, missing)}; {_remedy(thriftiest, candidates, missing)}"
        )


def nothing_found(problem: Problem, templates: Sequence[Template], *, complete: bool) -> PlanError:
    """What to raise where a search found no plan, of a problem that may have one.

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
    )


def _gib(candidates: Candidates, num_layers: int) -> str:
    per_layer = min(
        tp * (option.memory.cases[0].per_layer + option.memory.cases[0].per_layer_flight)
        for kind in candidates.usable_kinds
        for tp in candidates.legal_tps(kind.gpus_per_node)
        for option in (candidates.option(Slot(kind.index, tp, tp), 1, "full"),)
    )
    return f"{math.ceil(num_layers * per_layer / GIB)} GiB"


def _remedy(thriftiest: Thriftiest, candidates: Candidates, missing: int) -> str:
    """Fewest nodes of one type."""
    options = [
        (math.ceil(missing / thriftiest.layers_of_node(kind)), kind)
        for kind in candidates.usable_kinds
        if thriftiest.layers_of_node(kind) > 0
    ]
    if not options:
        return "take devices with more memory, or shorten the sequence"
    count, kind = min(options, key=lambda option: option[0])
    nodes = "node" if count == 1 else "nodes"
    return f"add {count} {nodes} of type {kind.name} ({count * kind.gpus_per_node} {kind.device})"


def _tight_end(problem: Problem, thriftiest: Thriftiest) -> str:
    """There is no place for embedding and head."""
    missing = [end for end, ends in (("embedding", EMBEDDING), ("head", HEAD)) if not thriftiest.has_place_for(ends)]
    return (
        f"no stage of any node type holds the {' and the '.join(missing) or 'embedding and the head'} beside a layer "
        f"with {problem.seq_length} tokens; shorten the sequence, or take devices with more memory"
    )
