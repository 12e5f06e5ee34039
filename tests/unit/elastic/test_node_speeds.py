"""As what nodes count for the leader, under a simulated clock: from their reports to the next epoch and back."""

import dataclasses
from collections.abc import Mapping

from hetero.elastic.node_speeds import NodeSpeeds
from hetero.elastic.records import Epoch, NodeReport, RankReport
from hetero.elastic.stragglers import StragglerSettings
from tests.helpers.elastic_epochs import epoch_of
from tests.unit.elastic.test_replanning import ALL, on_ranks, problem

SETTINGS = StragglerSettings(threshold=1.3, recovered=1.1, for_s=10.0, window=3)
EPOCH = dataclasses.replace(epoch_of(ALL), nodes=tuple(on_ranks(ALL)))
PREDICTED = dict.fromkeys(range(6), 0.2)


def speeds_of(epoch: Epoch | None = EPOCH) -> NodeSpeeds:
    speeds = NodeSpeeds(problem(), SETTINGS)
    speeds.begin(epoch, 0.0)
    return speeds


def reports(epoch: Epoch, step: int, slowness: Mapping[str, float], *, compute_s: float = 0.3) -> dict[str, NodeReport]:
    """Every prediction is half as long again as it should be."""
    return {
        each.node.name: NodeReport(
            node=each.node.name,
            incarnation="1",
            ended=0,
            ranks=tuple(
                RankReport(
                    epoch=epoch.number,
                    rank=rank,
                    phase="step",
                    step=step,
                    compute_s=compute_s * slowness.get(each.node.name, 1.0),
                )
                for rank in each.ranks
            ),
        )
        for each in epoch.nodes
    }


def judged(speeds: NodeSpeeds, epoch: Epoch, *, seconds: int = 20, **slowness: float) -> list[str]:
    """What is told within so many steps of a second."""
    return [
        said for second in range(seconds) for said in speeds.judge(reports(epoch, second + 1, slowness), float(second))
    ]


def test_a_node_is_demoted_planned_for_and_promoted_again() -> None:
    speeds = speeds_of()
    speeds.predict(PREDICTED)
    assert judged(speeds, EPOCH, f1=2.1) == [
        "node f1 computes 2.1 times as slowly as fast should: it counts as fast-slower-2"
    ]
    assert [speeds.counted(node).node_type for node in ALL] == ["fast", "fast-slower-2", "slow", "slow"]
    assert {each.name for each in speeds.problem.cluster.node_types} == {"fast", "fast-slower-2", "slow"}
    # The epoch goes on as it is until another one is made.
    assert speeds.planned(EPOCH) == EPOCH.nodes
    assert speeds.slower(tuple(ALL[:1])) == {}

    demoted = dataclasses.replace(EPOCH, number=2, slower=speeds.slower(tuple(ALL)))
    assert demoted.slower == {"f1": 2.0}
    # Another leader may have made it: what it needs to know is in the epoch.
    for follower in (speeds, speeds_of(None)):
        follower.begin(demoted, 0.0)
        assert [each.node.node_type for each in follower.planned(demoted)] == ["fast", "fast-slower-2", "slow", "slow"]
        assert follower.counted(ALL[1]).node_type == "fast-slower-2"
        follower.problem.counts_of(map(follower.counted, ALL))
        follower.predict(PREDICTED)
        assert judged(follower, demoted) == []


def test_a_node_that_is_as_fast_as_its_type_again_is_promoted() -> None:
    speeds = speeds_of(dataclasses.replace(EPOCH, slower={"f1": 2.0}))
    speeds.predict(PREDICTED)
    assert judged(speeds, EPOCH, f1=0.5) == ["node f1 is as fast as it should be again: it counts as fast"]
    assert speeds.counted(ALL[1]) == ALL[1]


def test_nobody_is_judged_by_what_says_nothing() -> None:
    """Without a prediction; by the same report again; by reports of another epoch, or without seconds."""
    assert judged(speeds_of(), EPOCH, f1=9.0) == []
    speeds = speeds_of()
    speeds.predict(PREDICTED)
    once = reports(EPOCH, 1, {"f1": 9.0})
    assert [speeds.judge(once, float(second)) for second in range(30)] == [[]] * 30
    other = dataclasses.replace(EPOCH, number=7)
    assert judged(speeds, other, f1=9.0) == []
    for second in range(30):
        assert speeds.judge(reports(EPOCH, second + 2, {"f1": 9.0}, compute_s=0.0), float(second)) == []


def test_a_node_that_comes_back_as_another_type_is_known_as_that() -> None:
    speeds = speeds_of(dataclasses.replace(EPOCH, slower={"s0": 1.5}))
    back = dataclasses.replace(ALL[2], node_type="fast", num_ranks=2)
    assert speeds.counted(back).node_type == "fast-slower-1.5"
    assert speeds.problem.counts_of([speeds.counted(back)])["fast-slower-1.5"] == 1
