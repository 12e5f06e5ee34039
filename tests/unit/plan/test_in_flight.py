"""How deep a stage has to be: the closed form is held against a dry run of the schedule."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import PlanError, ScheduleError
from hetero.plan import validate as rules
from hetero.plan.ir import Replica
from hetero.plan.validate import least_in_flight
from hetero.schedule.dry_run import check_no_deadlock
from hetero.schedule.orders import one_f_one_b
from hetero.schedule.passes import add_communication
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import pipelines


def dry_run(replica: Replica) -> None:
    """Lower the replica's real schedule and run it without time and tensors."""
    num_microbatches = replica.microbatch_counts
    schedule = one_f_one_b(num_microbatches=num_microbatches, in_flight=[stage.in_flight for stage in replica.stages])
    check_no_deadlock(add_communication(schedule, num_microbatches=num_microbatches), num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("sizes", "in_flight"),
    [
        ((1, 1, 1, 1), (1, 1, 1, 1)),
        ((4, 1), (1, 1)),
        ((1, 4), (4, 1)),
        ((2, 4, 1), (2, 1, 1)),
        ((1, 4, 1), (4, 1, 1)),
        ((4, 1, 4), (2, 4, 1)),
    ],
)
def test_the_least_depths(sizes: tuple[int, ...], in_flight: tuple[int, ...]) -> None:
    """Equal stages run at depth 1, if slowly; a fine stage before a coarse one needs a whole coarse microbatch."""
    stages = [stage(layers=(s, s + 1), ranks=(s,), mbs=size, depth=1) for s, size in enumerate(sizes)]
    deepened = replica(*stages, num_samples=16)
    for s in reversed(range(len(sizes))):
        deepened = deepened.with_stage(s, in_flight=least_in_flight(deepened, s))
    assert tuple(each.in_flight for each in deepened.stages) == in_flight


def taking_turns(first: int, depth: int) -> Replica:
    """Two ranks from ``first`` on that hold two stages each."""
    ranks = (first, first + 1, first, first + 1)
    cuts = pairwise((0, 1, 3, 4, 6))
    stages = (stage(layers=c, ranks=(r,), depth=depth) for c, r in zip(cuts, ranks, strict=True))
    return replica(*stages, num_samples=4)


def test_replicas_that_run_alike_are_dry_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a plan of many, most are."""
    asked: list[Replica] = []
    deadlocks = rules.deadlocks

    def counted(each: Replica) -> bool:
        asked.append(each)
        return deadlocks(each)

    many = plan(gpt2_model(), [taking_turns(0, 2), taking_turns(2, 2), taking_turns(4, 3), taking_turns(6, 2)])
    monkeypatch.setattr(rules, "deadlocks", counted)
    rules.check_in_flight_is_deep_enough(many)
    assert asked == [many.replicas[0], many.replicas[2]]


def test_depths_that_would_not_deadlock_are_looked_for_when_somebody_reads_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes a dry run for each, and a planner drops such plans by the hundred."""
    asked: list[Replica] = []
    enough = rules.enough_in_flight

    def counted(each: Replica) -> list[int] | None:
        asked.append(each)
        return enough(each)

    monkeypatch.setattr(rules, "enough_in_flight", counted)
    with pytest.raises(PlanError) as caught:
        rules.check_in_flight_is_deep_enough(plan(gpt2_model(), [taking_turns(0, 1)]))
    assert not asked
    assert "set it to [2, 2, 2, 2]" in str(caught.value)
    assert asked
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_no_more_than_the_whole_batch_is_needed() -> None:
    """All four forwards behind come first; a + 3 a' = 5 samples for the first backward are more than there are."""
    stages = [stage(layers=(0, 3), ranks=(0,), mbs=2, depth=1), stage(layers=(3, 6), ranks=(1,), depth=4)]
    assert least_in_flight(replica(*stages, num_samples=4), 0) == 2


@given(pipelines(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_least_depth_is_exact(pipeline: Replica, data: st.DataObject) -> None:
    """The closed form against the schedule itself: at the least depth it runs, one less deadlocks."""
    dry_run(pipeline)
    s = data.draw(st.integers(0, len(pipeline.stages) - 1), label="stage")
    least = least_in_flight(pipeline, s)
    dry_run(pipeline.with_stage(s, in_flight=least))
    if least > 1:
        with pytest.raises(ScheduleError, match="deadlock"):
            dry_run(pipeline.with_stage(s, in_flight=least - 1))
