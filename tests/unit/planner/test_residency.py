"""What plans leave to hosts: only where memory is short, never more than hosts have, and worth it."""

import re
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import pytest

from hetero.cost.host_memory import check_host_memory
from hetero.cost.memory import plan_memory
from hetero.cost.stage_memory import memory_of_stage
from hetero.errors import ConfigError, PlanError
from hetero.plan.ir import Stage
from hetero.plan.offload import NOTHING_ON_HOST, Offload, OnHost
from hetero.planner.improve.host_of_replica import HostOfReplica
from hetero.planner.plan_cluster import PlanResult
from hetero.planner.problem import Problem
from hetero.planner.replica.least_memory import LeastMemoryPipeline
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.scoring import bytes_over_capacity, score_plan
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.host import UpdateRate
from hetero.spec.link import Link
from tests.helpers.plans import replica, stage
from tests.unit.planner import short_memory
from tests.unit.planner.clusters import planned
from tests.unit.planner.short_memory import host, problem


@cache
def answer(memory_gib: int = 24, **options: object) -> tuple[Problem, PlanResult]:
    asked = problem(memory_gib=memory_gib, **options)
    return asked, planned(asked, effort_s=0.5)


@pytest.mark.slow
def test_a_model_larger_than_its_devices_is_planned_with_its_host() -> None:
    asked, found = answer()
    assert all(stage.offload.optimizer_from is not None for _, _, stage in found.plan.stages())
    assert bytes_over_capacity(found.plan, asked, plan_memory(found.plan, asked.costs)) == {}
    check_host_memory(found.plan, asked.cluster)
    at_first = score_plan(short_memory.least_memory_plan(asked), asked)
    assert at_first is not None
    assert found.simulation.step_s < 0.95 * at_first.step_s, "less is computed again"


def test_without_its_host_it_is_refused_with_what_would_help() -> None:
    short = "the model does not fit: .* memory is short by .* GiB; .*; or leave optimizer state to hosts, which takes "
    with pytest.raises(PlanError, match=f"{short}offload auto$"):
        planned(problem(offload="none"))
    with pytest.raises(PlanError, match=f"{short}--use-distributed-optimizer$"):
        planned(problem(distributed_optimizer=False))
    with pytest.raises(PlanError, match=f"{short}the output of `hetero profile host` in the cluster file$"):
        planned(problem(described=host(updates=())))
    with pytest.raises(PlanError, match=r"the cluster and its hosts hold 1\d of 32 layers"):
        planned(problem(described=host(memory_gib=48)))


def test_where_everything_fits_nothing_goes_to_the_host_and_nothing_more_is_asked() -> None:
    (_, found), (_, without) = answer(160), answer(160, offload="none")
    assert all(stage.offload == NOTHING_ON_HOST for _, _, stage in found.plan.stages())
    assert found.plan == without.plan
    assert found.num_templates == without.num_templates


@pytest.mark.slow
def test_a_host_saves_computing_again() -> None:
    """On 60 GiB the model fits if it computes layers again, for the memory that its optimizer takes."""
    (_, with_host), (_, without) = answer(60), answer(60, offload="none")
    assert any(stage.recompute != "none" for _, _, stage in without.plan.stages())
    assert with_host.simulation.step_s < 0.95 * without.simulation.step_s


@pytest.mark.slow
def test_previews_are_chosen_where_they_are_allowed() -> None:
    slow = host(updates=(UpdateRate(threads=16, elements_per_s=5e8),))
    found, elastic = (planned(problem(described=slow, previews=previews), effort_s=2.0) for previews in (True, False))
    assert any(stage.offload.speculate for _, _, stage in found.plan.stages())
    assert not any(stage.offload.speculate for _, _, stage in elastic.plan.stages())
    assert found.simulation.step_s < elastic.simulation.step_s


@pytest.mark.slow
def test_a_plan_whose_host_lacks_memory_does_not_fit() -> None:
    asked, found = answer()
    smaller = problem(described=host(memory_gib=64))
    assert score_plan(found.plan, smaller) is None
    assert score_plan(found.plan, asked) is not None


@pytest.mark.parametrize(("first", "last"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("num_layers", [1, 2, 7])
@pytest.mark.parametrize("fill_s", [0.0, 0.05, 3.0])
def test_the_wait_for_a_host_is_the_latest_of_all_blocks(
    first: bool, last: bool, num_layers: int, fill_s: float
) -> None:
    table = StageOptionTable(problem(), hosts=OnHost.OPTIMIZER)
    option = table.option(Slot(0, 1, 1), 1, "none", on_host=OnHost.OPTIMIZER)
    layer_s, embedding_s, head_s = option.updates_s
    updates_s = [embedding_s] * first + [layer_s] * num_layers + [head_s] * last
    forwards_s = [0.001] * first + [0.02] * num_layers
    needed_s = accumulate(forwards_s, initial=fill_s)
    waits_s = [done_s - need_s for done_s, need_s in zip(accumulate(updates_s), needed_s, strict=False)]
    found = option.update_s(num_layers, first=first, last=last, fill_s=fill_s)
    assert found == pytest.approx(max(0.0, *waits_s))


def test_an_option_on_the_host_is_within_its_part_of_the_host() -> None:
    tight = problem(described=host(memory_gib=32))
    option = StageOptionTable(tight, hosts=OnHost.OPTIMIZER).option(Slot(0, 1, 1), 1, "full", on_host=OnHost.OPTIMIZER)
    most = option.most_layers(1, first=False, last=False)
    assert 0 < most < 32
    assert most * option.host_bytes[0] <= 16 * 2**30 < (most + 1) * option.host_bytes[0]
    assert option.fits(most, 1, first=False, last=False)
    assert not option.fits(most + 1, 1, first=False, last=False)
    assert option.deepest(most + 1, first=False, last=False) == 0


def test_the_memory_of_a_host_is_no_more_than_it_has() -> None:
    cluster = short_memory.problem().cluster
    assert cluster.with_host_memory_gib(100).node_types[0].usable_host_memory_gib == 100
    with pytest.raises(ConfigError, match=re.escape("host_memory_gib is 600, its host has memory_gib 512")):
        cluster.with_host_memory_gib(600)


def test_an_option_says_where_its_stage_begins() -> None:
    option = StageOptionTable(problem(), hosts=OnHost.OPTIMIZER).option(
        Slot(0, 1, 1), 1, "none", on_host=OnHost.OPTIMIZER
    )
    assert [option.offload(layer) for layer in (0, 16)] == [Offload(optimizer_from=-1.0), Offload(optimizer_from=16.0)]


def one_card(**options: Any) -> Problem:
    """The same model and one of the two cards: 4 bytes of 7e9 parameters are more than it has."""
    node = replace(problem(**options).cluster.node_types[0], gpus_per_node=1)
    return problem(cluster=ClusterSpec(node_types=(node,), links=Links()), **options)


@pytest.mark.slow
def test_one_card_trains_what_its_weights_alone_do_not_fit() -> None:
    """Gradients and weights of 7e9 parameters are 41 GB, the card has 24 GiB."""
    asked = one_card()
    found = planned(asked, effort_s=0.3)
    (stage,) = (stage for _, _, stage in found.plan.stages())
    assert stage.offload.gradients_from is not None
    assert bytes_over_capacity(found.plan, asked, plan_memory(found.plan, asked.costs)) == {}
    check_host_memory(found.plan, asked.cluster)
    at_first = LeastMemoryPipeline(asked, StageOptionTable(asked, hosts=OnHost.WEIGHTS)).plan()
    assert at_first is not None
    scored = score_plan(at_first, asked)
    assert scored is not None
    assert found.simulation.step_s < 0.9 * scored.step_s, "more stays on the card, and less is computed again"


def test_one_card_is_refused_where_its_host_lacks_memory_for_gradients() -> None:
    with pytest.raises(PlanError, match=r"the cluster and its hosts hold \d+ of 32 layers"):
        planned(one_card(described=host(memory_gib=160)))


@pytest.mark.parametrize("on_host", [OnHost.GRADIENTS, OnHost.WEIGHTS])
@pytest.mark.parametrize(("first", "last"), [(False, False), (True, False), (False, True)])
def test_an_option_holds_what_its_plan_holds(on_host: OnHost, first: bool, last: bool) -> None:
    """From three layers on what a stage holds is a straight line, also where it is streamed."""
    asked = problem()
    option = StageOptionTable(asked, hosts=on_host).option(Slot(0, 1, 1), 1, "full", on_host=on_host)
    for num_layers in (3, 9):
        first_layer = 0 if first else 32 - num_layers if last else 10
        stage = Stage(
            first_layer=first_layer,
            end_layer=first_layer + num_layers,
            ranks=(0,),
            device="A100-40",
            micro_batch_size=1,
            in_flight=1,
            recompute="full",
            offload=option.offload(first_layer),
        )
        memory = memory_of_stage(stage, asked.costs, num_neighbours=2 - first - last, num_gradient_groups=3)
        held = memory.at(2)
        assert option.memory.bytes(num_layers, 2, first=first, last=last) == pytest.approx(
            held.total - held.optimizer, rel=1e-6
        )


def test_copies_of_an_option_take_the_time_that_its_computes_do_not_have() -> None:
    """A layer's 202 M weights take 17 ms at 24 GB/s, and a forward 20."""
    for gb_per_s, forward_s, backward_s in ((24.0, 0.02, 0.04), (8.0, 0.0506, 0.0506)):
        link = Link(bandwidth_gb_per_s=gb_per_s, latency_us=0.0)
        asked = one_card(described=host(to_device=link, to_host=link))
        option = StageOptionTable(asked, hosts=OnHost.WEIGHTS).option(Slot(0, 1, 1), 1, "none", on_host=OnHost.WEIGHTS)
        assert option.backwards_s[0] == pytest.approx(backward_s, rel=0.01)
        assert option.layer_s - option.backwards_s[0] == pytest.approx(forward_s, rel=0.01)


def test_cards_are_behind_the_switches_of_their_own_node() -> None:
    """Two of four behind each, in a node that does not begin at a multiple of four."""
    (node,) = problem().cluster.node_types
    first = replace(node, name="first", gpus_per_node=1, host=None)
    second = replace(node, gpus_per_node=4, host=host(gpus_per_switch=2))
    link = Link(bandwidth_gb_per_s=12.0, latency_us=20.0)
    question = problem(cluster=ClusterSpec(node_types=(first, second), links=Links(between_nodes=link)))
    plan = question.plan_of(
        [
            replica(
                stage(layers=(0, 16), ranks=(1, 2), dp=2, device="A100-40"),
                stage(layers=(16, 32), ranks=(3, 4), dp=2, device="A100-40"),
                num_samples=16,
            )
        ]
    )
    asked = HostOfReplica(plan, 0, question).question((0, 1))
    assert [each.cards for each in asked.stages] == [(2, 0), (0, 2)]
