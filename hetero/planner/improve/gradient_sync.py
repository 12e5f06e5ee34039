"""Chooses how a plan sums its gradients: over all holders at once or hierarchically, and in buckets of what size.

Domains are the nodes or the zones of the cluster. Sums inside domains first spare a slow link bytes and latency, and
cost two more phases inside; small buckets end soon after the last backward, large ones pay a link's latency less often.
The simulator chooses: first among domains, then, with these, among a few bucket sizes, which is a heuristic.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator

from hetero.cost.memory import plan_memory
from hetero.cost.simulation.simulator import with_gradient_sync
from hetero.plan.ir import GradientSyncPlan, Plan, Ranks
from hetero.planner.deadline import Deadline
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, bytes_over_capacity, is_better, is_legal, scoring_s

BUCKET_NUMELS = (5_000_000, 10_000_000, 20_000_000, 80_000_000, 160_000_000, 320_000_000)
"""Beside that of the runtime itself."""

SUMS_SHARE = 0.5
"""Of the time of a whole replay, for the sums alone: who has what when is collected from all of its spans. Where
weights are gathered, everything is replayed."""


def choose_gradient_sync(shortlist: Shortlist, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """The best plan with the domains, and with these the bucket size, that make its step shortest.

    As it is on one node, if no gradient sum shows in its step, or if nothing shortens it before ``deadline`` is over.
    """
    best = choose_domains(shortlist.best, problem, deadline)
    for numel in BUCKET_NUMELS if _could_be_shorter(best, problem) else ():
        best = _better(best, dataclasses.replace(best.plan.gradient_sync, bucket_numel=numel), problem, deadline)
    return best


def choose_domains(best: ScoredPlan, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """``best`` with the domains that make its step shortest, under the same conditions."""
    if deadline.is_over():
        return best
    for domains in domains_of(best.plan, problem) if _could_be_shorter(best, problem) else ():
        best = _better(best, dataclasses.replace(best.plan.gradient_sync, domains=domains), problem, deadline)
    return best


def _could_be_shorter(best: ScoredPlan, problem: Problem) -> bool:
    """Whether gradient sums between nodes show in the step."""
    nodes = {problem.topology.node(rank) for _, _, stage in best.plan.stages() for rank in stage.ranks}
    summed_s = max((sync.end_s for sync in best.simulation.syncs), default=0.0)
    # The first forwards wait for what is gathered.
    shows = summed_s > best.simulation.compute_end_s or any(gather.end_s > 0 for gather in best.simulation.gathers)
    return len(nodes) > 1 and shows


def _better(best: ScoredPlan, sync: GradientSyncPlan, problem: Problem, deadline: Deadline) -> ScoredPlan:
    """``best``, or the same plan with ``sync`` if that is better and fits."""
    share = 1.0 if best.simulation.gathers else SUMS_SHARE
    if deadline.is_over() or sync == best.plan.gradient_sync or not deadline.has(share * scoring_s(best.plan)):
        return best
    if not is_legal(dataclasses.replace(best.plan, gradient_sync=sync)):
        return best  # Domains put ranks into more communicators.
    simulation = with_gradient_sync(best.simulation, sync, problem.topology, problem.costs)
    changed = dataclasses.replace(best, plan=simulation.plan, simulation=simulation)
    if not is_better(changed, best, problem):
        return best
    if sync.domains == best.plan.gradient_sync.domains:
        return changed  # Only the communicators take memory.
    memory = plan_memory(changed.plan, problem.costs)
    if bytes_over_capacity(changed.plan, problem, memory):
        return best
    return dataclasses.replace(changed, memory=memory)


def domains_of(plan: Plan, problem: Problem) -> Iterator[tuple[Ranks, ...]]:
    """The working ranks by node and by zone, as far as that makes several domains, and one of several ranks."""
    for found in (_by(problem.topology.node, plan), _by(problem.topology.zone, plan)):
        if 1 < len(found) < sum(map(len, found)):
            yield found


def _by(place_of: Callable[[int], Hashable], plan: Plan) -> tuple[Ranks, ...]:
    """The working ranks by the place that they are in."""
    found: dict[Hashable, list[int]] = {}
    for rank in sorted(set(plan.ranks()).difference(plan.idle_ranks)):
        found.setdefault(place_of(rank), []).append(rank)
    return tuple(map(tuple, found.values()))


def with_domains_of_working(plan: Plan, problem: Problem) -> Plan:
    """``plan`` with all ranks in its domains that work by now: by node where its domains are parts of nodes, else by
    zone."""
    domains = plan.gradient_sync.domains
    held = {rank for ranks in domains for rank in ranks}
    if not domains or held.issuperset(rank for _, _, stage in plan.stages() for rank in stage.ranks):
        return plan
    node, zone = problem.topology.node, problem.topology.zone
    inside = all(len({node(rank) for rank in ranks}) == 1 for ranks in domains)
    sync = dataclasses.replace(plan.gradient_sync, domains=_by(node if inside else zone, plan))
    return dataclasses.replace(plan, gradient_sync=sync)
