"""What is scored is legal, and fits its devices."""

import pytest

from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.scoring import score_plan, score_with_smaller_depths, scoring_s
from tests.helpers.plans import plan, replica, stage
from tests.unit.planner.clusters import OPT_350M, cluster, problem

FOUR = cluster(("V100-16", 4, 1))
QUESTION = problem(FOUR, OPT_350M, 256)


def one_node(*, micro_batch_size: int, tp: int = 4) -> Plan:
    """All layers on four devices of 16 GiB, with one microbatch in flight."""
    whole = stage(layers=(0, 24), ranks=range(4), tp=tp, mbs=micro_batch_size, depth=1, device="V100-16")
    return plan(OPT_350M, [replica(whole, num_samples=256)], seq_length=2048)


def test_a_plan_that_does_not_fit_has_no_score() -> None:
    fits, does_not = (score_plan(one_node(micro_batch_size=size), QUESTION) for size in (1, 64))
    assert fits is not None
    assert fits.step_s > 0
    assert does_not is None


def test_a_plan_that_is_not_legal_is_an_error() -> None:
    with pytest.raises(PlanError, match="needs 2"):
        score_plan(one_node(micro_batch_size=1, tp=2), QUESTION)


def test_smaller_depths_that_change_nothing_count_without_a_simulation() -> None:
    timer, single = CountedWork(), one_node(micro_batch_size=1)
    assert score_with_smaller_depths(single, QUESTION, Deadline(10.0, timer)) is None
    assert 0 < timer.now_s() < 0.5 * scoring_s(single)
