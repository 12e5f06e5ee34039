"""Plans that are good whether a ring has all interfaces of a node or one, as long as nobody has measured which."""

import dataclasses

import pytest

from hetero.plan.ir import GradientSyncPlan
from hetero.planner import ring_interfaces
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.plan_cluster import PlanResult, plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.ring_interfaces import RingsWithOneInterface, good_with_either
from hetero.report.tables.planner_result import rings_lines
from hetero.spec.cluster import ClusterSpec, Links, NodeType, RingInterfaces
from hetero.spec.link import Link
from tests.unit.planner.line import score_of
from tests.unit.planner.slow_zones import GRADIENTS_GB, data_parallel, problem

DOMAINS = ((0, 1, 2, 3), (4, 5, 6, 7))


def two_nodes(*, inside_s: float, between_s: float, interfaces: RingInterfaces | None = None) -> ClusterSpec:
    """Two nodes of four devices, each with its interface: the gradients of two models take so many seconds inside, and
    between nodes over one interface."""
    inside = Link(bandwidth_gb_per_s=GRADIENTS_GB / inside_s, latency_us=0.0)
    between = Link(bandwidth_gb_per_s=GRADIENTS_GB / between_s, latency_us=0.0)
    node = NodeType(name="four", device="A100-40", gpus_per_node=4, count=2, nics_per_node=4, inside_node=inside)
    return ClusterSpec(node_types=(node,), links=Links(between_nodes=between, ring_interfaces=interfaces))


def chosen(
    question: Problem, domains: tuple[tuple[int, ...], ...] = ()
) -> tuple[tuple[tuple[int, ...], ...], RingsWithOneInterface | None]:
    start = dataclasses.replace(data_parallel(8), gradient_sync=GradientSyncPlan(domains=domains))
    best, rings = good_with_either(score_of(start, question), (), question, Deadline(30, CountedWork()))
    assert best == score_of(best.plan, question)
    return best.plan.gradient_sync.domains, rings


def test_sums_by_nodes_are_preferred_where_one_interface_would_cost_more_than_they_do() -> None:
    """With four interfaces the flat ring is faster by the two phases inside; with one it takes four times as long."""
    question = problem(two_nodes(inside_s=0.25, between_s=1.0))
    flat, by_nodes = (
        score_of(dataclasses.replace(data_parallel(8), gradient_sync=GradientSyncPlan(domains=domains)), question)
        for domains in ((), DOMAINS)
    )
    assert flat.step_s < by_nodes.step_s
    domains, rings = chosen(question)
    assert domains == DOMAINS
    assert rings is not None
    assert rings.passed_over is not None
    assert rings.step_s == pytest.approx(by_nodes.step_s)
    assert rings.passed_over[0] == pytest.approx(flat.step_s)
    assert rings.passed_over[1] > 1.3 * flat.step_s


def test_no_plan_is_chosen_that_is_worse_than_one_which_it_is_shown_next_to() -> None:
    question = problem(two_nodes(inside_s=0.25, between_s=1.0))
    flat, by_nodes = (
        score_of(dataclasses.replace(data_parallel(8), gradient_sync=GradientSyncPlan(domains=domains)), question)
        for domains in ((), DOMAINS)
    )
    for most, chosen_plan in ((flat.step_s, flat.plan), (by_nodes.step_s, by_nodes.plan)):
        best, rings = good_with_either(flat, [by_nodes], question, Deadline(30, CountedWork()), most=most)
        assert best.plan == chosen_plan
        assert rings is not None


def test_the_best_plan_stays_where_it_is_good_either_way() -> None:
    question = problem(two_nodes(inside_s=0.01, between_s=1.0))
    domains, rings = chosen(question, DOMAINS)
    assert domains == DOMAINS
    assert rings is not None
    assert rings.passed_over is None


def test_every_unlike_plan_is_weighed_wherever_it_stands_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_interfaces, "choose_gradient_sync", lambda shortlist, *_: shortlist.best)
    question = problem(two_nodes(inside_s=0.25, between_s=1.0))
    flat, by_nodes = (
        score_of(dataclasses.replace(data_parallel(8), gradient_sync=GradientSyncPlan(domains=domains)), question)
        for domains in ((), DOMAINS)
    )
    best, _ = good_with_either(flat, [flat] * 20 + [by_nodes], question, Deadline(30, CountedWork()))
    assert best.plan == by_nodes.plan


@pytest.mark.parametrize("interfaces", ["all", "one"])
def test_what_was_measured_leaves_no_question(interfaces: RingInterfaces) -> None:
    assert chosen(problem(two_nodes(inside_s=0.25, between_s=1.0, interfaces=interfaces))) == ((), None)


def test_one_interface_per_node_leaves_no_question() -> None:
    spec = two_nodes(inside_s=0.25, between_s=1.0)
    alone = dataclasses.replace(spec, node_types=(dataclasses.replace(spec.node_types[0], nics_per_node=1),))
    assert chosen(problem(alone)) == ((), None)


def test_without_time_the_plan_stays() -> None:
    question = problem(two_nodes(inside_s=0.25, between_s=1.0))
    start = score_of(data_parallel(8), question)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.planner.ring_interfaces.LEAST_S", 0.0)
        assert good_with_either(start, (), question, Deadline(0.0, CountedWork())) == (start, None)


@pytest.mark.slow
def test_a_plan_says_what_it_owes_to_the_assumption() -> None:
    result = planned_with_rings()
    assert result.rings is not None
    (first, *_) = rings_lines(result.rings)
    assert f"with one, {result.rings.step_s:.4g} s per step" in first
    assert "links.ring_interfaces" in first


def planned_with_rings() -> PlanResult:
    return plan_cluster(problem(two_nodes(inside_s=0.25, between_s=1.0)), deadline=Deadline(2.0, CountedWork()))
