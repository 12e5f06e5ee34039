"""Plans for the nodes that are left, or that have come: made ahead for every single loss, and chosen when it happens.

After a loss three sorts of plans are compared, each simulated, and the fastest that fits is taken: the one that was
made ahead, the present one without the replicas in which a lost node worked, and what the planner finds in a second.
Nothing here runs by itself: the agent calls :func:`plan_for` in the background and puts the answer into its table.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import simulate
from hetero.elastic.node_places import HeldBlocks, PlacedNodes, place_nodes, places_of
from hetero.elastic.planning_problem import NodeCounts, PlanningProblem, present_cluster
from hetero.elastic.records import EpochNode, NodeInfo
from hetero.elastic.stragglers import busy_of_ranks
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Plan, Replica
from hetero.planner.deadline import Deadline
from hetero.planner.improve.passes import improved
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.replica.feasibility import check_model_fits
from hetero.planner.scoring import ScoredPlan, Shortlist, better_of, score_fitted

SOLVE_S = 1.0
"""Seconds in which the planner answers while everybody waits."""

IMPROVE_SHARE = 0.3
"""Of the time for a plan, what improves the plan that it was to start from. A heuristic."""

_LEAST_S = 1e-9
"""Of a profile that says that a pass takes no time at all."""

Origin = Literal["unchanged", "made ahead", "fewer replicas", "solved"]
"""``unchanged``: the present plan, for as many nodes of each type as before."""


@dataclass(frozen=True, kw_only=True)
class NewPlan:
    """The plan of the next epoch.

    step_s: its predicted step.
    kept_s: the predicted step of the present plan on its nodes as what they count now; ``None`` if some of them are
        gone, or without a present plan.
    busy_s: by working rank, the predicted seconds of a step in its own forwards and backwards.
    others: the predicted steps of the plans that were compared with it.
    """

    plan: Plan
    placed: PlacedNodes
    step_s: float
    kept_s: float | None
    busy_s: Mapping[int, float]
    origin: Origin
    others: Mapping[Origin, float]

    def reason(self) -> str:
        """Where it comes from, for people."""
        others = "".join(f", {origin} {step_s:.4g} s" for origin, step_s in self.others.items())
        return f"plan {self.origin}, predicted step {self.step_s:.4g} s{others}"


class PlanTable:
    """Plans by how many nodes of each type are left.

    Nodes of one type are interchangeable, so a cluster of three types has three single losses, whatever its size.
    """

    def __init__(self) -> None:
        self._plans: dict[frozenset[tuple[str, int]], Plan | None] = {}

    def missing(self, counts: NodeCounts) -> list[dict[str, int]]:
        """The single losses of ``counts`` for which nothing was put here yet."""
        return [left for left in single_losses(counts) if not self.knows(left)]

    def knows(self, counts: NodeCounts) -> bool:
        """Whether there is an answer for ``counts``, be it that nothing fits."""
        return _key(counts) in self._plans

    def put(self, counts: NodeCounts, plan: Plan | None) -> None:
        """Keep the answer for ``counts``; ``None`` if no plan fits."""
        self._plans[_key(counts)] = plan

    def get(self, counts: NodeCounts) -> Plan | None:
        """The plan for ``counts``; ``None`` if there is none, or none yet."""
        return self._plans.get(_key(counts))


def single_losses(counts: NodeCounts) -> Iterator[dict[str, int]]:
    """What is left after the loss of one node, for every node type that has one."""
    for lost, count in counts.items():
        if count and sum(counts.values()) > 1:
            yield {name: number - (name == lost) for name, number in counts.items()}


def plan_for(
    problem: PlanningProblem,
    counts: NodeCounts,
    *,
    time_limit_s: float | None = None,
    start_from: Plan | None = None,
) -> Plan:
    """The best plan for ``counts`` that is found in the time limit, by default the launch's.

    Args:
        start_from: a plan for the same counts, to be bettered; the answer is not slower.

    Raises:
        PlanError: the model does not fit on these nodes, and the message names what would be enough; or time ran out.
        ConfigError: a node type, a profile or a link is missing.
    """
    question = problem.on(present_cluster(problem.cluster, counts), time_limit_s=time_limit_s)
    deadline = Deadline(question.time_limit_s)
    start = _scored(start_from, question)
    if start is not None:
        question = dataclasses.replace(question, time_limit_s=question.time_limit_s * (1 - IMPROVE_SHARE))
    try:
        found = plan_cluster(question).scored
    except PlanError as error:
        if start is None:
            raise PlanError(f"{_named(counts)}: {error}{_enough(problem, counts)}") from None
        found = start
    best = better_of(found, start, question) or found
    return improved(Shortlist(best), question, deadline.part(1.0)).plan if start is not None else best.plan


def replan(
    problem: PlanningProblem,
    nodes: Sequence[NodeInfo],
    *,
    present: tuple[Plan, Sequence[EpochNode]] | None,
    table: PlanTable,
    held: HeldBlocks,
    solve_s: float = SOLVE_S,
) -> NewPlan:
    """Choose the plan for ``nodes`` and the place of each of them.

    As many nodes of each type as before keep their plan.

    Args:
        present: the plan of the epoch that ends, and its nodes; ``None`` at the start of a run.
        held: what each node has copies of, of the step that is restored.

    Raises:
        PlanError: the model does not fit on these nodes; the message names what would be enough.
        ConfigError: a node is of no type of the cluster file, or a profile or a link is missing.
    """
    counts = problem.counts_of(nodes)
    question = problem.on(present_cluster(problem.cluster, counts), time_limit_s=solve_s)
    candidates: dict[Origin, ScoredPlan] = {}
    if present is not None and problem.counts_of(each.node for each in present[1]) == counts:
        candidates = _those_that_fit({"unchanged": present[0]}, question)
    if not candidates:
        known: dict[Origin, Plan | None] = {"made ahead": table.get(counts)}
        if present is not None:
            known["fewer replicas"] = with_replicas_left(problem, *present, nodes)
        candidates = _those_that_fit(known, question)
        candidates |= _solved(problem, counts, question, candidates)
    origin = min(candidates, key=lambda each: candidates[each].step_s)
    best = candidates.pop(origin)
    return NewPlan(
        plan=best.plan,
        placed=place_nodes(problem.trained(best.plan), problem, nodes, held),
        step_s=best.step_s,
        kept_s=None if present is None else kept_step_s(problem, *present, nodes),
        busy_s=busy_of_ranks(best.simulation),
        origin=origin,
        others={each: scored.step_s for each, scored in candidates.items()},
    )


def predicted_step_s(
    problem: PlanningProblem, nodes: Sequence[NodeInfo], table: PlanTable, *, solve_s: float = SOLVE_S
) -> float | None:
    """Seconds of a step on these nodes under the plan of the table, ``None`` where the model does not fit them.

    Where the table has no answer yet, the planner gives one in ``solve_s``, which stays there.

    Raises:
        ConfigError: a node is of no type of the cluster file, or a profile or a link is missing.
    """
    counts = problem.counts_of(nodes)
    if not table.knows(counts):
        try:
            table.put(counts, plan_for(problem, counts, time_limit_s=solve_s))
        except PlanError:
            table.put(counts, None)
    scored = _scored(table.get(counts), problem.on(present_cluster(problem.cluster, counts)))
    return None if scored is None else scored.step_s


def kept_step_s(
    problem: PlanningProblem, plan: Plan, before: Sequence[EpochNode], nodes: Sequence[NodeInfo]
) -> float | None:
    """Seconds of a step if the plan stays where it is, though some of its nodes count as slower or faster ones now.

    A stage takes as long as on the slowest of its nodes.

    Args:
        before: the nodes that ``plan`` runs on.

    Returns:
        ``None`` if ``nodes`` has not all of them.
    """
    types = {each.name: each for each in problem.cluster.node_types}
    now = {node.name: types[node.node_type] for node in nodes}
    if any(each.node.name not in now for each in before):
        return None
    of_rank = {rank: now[each.node.name] for each in before for rank in each.ranks}
    slowest = functools.partial(max, key=lambda node_type: problem.slower_types.get(node_type.name, 1.0))
    replicas = tuple(
        replica.with_each_stage(device=[slowest([of_rank[k] for k in s.ranks]).device for s in replica.stages])
        for replica in plan.replicas
    )
    counts = problem.counts_of(each.node for each in before)
    where = present_cluster(problem.cluster, counts)
    both = present_cluster(problem.cluster, {**problem.counts_of(nodes), **{t: n for t, n in counts.items() if n}})
    slowed = dataclasses.replace(plan, replicas=replicas, devices=problem.cluster.devices)
    return simulate(slowed, Topology(where), problem.on(both).costs).step_s


def with_replicas_left(
    problem: PlanningProblem, plan: Plan, before: Sequence[EpochNode], nodes: Sequence[NodeInfo]
) -> Plan | None:
    """The plan without the replicas in which a node works that is gone; the others take their samples.

    What is left of such replicas idles, and so do nodes that are new.

    Args:
        before: the nodes that ``plan`` has run on, of which ``nodes`` are left.

    Returns:
        ``None`` if no replica is whole, or their microbatches cannot add up to the batch.
    """
    counts = problem.counts_of(nodes)
    by_name = {node.name: node for node in nodes}
    renumbered = _renumbered(problem, before, nodes)
    whole = [
        r
        for r, replica in enumerate(plan.replicas)
        if all(rank in renumbered for stage in replica.stages for rank in stage.ranks)
    ]
    if not whole or len(by_name) != len(nodes):
        return None
    old = problem.on(present_cluster(problem.cluster, problem.counts_of(each.node for each in before)))
    if (scored := _scored(plan, old)) is None:
        return None
    shares = _share_samples([_ReplicaPace.of(scored, r) for r in whole], plan.global_batch_size)
    if shares is None:
        return None
    replicas = tuple(
        dataclasses.replace(_on_other_ranks(plan.replicas[r], renumbered), num_samples=samples)
        for r, samples in zip(whole, shares, strict=True)
    )
    domains = tuple(
        left
        for domain in plan.gradient_sync.domains
        if (left := tuple(renumbered[k] for k in domain if k in renumbered))
    )
    working = {rank for replica in replicas for stage in replica.stages for rank in stage.ranks}
    every = [rank for ranks in places_of(problem, counts).values() for place in ranks for rank in place]
    return dataclasses.replace(
        plan,
        replicas=replicas,
        idle_ranks=tuple(rank for rank in every if rank not in working),
        gradient_sync=dataclasses.replace(plan.gradient_sync, domains=tuple(filter(None, domains))),
    )


def _key(counts: NodeCounts) -> frozenset[tuple[str, int]]:
    return frozenset((name, count) for name, count in counts.items() if count)


def _named(counts: NodeCounts) -> str:
    return "with " + ", ".join(f"{count} x {name}" for name, count in counts.items() if count)


def _enough(problem: PlanningProblem, counts: NodeCounts) -> str:
    """Of each node type of the cluster file the fewest more nodes with which the model fits, for a message.

    Empty if it fits as it is, and more time is what is missing.
    """
    if _may_fit(problem, counts):
        return ""
    enough = []
    for node_type in problem.cluster.node_types:
        if node_type.name in problem.slower_types:
            continue
        there = counts.get(node_type.name, 0)
        for more in range(1, node_type.count - there + 1):
            if _may_fit(problem, {**counts, node_type.name: there + more}):
                enough.append(f"{more} more of type {node_type.name}")
                break
    return (
        f"; enough would be {' or '.join(enough)}" if enough else "; no one type of the cluster file has enough nodes"
    )


def _may_fit(problem: PlanningProblem, counts: NodeCounts) -> bool:
    """Whether the pipeline of least memory fits."""
    try:
        check_model_fits(problem.on(present_cluster(problem.cluster, counts)))
    except PlanError:
        return False
    return True


def _scored(plan: Plan | None, question: Problem) -> ScoredPlan | None:
    """``None`` if it is no plan for these nodes, or does not fit."""
    if plan is None:
        return None
    try:
        return score_fitted(plan, question)
    except (PlanError, ConfigError):
        return None  # What a former cluster allowed need not be legal here, such as a tp group on one node.


def _those_that_fit(plans: Mapping[Origin, Plan | None], question: Problem) -> dict[Origin, ScoredPlan]:
    scored = {origin: _scored(plan, question) for origin, plan in plans.items()}
    return {origin: each for origin, each in scored.items() if each is not None}


def _solved(
    problem: PlanningProblem, counts: NodeCounts, question: Problem, known: Mapping[Origin, ScoredPlan]
) -> dict[Origin, ScoredPlan]:
    """The planner's answer; with the launch's time limit where there is no other plan and the short one was too short.

    Raises:
        PlanError: there is no plan at all.
    """
    try:
        plan = plan_for(problem, counts, time_limit_s=question.time_limit_s)
    except PlanError:
        if known:
            return {}
        plan = plan_for(problem, counts)
    return _those_that_fit({"solved": plan}, question)


def _renumbered(problem: PlanningProblem, before: Sequence[EpochNode], nodes: Sequence[NodeInfo]) -> dict[int, int]:
    """The new number of every rank whose node is left: nodes of a type keep their order, new ones come behind."""
    order = {each.node.name: i for i, each in enumerate(before)}
    old_ranks = {each.node.name: each.ranks for each in before}
    old_types = {each.node.name: each.node.node_type for each in before}
    found: dict[int, int] = {}
    for node_type, places in places_of(problem, problem.counts_of(nodes)).items():
        own = [node for node in nodes if node.node_type == node_type]
        own.sort(key=lambda node: (order.get(node.name, len(order)), node.name))
        for node, place in zip(own, places, strict=True):
            if old_types.get(node.name) == node_type:
                found |= dict(zip(old_ranks[node.name], place, strict=True))
    return found


def _on_other_ranks(replica: Replica, numbers: Mapping[int, int]) -> Replica:
    ranks = [tuple(numbers[rank] for rank in stage.ranks) for stage in replica.stages]
    return replica.with_each_stage(ranks=ranks)


@dataclass(frozen=True, slots=True)
class _ReplicaPace:
    """How long a replica takes for so many samples: ``fill_s + samples * sample_s``.

    unit: samples come in multiples of it, which are whole microbatches of all stages.
    """

    fill_s: float
    sample_s: float
    unit: int

    @classmethod
    def of(cls, scored: ScoredPlan, replica: int) -> "_ReplicaPace":
        """A heuristic, from a simulated step: the busiest stage sets the pace, and waits for filling and draining."""
        pipeline = scored.plan.replicas[replica]
        times = [scored.simulation.stages[replica, s] for s in range(len(pipeline.stages))]
        busiest = max(times, key=lambda each: each.busy_s)
        return cls(
            busiest.bubble_s,
            max(busiest.busy_s, _LEAST_S) / pipeline.num_samples,
            math.lcm(*(stage.samples_per_microbatch for stage in pipeline.stages)),
        )


def _share_samples(paces: Sequence[_ReplicaPace], batch: int) -> list[int] | None:
    """Samples of each replica, one unit at least, so that the last ends as early as a bisection finds.

    Returns:
        ``None`` if units cannot add up to ``batch``.
    """

    def most(within_s: float) -> list[int]:
        units = [min(batch // pace.unit, int((within_s - pace.fill_s) / (pace.sample_s * pace.unit))) for pace in paces]
        return [max(0, each) for each in units]

    # A unit more than that, as a quotient of the seconds may fall short of the batch by rounding.
    high_s = max(pace.fill_s + pace.sample_s * (batch + pace.unit) for pace in paces)
    best = _adding_up(paces, most(high_s), batch)
    if best is None:
        return None
    low_s = 0.0
    for _ in range(40):
        middle_s = (low_s + high_s) / 2
        found = _adding_up(paces, most(middle_s), batch)
        if found is None:
            low_s = middle_s
        else:
            best, high_s = found, middle_s
    return best


def _adding_up(paces: Sequence[_ReplicaPace], most: Sequence[int], batch: int) -> list[int] | None:
    """Samples of each, between one unit and ``most`` units, that add up to ``batch``; ``None`` if none do."""
    if not all(most):
        return None
    # Bit n of a row: the replicas up to there can take n samples together.
    rows = [1]
    for pace, limit in zip(paces, most, strict=True):
        row, left, width = rows[-1] << pace.unit, limit - 1, 1
        while left > 0:
            taken = min(width, left)
            row |= row << taken * pace.unit
            left, width = left - taken, width * 2
        rows.append(row & ((1 << batch + 1) - 1))
    if not rows[-1] >> batch & 1:
        return None
    samples: list[int] = []
    left = batch
    for i in range(len(paces) - 1, -1, -1):
        unit = paces[i].unit
        taken = next(n for n in range(most[i], 0, -1) if n * unit <= left and rows[i] >> (left - n * unit) & 1)
        samples.append(taken * unit)
        left -= taken * unit
    return samples[::-1]
