"""What plans leave to hosts: only where memory is short, never more than hosts have, and worth it."""

import re
from functools import cache
from itertools import accumulate

import pytest

from hetero.cost.host_memory import check_host_memory
from hetero.cost.memory import plan_memory
from hetero.errors import ConfigError, PlanError
from hetero.plan.offload import NOTHING_ON_HOST, Offload
from hetero.planner.plan_cluster import PlanResult
from hetero.planner.problem import Problem
from hetero.planner.replica.stage_options import Slot, StageOptionTable
from hetero.planner.scoring import bytes_over_capacity, score_plan
from hetero.spec.host import UpdateRate
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
    found, elastic = (planned(problem(described=slow, previews=previews), effort_s=0.5) for previews in (True, False))
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
    table = StageOptionTable(problem(), hosts=True)
    option = table.option(Slot(0, 1, 1), 1, "none", on_host=True)
    layer_s, embedding_s, head_s = option.updates_s
    updates_s = [embedding_s] * first + [layer_s] * num_layers + [head_s] * last
    forwards_s = [0.001] * first + [0.02] * num_layers
    needed_s = accumulate(forwards_s, initial=fill_s)
    waits_s = [done_s - need_s for done_s, need_s in zip(accumulate(updates_s), needed_s, strict=False)]
    found = option.update_s(num_layers, first=first, last=last, fill_s=fill_s)
    assert found == pytest.approx(max(0.0, *waits_s))


def test_an_option_on_the_host_is_within_its_part_of_the_host() -> None:
    tight = problem(described=host(memory_gib=32))
    option = StageOptionTable(tight, hosts=True).option(Slot(0, 1, 1), 1, "full", on_host=True)
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
    option = StageOptionTable(problem(), hosts=True).option(Slot(0, 1, 1), 1, "none", on_host=True)
    assert [option.offload(layer) for layer in (0, 16)] == [Offload(optimizer_from=-1.0), Offload(optimizer_from=16.0)]
