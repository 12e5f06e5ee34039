"""Exchanges in a plan what a stage keeps on its device, and as much of it as the device has room for.

Memory is the memory model's, so that what is exchanged fits, and fills the device as before.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import get_args

from hetero.cost.memory import plan_memory
from hetero.plan.ir import Plan
from hetero.planner.improve.plan_changes import PlanChange
from hetero.planner.improve.stage_residency import Exchange, Kind, StageResidency, exchanges
from hetero.planner.problem import Problem
from hetero.planner.scoring import bytes_over_capacity


def changeable_stages(plan: Plan) -> Iterator[tuple[Sequence[int], int]]:
    """The stages whose residency can be said in blocks, and changed: of replicas that are alike, with all of these."""
    for members in plan.alike():
        for s, stage in enumerate(plan.replicas[members[0]].stages):
            if stage.recompute != "selective" and stage.wgrad_delay is None:
                yield members, s


def exchanged(plan: Plan, members: Sequence[int], s: int, exchange: Exchange, problem: Problem) -> Plan | None:
    """``plan`` with ``exchange`` in stage ``s`` of replicas that are alike; ``None`` where that cannot be."""
    replica = plan.replicas[members[0]]

    def with_residency(residency: StageResidency) -> Plan:
        return plan.with_alike(members, replica.with_stage(s, **residency.fields()))

    def fits(residency: StageResidency) -> bool:
        changed = with_residency(residency)
        return not bytes_over_capacity(changed, problem, plan_memory(changed, problem.costs))

    now = StageResidency.of(replica.stages[s], num_layers=plan.model.num_layers)
    found = now.exchanged(exchange, fits)
    return with_residency(found) if found is not None else None


def residencies(plan: Plan, problem: Problem) -> Iterator[PlanChange]:
    """Changes of plans that leave something to hosts: every exchange, in all replicas that are alike."""
    for members, s in changeable_stages(plan):
        for exchange in exchanges(get_args(Kind)):
            yield partial(_changed, plan, members, s, exchange, problem)


def _changed(plan: Plan, members: Sequence[int], s: int, exchange: Exchange, problem: Problem) -> Plan:
    return exchanged(plan, members, s, exchange, problem) or plan
