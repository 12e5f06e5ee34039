"""The search among whole plans: all kinds of changes, the same plan for the same effort, and little left to find."""

import dataclasses
import random
from functools import cache, partial
from typing import Any

import pytest

from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import GradientSyncPlan, Plan, Replica
from hetero.plan.offload import Offload
from hetero.plan.validate import least_in_flight, validate
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve import whole_plans
from hetero.planner.improve.climbs import LAST, ChangeOrder, Climb, Climbs
from hetero.planner.improve.dealt_plans import DealtPlans
from hetero.planner.improve.division import Divider
from hetero.planner.improve.gradient_sync import with_domains_of_working
from hetero.planner.improve.interleaving import interleavings
from hetero.planner.improve.plan_changes import (
    PlanChange,
    PlanFamily,
    aligned,
    exchanges,
    families,
    idle_devices,
    interleaved_layers_by_rules,
    layers_by_rules,
)
from hetero.planner.improve.recompositions import Recomposer
from hetero.planner.improve.replica_changes import (
    Slack,
    barely_deep,
    delays,
    depths,
    evenly_deep,
    one_layer_more_recomputed,
)
from hetero.planner.improve.structure_changes import apart, side_by_side, structures
from hetero.planner.improve.whole_plans import WholePlansSearch, search_whole_plans
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.scoring import ScoredPlan, Shortlist, goal_value
from hetero.spec.cluster import ClusterSpec, Links, NodePair
from hetero.spec.link import Link
from tests.bench.bench_search_over_plans import search
from tests.helpers.plans import plan, replica, stage
from tests.unit.planner import few_layers, unlike_devices
from tests.unit.planner.clusters import OPT_350M, cluster, problem
from tests.unit.planner.line import score_of

FAMILIES = families()

STRUCTURES = structures(Divider(unlike_devices.mixed_problem(gpus_per_node=(6, 3))))


def is_legal(changed: Plan) -> bool:
    try:
        validate(changed)
    except (PlanError, ConfigError):
        return False
    return True


@cache
def unlike_replicas() -> tuple[Problem, Plan]:
    """Two alike pipelines, one of data-parallel stages of two device types, and an idle device."""
    question = unlike_devices.mixed_problem(gpus_per_node=(6, 3))
    alike = [
        replica(
            stage(layers=(0, 4), ranks=(r,), device="A100-40"),
            stage(layers=(4, 8), ranks=(r + 1,), device="A100-40"),
            num_samples=2,
        )
        for r in (0, 2)
    ]
    other = replica(
        stage(layers=(0, 4), ranks=(6, 7), dp=2, device="V100-16"),
        stage(layers=(4, 8), ranks=(4, 5), dp=2, device="A100-40"),
        num_samples=4,
    )
    return question, dataclasses.replace(plan(question.model, [*alike, other], idle_ranks=(8,)), seq_length=16)


def name_of(family: PlanFamily) -> str:
    while isinstance(family, partial) and callable(family.args[-1]):
        family = family.args[-1]
    function = family.func if isinstance(family, partial) else family
    return str(getattr(function, "__name__", "?"))


OF_FEW_PLANS = aligned, interleaved_layers_by_rules


@pytest.mark.parametrize(
    "family", [*(each for each in FAMILIES if each not in OF_FEW_PLANS), layers_by_rules, *STRUCTURES[:-1]], ids=name_of
)
def test_every_kind_of_change_makes_other_legal_plans(family: PlanFamily) -> None:
    question, start = unlike_replicas()
    changed = [change() for change in family(start, question)]
    legal = [each for each in changed if is_legal(each) and each != start]
    assert legal
    assert all(sorted(each.ranks()) == sorted(start.ranks()) for each in changed), "no device is lost"


def test_replicas_on_equal_devices_become_alike() -> None:
    question, start = unlike_replicas()
    assert not list(aligned(start, question))
    other = start.with_replica(1, start.replicas[1].with_layers_moved(0, 1, 1))
    assert len(other.alike()) == 3
    found = {change() for change in aligned(other, question)}
    assert start in found
    assert all(is_legal(each) and len(each.alike()) == 2 for each in found)


def test_alike_replicas_become_one_with_the_ranks_of_all_and_apart_again() -> None:
    question, start = unlike_replicas()
    (together,) = {change() for change in side_by_side(start, question)}
    assert [[stage.ranks for stage in each.stages] for each in together.replicas] == [
        [(0, 2), (1, 3)],
        [(6, 7), (4, 5)],
    ]
    assert [(each.stages[0].dp, each.num_samples) for each in together.replicas] == [(2, 4), (2, 4)]
    found = {change() for change in apart(together, question)}
    assert all(is_legal(each) for each in (together, *found))
    assert any({each.stages for each in back.replicas} == {each.stages for each in start.replicas} for back in found)


def test_a_device_that_begins_to_work_comes_into_a_domain() -> None:
    question, start = unlike_replicas()
    node = question.topology.node
    working = tuple(tuple(rank for rank in range(8) if node(rank) == each) for each in (0, 1))
    start = dataclasses.replace(start, gradient_sync=GradientSyncPlan(domains=working))
    assert is_legal(start)
    assert with_domains_of_working(start, question) == start
    changed = [change() for change in idle_devices(start, question)]
    at_work = [each for each in changed if not each.idle_ranks]
    assert at_work
    assert not any(is_legal(each) for each in at_work)
    found = [with_domains_of_working(each, question) for each in at_work]
    assert any(is_legal(each) for each in found)
    assert all(each.gradient_sync.domains == ((0, 1, 2, 3, 4, 5), (6, 7, 8)) for each in found)
    divided = [Divider(question).settled(each, [0], per_stage=2) for each in at_work]
    assert any(each is not None and is_legal(each) for each in divided)


def test_stages_that_change_places_take_the_layers_that_were_there() -> None:
    question, start = unlike_replicas()
    start = start.with_replicas({r: start.replicas[r].with_layers_moved(0, 1, 1 + r) for r in (0, 2)})
    found = [change() for change in exchanges(start, question)]
    assert found
    for changed in found:
        for before, after in zip(start.replicas, changed.replicas, strict=True):
            assert [(each.start, each.end) for each in after.stages] == [
                (each.start, each.end) for each in before.stages
            ]


def test_all_delays_change_beside_a_stage_that_may_have_none() -> None:
    """One keeps its activations on the host, where nothing may wait for its weights' gradients."""
    question, start = unlike_replicas()
    pipeline = start.replicas[0].with_stage(0, offload=Offload(activations_until=1))
    found = [change() for change in delays(pipeline, question)]
    assert {stage.wgrad_delay for each in found for stage in each.stages[:1]} == {None}
    assert {stage.wgrad_delay for each in found for stage in each.stages[1:]} > {None, 0, 1}


def unlike_microbatches(num_samples: int = 48) -> Replica:
    """Stages with four, one and two samples in a microbatch."""
    return replica(
        stage(layers=(0, 4), ranks=(0,), mbs=4, depth=2, device="A100-40"),
        stage(layers=(4, 6), ranks=(1,), depth=4, device="A100-40"),
        stage(layers=(6, 8), ranks=(2, 3), dp=2, device="A100-40"),
        num_samples=num_samples,
    )


def test_depths_by_rule_count_what_the_stages_behind_hold() -> None:
    """By hand: u = 4, 1, 2, and max(u_i, u_i+1) = 4, 2. So with one per stage 4 + 6, 1 + 2 and 2 samples."""
    assert [each.in_flight for each in evenly_deep(unlike_microbatches(), 1).stages] == [3, 3, 1]
    assert [each.in_flight for each in evenly_deep(unlike_microbatches(), 2).stages] == [4, 5, 1]
    few = evenly_deep(unlike_microbatches(8), 3)
    assert [each.in_flight for each in few.stages] == [2, 7, 1], "no more than there are"


def test_barely_deep_is_the_least_and_a_slack_by_what_comes_behind() -> None:
    """By hand: u = 4, 1, 2, of which (2 + 1.5) / 1 is 4, and ((4 - 1) 1 + 4 + 2) / 4 is 3."""
    slack = Slack(equal=1.5, larger=0.75, smaller=0.5)
    assert [each.in_flight for each in barely_deep(unlike_microbatches(), slack).stages] == [3, 4, 1]
    more = Slack(equal=0.0, larger=1.5, smaller=2.0)
    assert [each.in_flight for each in barely_deep(unlike_microbatches(), more).stages] == [4, 5, 1]
    equal = unlike_microbatches().with_each_stage(micro_batch_size=[4, 4, 2])
    assert [each.in_flight for each in barely_deep(equal, slack).stages] == [5, 3, 1]
    assert [each.in_flight for each in barely_deep(unlike_microbatches(8), more).stages] == [2, 5, 1], "and no more"
    none = barely_deep(unlike_microbatches(), Slack(equal=0.0, larger=0.0, smaller=0.0))
    assert [each.in_flight for each in none.stages] == [least_in_flight(none, s) for s in range(3)]


def test_weights_gradients_of_a_stage_may_all_come_at_the_end() -> None:
    """On the fastest way to a last stage with more layers: changes by one would be in vain until the last of them."""
    question, start = unlike_replicas()
    pipeline = start.replicas[0]
    found = [change() for change in delays(pipeline, question)]
    for s in range(len(pipeline.stages)):
        assert pipeline.num_microbatches(s) - 1 in {each.stages[s].wgrad_delay for each in found}


def test_depths_of_several_stages_change_by_as_many_samples() -> None:
    """Two more microbatches of the coarsest stage are eight samples, and so two, eight and four of each stage's own."""
    question, _ = unlike_replicas()
    start = unlike_microbatches().with_each_stage(in_flight=[5, 12, 2])
    found = {tuple(each.in_flight for each in change().stages) for change in depths(start, question)}
    assert (5 + 2, 12 + 8, 2 + 4) in found
    assert (5 - 1, 12 - 4, 2) in found, "of all up to one stage"
    assert (5, 12, 2 + 1) in found, "of one stage alone by its own microbatches"


def test_interleaved_stages_become_one_per_device_group() -> None:
    question, start = unlike_replicas()
    chunks = [
        stage(layers=(2 * s, 2 * s + 2), ranks=(s % 2,), device="A100-40", depth=depth)
        for s, depth in enumerate((4, 3, 2, 1))
    ]
    interleaved = dataclasses.replace(start, replicas=(replica(*chunks, num_samples=8),), idle_ranks=tuple(range(2, 9)))
    assert name_of(STRUCTURES[-1]) == "straightened"
    moved = [change() for change in interleaved_layers_by_rules(interleaved, question)]
    assert any(is_legal(each) for each in moved)
    assert all({stage.wgrad_delay for _, _, stage in each.stages()} != {None} for each in moved), "none is left whole"
    assert not list(interleaved_layers_by_rules(start, question))
    (changed,) = [change() for change in STRUCTURES[-1](interleaved, question)]
    assert is_legal(changed)
    assert [each.num_layers for each in changed.replicas[0].stages] == [4, 4]


def test_a_layer_more_is_recomputed_until_all_are() -> None:
    _, start = unlike_replicas()
    counts = []
    found = start.replicas[0]
    while (more := one_layer_more_recomputed(found, 0)) is not None:
        found = more
        counts.append((found.stages[0].recompute, found.stages[0].recompute_num_layers))
    assert counts == [("full", 1), ("full", 2), ("full", 3), ("full", None)]


@cache
def start_of(name: str) -> tuple[Problem, ScoredPlan]:
    if name == "unlike devices":
        question = unlike_devices.mixed_problem()
        return question, score_of(unlike_devices.halves(question), question)
    question = few_layers.question(6, 4)
    return question, score_of(few_layers.pipeline(question, 2, 3, 4), question)


@cache
def found_from(name: str, effort_s: float, seed: int) -> ScoredPlan:
    """What a rung of a second finds, if a limit cuts it off after ``effort_s``."""
    question, start = start_of(name)
    question = dataclasses.replace(question, seed=seed)
    return search_whole_plans(Shortlist(start), question, Deadline(effort_s, CountedWork()).until(1.0))


def test_the_same_seed_and_effort_find_the_same_plan() -> None:
    first = found_from("unlike devices", 0.3, 0)
    found_from.cache_clear()
    assert found_from("unlike devices", 0.3, 0).plan == first.plan


def test_more_effort_is_never_worse() -> None:
    question, start = start_of("unlike devices")
    steps = [goal_value(found_from("unlike devices", effort_s, 1), question) for effort_s in (0.05, 0.1, 0.3, 0.6)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < goal_value(start, question)


def test_a_search_that_was_cut_off_goes_on_with_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dealing nodes anew has its share of the time, also if limits cut turns off; and no leap is begun twice."""
    question, start = start_of("unlike devices")
    going_on, dealing_s, leapt_from = WholePlansSearch(question), [], []
    listed, dealt = WholePlansSearch._leaps_from, DealtPlans.make_more

    def noted(search: WholePlansSearch, begun_with: ScoredPlan) -> list[PlanChange]:
        leapt_from.append(begun_with.plan)
        return listed(search, begun_with)

    def timed(plans: DealtPlans, deadline: Deadline, kept: set[int]) -> bool:
        begun_s = deadline.elapsed_s
        made_some = dealt(plans, deadline, kept)
        dealing_s.append(deadline.elapsed_s - begun_s)
        return made_some

    monkeypatch.setattr(DealtPlans, "make_more", timed)
    monkeypatch.setattr(WholePlansSearch, "_leaps_from", noted)
    monkeypatch.setattr(whole_plans, "TURNS_IN_VAIN", 10**9)
    for _ in range(20):
        start = going_on.go_on(Shortlist(start), question, Deadline(0.2, CountedWork()))
    assert 0.05 < sum(dealing_s) / 4.0 < 0.6
    assert leapt_from == list(dict.fromkeys(leapt_from))


def test_nodes_are_dealt_among_the_types_that_the_best_plan_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of fast devices, and one of slow ones that a link leads to on which a transfer takes a second."""
    here, there = cluster(("A100-40", 4, 2), ("V100-16", 4, 1)).node_types
    links = Links(
        between_nodes=Link(bandwidth_gb_per_s=10.0, latency_us=10.0),
        node_pairs=(NodePair(node_types=(here.name, there.name), link=Link(bandwidth_gb_per_s=0.01, latency_us=1e6)),),
    )
    question = problem(ClusterSpec(node_types=(here, there), links=links), OPT_350M, 96)
    kept_of_best, draw = [], Recomposer.draw

    def noted(recomposer: Recomposer, dice: random.Random, more: int, deadline: Deadline, kept: set[int]) -> None:
        kept_of_best.append(kept)
        draw(recomposer, dice, more, deadline, kept)

    monkeypatch.setattr(Recomposer, "draw", noted)
    found = plan_cluster(question, deadline=Deadline(4.0, CountedWork()))
    assert found.plan.idle_ranks == (8, 9, 10, 11)
    assert kept_of_best[-1] == {0}


def test_a_time_that_ends_makes_no_estimate_infinite() -> None:
    """What is told of a composition stays: one that the time ended with would wait for ever."""
    question, start = start_of("unlike devices")
    search = WholePlansSearch(question)
    search.go_on(Shortlist(start), question, Deadline(0.05, CountedWork()))
    assert search._deadline.is_over()
    assert search._estimated_goal(start.plan) < 2 * goal_value(start, question)


def test_the_plan_that_leads_is_tuned_by_both_means_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Climbs and walks through depths and delays take turns; where both are in vain, the search looks elsewhere."""
    question, start = start_of("unlike devices")
    search, did = WholePlansSearch(question), []
    walk, leap, go_on = WholePlansSearch._walk, WholePlansSearch._leap, Climb.go_on

    def walked(search: WholePlansSearch, *args: Any) -> ScoredPlan | None:
        did.append("walk" if args[1] is search._timings else "walk through all")
        return walk(search, *args)

    def leapt(search: WholePlansSearch) -> None:
        did.append("leap")
        assert search._untuned() is None
        leap(search)

    def climbed(climb: Climb, *args: Any) -> None:
        did.append("climb")
        go_on(climb, *args)

    monkeypatch.setattr(WholePlansSearch, "_walk", walked)
    monkeypatch.setattr(WholePlansSearch, "_leap", leapt)
    monkeypatch.setattr(Climb, "go_on", climbed)
    monkeypatch.setattr(whole_plans, "TUNING_SHARE", 1.0)
    monkeypatch.setattr(whole_plans, "WALKS_IN_VAIN", 3)
    search.go_on(Shortlist(start), question, Deadline(4.0, CountedWork()))
    first = did[: did.index("leap")]
    assert {"walk", "climb", "walk through all"} <= set(first)
    assert first.index("walk") < first.index("walk through all"), "of all kinds only where climbing is over"


@cache
def two_layers_each() -> tuple[Problem, ScoredPlan]:
    """Four stages that can be cut in two."""
    question = few_layers.question(8, 4)
    return question, score_of(few_layers.pipeline(question, 2, 4, 6), question)


def test_the_best_plan_is_tuned_also_if_it_is_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaps begin from plans that are not, which must not leave the best one as it is."""
    question, before = two_layers_each()
    start = score_of(next(interleavings(before.plan, question))(), question)
    assert all(replica.is_interleaved for replica in start.plan.replicas)
    search, tuned = WholePlansSearch(question), []
    tune = WholePlansSearch._tune_on

    def noted(search: WholePlansSearch, scored: ScoredPlan) -> bool:
        tuned.append(any(replica.is_interleaved for replica in scored.plan.replicas))
        return tune(search, scored)

    monkeypatch.setattr(WholePlansSearch, "_tune_on", noted)
    monkeypatch.setattr(whole_plans, "TUNING_SHARE", 1.0)
    found = search.go_on(Shortlist(start), question, Deadline(1.0, CountedWork()))
    assert tuned[0], "it is the best one at first"
    assert goal_value(found, question) < goal_value(start, question)


def test_a_search_does_not_end_before_its_best_plan_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    question, start = start_of("six layers on four devices")
    monkeypatch.setattr(whole_plans, "TURNS_IN_VAIN", 3)
    monkeypatch.setattr(whole_plans, "MOST_RESTARTS", 1)
    monkeypatch.setattr(whole_plans, "TUNING_SHARE", 0.0)
    search, deadline = WholePlansSearch(question), Deadline(60.0, CountedWork())
    search.go_on(Shortlist(start), question, deadline)
    assert not deadline.is_over()
    assert search._untuned() is None
    assert search.best.plan in search._tuned


def test_a_plan_that_leaps_begin_from_is_interleaved_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of that is climbed from, though it is longer at first."""
    question, start = two_layers_each()
    search, climbed_from = WholePlansSearch(question), []
    begun = Climbs.begun

    def noted(climbs: Climbs, scored: ScoredPlan) -> Climb:
        climbed_from.append(scored.plan)
        return begun(climbs, scored)

    monkeypatch.setattr(Climbs, "begun", noted)
    search.go_on(Shortlist(start), question, Deadline(2.0, CountedWork()))
    assert any(replica.is_interleaved for plan in climbed_from for replica in plan.replicas)


def test_layers_move_with_other_delays_where_neither_alone_helps() -> None:
    """Each is listed once with every rule, after all other changes."""
    question, start = unlike_replicas()
    order = ChangeOrder(question, FAMILIES, random.Random(0))
    kinds = [label[0] for label, _ in order.of(start, set())]
    assert kinds == sorted(kinds, key=lambda kind: kind == LAST)
    assert kinds.count(LAST) == len(list(layers_by_rules(start, question)))
    by_rules = [change() for change in layers_by_rules(start, question)]
    moved = {tuple(each.num_layers for each in changed.replicas[0].stages) for changed in by_rules}
    delays = {tuple(each.wgrad_delay for each in changed.replicas[0].stages) for changed in by_rules}
    assert len(moved) > 2
    assert len(delays) > 2


def test_a_search_in_vain_begins_anew_and_ends_where_that_is_in_vain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    question, start = start_of("six layers on four devices")
    begun_from, begin = [], WholePlansSearch._begin_from

    def noted(search: WholePlansSearch, first: ScoredPlan) -> None:
        begun_from.append(first.plan)
        begin(search, first)

    monkeypatch.setattr(WholePlansSearch, "_begin_from", noted)
    monkeypatch.setattr(whole_plans, "TURNS_IN_VAIN", 3)
    monkeypatch.setattr(whole_plans, "MOST_RESTARTS", 2)
    deadline = Deadline(60.0, CountedWork())
    found = WholePlansSearch(question).go_on(Shortlist(start), question, deadline)
    assert not deadline.is_over()
    assert len(begun_from) >= 3
    assert set(begun_from) == {start.plan}, "it leads elsewhere by other dice alone"
    short_s = goal_value(found_from("six layers on four devices", 1.0, 0), question)
    assert goal_value(found, question) <= short_s * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.rotates("searches", every=2, turn=0)
@pytest.mark.parametrize("name", ["unlike devices", "six layers on four devices"])
def test_a_search_of_random_moves_finds_next_to_nothing_more(name: str) -> None:
    question, _ = start_of(name)
    best = found_from(name, 4.0, 0)
    found = search(best, question, evaluations=1000, seed=1)
    assert found.step_s >= 0.99 * best.step_s
