"""Split backwards of finished plans: tried where they can help, kept where they do, never beyond the memory."""

import itertools
from functools import partial

import pytest

from hetero.cost.memory import plan_memory
from hetero.cost.other_runtimes.deepspeed import DEEPSPEED
from hetero.plan.ir import Plan
from hetero.plan.validate import validate
from hetero.planner import scoring
from hetero.planner.deadline import CountedWork, Deadline
from hetero.planner.improve import split_backward
from hetero.planner.improve.local_search import neighbours
from hetero.planner.improve.split_backward import DELAY_RULES, smaller_delay, split_backwards
from hetero.planner.scoring import Shortlist
from tests.helpers.synthetic_profiles import cost_model, profile
from tests.unit.planner import line
from tests.unit.planner.line import MODEL, score_of

line_problem, uniform = partial(line.line_problem, batch=12), partial(line.uniform, batch=12)


def delays_of(plan: Plan) -> list[int | None]:
    return [stage.wgrad_delay for _, _, stage in plan.stages()]


def test_a_pipeline_of_equal_stages_idles_less() -> None:
    problem = line_problem()
    whole = score_of(uniform(pp=4), problem)
    found = split_backwards(Shortlist(whole), problem, Deadline(30, CountedWork()))
    validate(found.plan)
    assert None not in delays_of(found.plan)
    weight_s = found.simulation.costs[0, 0].weight_s
    assert whole.step_s - found.step_s >= 3 * 2 * weight_s * 0.999, "at least what ZB-H1 saves"


def test_the_best_of_all_finalists_is_split() -> None:
    """Two short pipelines lose less than a long one as they are; what a split leaves of either decides."""
    problem = line_problem()
    plans = [score_of(uniform(pp=pp), problem) for pp in (4, 2)]
    alone = [split_backwards(Shortlist(each), problem, Deadline(30, CountedWork())).step_s for each in plans]
    best = split_backwards(Shortlist(plans[0], tuple(plans)), problem, Deadline(30, CountedWork()))
    assert best.step_s == pytest.approx(min(alone), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "limit_s"),
    [
        ({"splits_backward": False}, 30),
        ({}, 0),
        ({"costs": cost_model(MODEL, [profile(MODEL)], runtime=DEEPSPEED)}, 30),
    ],
    ids=["forbidden", "no time", "another runtime"],
)
def test_the_plan_stays(options: dict[str, object], limit_s: float) -> None:
    problem = line_problem(**options)
    whole = score_of(uniform(pp=4), problem)
    assert split_backwards(Shortlist(whole), problem, Deadline(limit_s, CountedWork())) is whole


def test_without_pipelines_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = line_problem()
    whole = score_of(uniform(), problem)
    monkeypatch.delattr(split_backward, "score_plan")
    assert split_backwards(Shortlist(whole), problem, Deadline(30, CountedWork())) is whole


def test_stages_that_recompute_everything_stay_whole() -> None:
    problem = line_problem()
    whole = uniform(pp=4)
    mixed = whole.with_replica(0, whole.replicas[0].with_each_stage(recompute=["full"] * 2 + ["selective"] * 2))
    found = split_backwards(Shortlist(score_of(mixed, problem)), problem, Deadline(30, CountedWork()))
    validate(found.plan)
    assert delays_of(found.plan)[:2] == [None, None]
    assert found.step_s < score_of(mixed, problem).step_s


@pytest.mark.parametrize("spare_microbatches", [0, 1, 2])
def test_delays_stay_within_the_memory(monkeypatch: pytest.MonkeyPatch, spare_microbatches: int) -> None:
    """A device that holds 1F1B's first stage and so many W's beside it, whichever stage it has."""
    problem = line_problem()
    whole = uniform(pp=4)
    most = whole.with_replica(0, whole.replicas[0].with_stage(0, wgrad_delay=spare_microbatches))
    capacity = max(parts.total for parts in plan_memory(most, problem.costs).values())
    monkeypatch.setattr(scoring, "capacity_bytes", lambda *_: capacity)
    found = split_backwards(Shortlist(score_of(whole, problem)), problem, Deadline(30, CountedWork()))
    assert max(parts.total for parts in found.memory.values()) <= capacity
    assert found.step_s < score_of(whole, problem).step_s


@pytest.mark.parametrize(
    ("delay", "deferred", "over", "smaller"),
    [(3, 400, 1, 2), (3, 400, 101, 1), (3, 400, 900, 0), (0, 100, 1, None), (2, 0, 1, None)],
)
def test_a_delay_shrinks_by_what_is_too_much(delay: int, deferred: int, over: int, smaller: int | None) -> None:
    assert smaller_delay(delay, deferred=deferred, over=over) == smaller


def test_a_smaller_depth_does_not_help_a_stage_that_holds_only_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sequence parallelism that is more than activations, and depth 1 leaves none of these beside it."""
    problem = line_problem()
    whole = uniform(pp=2, tp=2, sequence_parallel=True)
    made = whole.with_replica(0, whole.replicas[0].with_stage(1, wgrad_delay=3, recompute="selective"))
    parts = plan_memory(made, problem.costs)[0, 1]
    assert (parts.activations, parts.deferred > 0) == (0, True)
    monkeypatch.setattr(scoring, "capacity_bytes", lambda stage, _: 2**60 if stage.start == 0 else parts.total - 1)
    assert scoring.score_with_smaller_depths(made, problem) is None


def test_the_first_delays_fill_the_depth_of_the_first_stage() -> None:
    """In each stage's own microbatches: what it has less in flight than the first one."""
    (replica,) = uniform(pp=4).replicas
    unlike = replica.with_stage(2, micro_batch_size=2, in_flight=1)
    found = {rule.__name__: [rule(unlike, s) for s in range(4)] for rule in DELAY_RULES}
    last = unlike.num_microbatches(3) - 1
    assert found == {
        "_by_position": [0, 1, 2, 3],
        "_by_depth": [0, 1, 1, 3],
        "_at_once": [0, 0, 0, 0],
        "_last_at_the_end": [0, 0, 0, last],
    }
    assert last > 3


def test_small_changes_keep_the_delays() -> None:
    whole = uniform(pp=4)
    made = whole.with_replica(0, whole.replicas[0].with_each_stage(wgrad_delay=range(4)))
    assert all(delays_of(each) == [0, 1, 2, 3] for each in itertools.islice(neighbours(made), 50))
