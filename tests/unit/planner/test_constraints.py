"""Each constraint of the master problem alone: covers it allows, covers it forbids."""

import dataclasses
import inspect
from collections.abc import Sequence

from ortools.sat.python import cp_model

from hetero.planner.cover import constraints
from hetero.planner.cover.constraints import (
    Constraint,
    Limits,
    budget_is_kept,
    devices_are_there,
    holders_are_present,
    layer_range_variables,
    layers_sync_at_their_slowest_link,
    replicas_finish_in_time,
    samples_add_up,
    sync_stays_within_its_limit,
    used_means_at_least_one,
)
from hetero.planner.cover.cover import Copies, sync_s
from hetero.planner.cover.sync_tiers import SyncTiers
from hetero.planner.cover.variables import Column, ColumnVars, MasterVars
from hetero.planner.problem import Problem
from hetero.planner.replica.stage_options import StageOptionTable
from hetero.planner.replica.templates import StageBlock, Template, TemplateFactory
from hetero.spec.cluster import ClusterSpec
from tests.unit.planner.clusters import OPT_350M, cluster, problem

TWO_AND_FOUR = cluster(("A100-40", 4, 2), ("V100-16", 4, 4))
QUESTION = problem(TWO_AND_FOUR, OPT_350M, 64)


def template(*blocks: StageBlock, samples: int = 4, question: Problem = QUESTION) -> Template:
    built = TemplateFactory(question, StageOptionTable(question)).build(blocks, samples)
    assert built is not None
    return built


FAST = template(StageBlock(0, 1, 4, 1))
"""One A100 node, four samples per microbatch."""

MIXED = template(StageBlock(1, 3, 4, 1), StageBlock(0, 1, 4, 1))
"""Three V100 nodes before one A100 node."""


def allowed(
    constraints: Sequence[Constraint],
    uses: Sequence[tuple[Template, int, int]],
    *,
    question: Problem = QUESTION,
    most_microbatches: int = 16,
    limit_s: float | None = None,
) -> bool:
    """Fix (template, replicas, microbatches) and ask whether the constraints allow it."""
    model = cp_model.CpModel()
    columns = tuple(ColumnVars(model, i, Column(t, 9, most_microbatches)) for i, (t, _, _) in enumerate(uses))
    sync_tiers = SyncTiers(question)
    master = MasterVars(columns, layer_range_variables(model, [t for t, _, _ in uses], question, sync_tiers))
    for constraint in constraints:
        constraint(model, master, Limits(problem=question, sync_tiers=sync_tiers, sync_s=limit_s))
    for column, (_, replicas, microbatches) in zip(columns, uses, strict=True):
        model.add(column.replicas == replicas)
        model.add(column.microbatches == microbatches)
        model.add(column.used == int(replicas > 0))
    return cp_model.CpSolver().solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def test_no_constraint_is_forgotten() -> None:
    """Each function of the module that constrains a model is in the list that the search goes by."""
    defined = [
        value
        for value in vars(constraints).values()
        if inspect.isfunction(value) and list(inspect.signature(value).parameters) == ["model", "master", "limits"]
    ]
    assert sorted(each.__name__ for each in defined) == sorted(each.__name__ for each in constraints.CONSTRAINTS)
    assert len(defined) > 5


def test_devices_are_there() -> None:
    assert allowed([devices_are_there], [(FAST, 2, 8)])
    assert not allowed([devices_are_there], [(FAST, 3, 8)])
    assert allowed([devices_are_there], [(FAST, 1, 8), (MIXED, 1, 8)])
    assert not allowed([devices_are_there], [(FAST, 2, 8), (MIXED, 1, 8)])


def test_used_means_at_least_one() -> None:
    def with_flag(replicas: int, used: int) -> bool:
        model = cp_model.CpModel()
        column = ColumnVars(model, 0, Column(FAST, 9, 9))
        used_means_at_least_one(
            model, MasterVars((column,), ()), Limits(problem=QUESTION, sync_tiers=SyncTiers(QUESTION), sync_s=None)
        )
        model.add(column.replicas == replicas)
        model.add(column.used == used)
        return cp_model.CpSolver().solve(model) == cp_model.OPTIMAL

    assert with_flag(0, 0)
    assert with_flag(2, 1)
    assert not with_flag(0, 1)
    assert not with_flag(2, 0)


def test_replicas_finish_in_time() -> None:
    assert allowed([replicas_finish_in_time], [(FAST, 2, 32)])
    assert not allowed([replicas_finish_in_time], [(FAST, 2, 33)])
    assert not allowed([replicas_finish_in_time], [(FAST, 2, 1)])  # One copy would have nothing to do.


def test_samples_add_up() -> None:
    assert allowed([samples_add_up], [(FAST, 2, 10), (MIXED, 1, 6)])
    assert not allowed([samples_add_up], [(FAST, 2, 10), (MIXED, 1, 5)])


def priced(budget: float) -> Problem:
    types = tuple(dataclasses.replace(t, price_per_hour=12.5) for t in TWO_AND_FOUR.node_types)
    spec = ClusterSpec(node_types=types, links=TWO_AND_FOUR.links)
    return problem(spec, OPT_350M, 64, budget_per_hour=budget)


def test_budget_is_kept() -> None:
    assert allowed([budget_is_kept], [(FAST, 2, 8)], question=priced(25))
    assert not allowed([budget_is_kept], [(FAST, 2, 8)], question=priced(24.9))
    assert allowed([budget_is_kept], [(MIXED, 1, 8)], question=priced(50))
    assert not allowed([budget_is_kept], [(MIXED, 1, 8)], question=priced(49.9))


SYNC = [
    used_means_at_least_one,
    holders_are_present,
    layers_sync_at_their_slowest_link,
    sync_stays_within_its_limit,
]
"""They speak of one thing: what the sums between nodes cost."""


def seconds(*uses: tuple[Template, int]) -> float:
    return sync_s([Copies(t, n, n) for t, n in uses], QUESTION, SyncTiers(QUESTION))


def test_sync_stays_within_its_limit_for_copies_of_one_template() -> None:
    exact = seconds((FAST, 2))
    assert allowed(SYNC, [(FAST, 2, 8)], limit_s=exact * 1.001)
    assert not allowed(SYNC, [(FAST, 2, 8)], limit_s=exact * 0.999)


def test_sync_stays_within_its_limit_when_kinds_share_layers() -> None:
    exact = seconds((FAST, 1), (MIXED, 1))
    assert allowed(SYNC, [(FAST, 1, 8), (MIXED, 1, 8)], limit_s=exact * 1.001)
    assert not allowed(SYNC, [(FAST, 1, 8), (MIXED, 1, 8)], limit_s=exact * 0.999)


def test_a_replica_alone_sums_inside_its_nodes() -> None:
    assert seconds((FAST, 1)) < 0.1 * seconds((FAST, 2))
    assert allowed(SYNC, [(FAST, 1, 8)], limit_s=seconds((FAST, 1)) * 1.001)


def test_tied_embeddings_join_first_and_last_stage_of_one_replica() -> None:
    """The mixed replica holds them on V100 and on A100: a ring between nodes, even if it is alone."""
    sync_tiers = SyncTiers(QUESTION)
    s_per_byte = sync_tiers.tiers[sync_tiers.tier_between(0, 1) or 0]
    assert seconds((MIXED, 1)) >= sync_tiers.word_embedding_bytes * s_per_byte
