"""What the leader does in every situation, and what it does not."""

import dataclasses
from typing import Any

import pytest

from hetero.elastic.leadership import (
    EvictNode,
    Finish,
    LackOfStep,
    LeaderSettings,
    MakeEpoch,
    Move,
    NodeView,
    RequestStop,
    View,
    Wait,
    end_of_epoch,
    failures_in_a_row,
    next_move,
)
from hetero.elastic.records import NodeInfo, RestorePoint, RunFlags
from tests.helpers.elastic_epochs import epoch_of, node_info

SETTINGS = LeaderSettings()
TRAINING = epoch_of([node_info("a"), node_info("b")])


def there(name: str, incarnation: str = "1", **what: Any) -> NodeView:
    return NodeView(**{"info": node_info(name, incarnation), "since_s": 0.0, "answered": True, **what})


def view(*nodes: NodeView, **what: Any) -> View:
    return View(
        **{
            "leader": nodes[0].info.name if nodes else "a",
            "epoch": TRAINING,
            "nodes": {node.info.name: node for node in nodes},
            "started_s": 0.0,
            "step_s": 1.0,
            **what,
        }
    )


def step_time(nodes: tuple[NodeInfo, ...]) -> float | None:
    """Two nodes take a second, more are faster by their number; a slow one counts as half a node; one is too small."""
    power = sum(0.5 if node.node_type == "slow" else 1.0 for node in nodes)
    return None if power < 1.5 else 2.0 / power


def move(seen: View, now_s: float = 100.0, **settings: Any) -> Move:
    return next_move(seen, now_s, dataclasses.replace(SETTINGS, **settings), step_time)


# The first start.


def test_the_first_epoch_waits_for_those_who_are_coming() -> None:
    seen = view(there("a"), there("b", since_s=3.0), epoch=None)
    assert move(seen, 4.0) == Wait(until_s=5.0, reason="2 nodes, more may come")
    assert move(seen, 5.0) == MakeEpoch(nodes=("a", "b"), failures=0, reason="first start")
    assert isinstance(move(seen, 5.0, min_nodes=3), Wait)


def test_the_first_epoch_is_of_those_who_have_answered() -> None:
    seen = view(there("c"), there("b"), there("a", answered=False), epoch=None)
    assert move(seen) == MakeEpoch(nodes=("b", "c"), failures=0, reason="first start")


@pytest.mark.parametrize(
    ("nodes", "min_nodes", "lack"),
    [
        ([there("a")], 1, "the model does not fit a"),
        ([], 1, "0 nodes are there, 1 are asked for"),
        ([there("a"), there("b")], 3, "2 nodes are there, 3 are asked for"),
        ([there("a"), there("b", leaves_by_s=9.0)], 1, "the model does not fit a"),
    ],
)
def test_too_few_nodes_are_waited_for_and_then_the_run_is_left(
    nodes: list[NodeView], min_nodes: int, lack: str
) -> None:
    seen = view(*nodes, epoch=None, started_s=50.0)
    assert move(seen, 649.0, min_nodes=min_nodes) == Wait(until_s=650.0, reason=f"{lack}: waiting for more")
    end = move(seen, 650.0, min_nodes=min_nodes)
    assert isinstance(end, Finish)
    assert end.exit_code == 1
    assert end.reason == f"{lack}, and no other came within 600 s; start agents on more nodes, or wait longer"


# Losses.


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (view(there("a"), there("b"), broken="rank 1 failed"), "rank 1 failed"),
        (view(there("a"), there("c")), "node b is gone"),
        (view(there("a"), there("b", "2")), "node b is gone"),
        (view(there("a"), there("b", refused=True)), "node b refuses connections"),
        (view(there("a"), there("b", phase="failed")), "a rank of node b failed"),
        (view(there("a", phase="stopped"), there("b", phase="stopped"), stop_requested="c joins"), "c joins"),
        (view(there("a", phase="finished"), there("b", phase="stopped")), "all ranks have stopped"),
        (view(there("a", phase="stopped"), there("b", phase="step"), stop_requested="c joins"), None),
        (view(there("a"), there("b")), None),
        (view(epoch=None), None),
    ],
)
def test_what_ends_an_epoch(seen: View, reason: str | None) -> None:
    assert end_of_epoch(seen) == reason


def test_after_a_loss_those_who_answer_go_on() -> None:
    seen = view(there("a"), there("b", "2"), there("c"), over_since_s=99.9)
    assert move(seen, 100.0) == Wait(until_s=pytest.approx(100.1), reason="node b is gone")
    assert move(seen, 100.2) == MakeEpoch(nodes=("a", "b", "c"), failures=0, reason="node b is gone")


def test_who_refuses_a_connection_is_evicted_at_once() -> None:
    assert move(view(there("a"), there("b", refused=True))) == EvictNode(
        name="b", reason="its agent refuses connections"
    )


def test_who_does_not_answer_is_waited_for_and_evicted() -> None:
    seen = view(there("a"), there("b", answered=False), there("c", answered=False, since_s=97.0), over_since_s=95.0)
    assert move(seen, 99.0) == Wait(until_s=None, reason="training")
    seen = dataclasses.replace(seen, broken="rank 1 failed")
    assert move(seen, 99.0) == Wait(until_s=100.0, reason="for b, c")
    assert move(seen, 100.0) == EvictNode(name="b", reason="its agent did not answer within 5 s")


def test_who_leaves_has_to_answer_too() -> None:
    """It may be the only one that has the copies."""
    leaves = there("b", leaves_by_s=500.0, answered=False, phase="stopped")
    seen = view(there("a", phase="stopped"), leaves, there("c"), stop_requested="b leaves", over_since_s=99.0)
    assert move(seen) == Wait(until_s=104.0, reason="for b")
    seen.nodes["b"] = dataclasses.replace(leaves, answered=True)
    assert move(seen) == MakeEpoch(nodes=("a", "c"), failures=0, reason="b leaves")


def test_a_leader_that_most_do_not_answer_evicts_itself() -> None:
    silent = {"answered": False}
    seen = view(there("a"), there("b", **silent), there("c", **silent), broken="lost", over_since_s=90.0)
    assert move(seen) == EvictNode(name="a", reason="it reaches neither of b, c: another node shall lead")
    seen = view(there("a"), there("b", **silent), broken="lost", over_since_s=90.0)
    assert isinstance(evicted := move(seen), EvictNode)
    assert evicted.name == "b"


def test_too_few_after_a_loss() -> None:
    seen = view(there("a"), over_since_s=50.0)
    assert move(seen) == Wait(until_s=650.0, reason="the model does not fit a: waiting for more")
    assert isinstance(move(seen, 650.0), Finish)


def test_the_others_do_not_wait_again_for_a_node_that_was_evicted_since() -> None:
    """It comes back at once, and may answer as little as before: they would never go on."""
    back = there("b", "2", answered=False, was_evicted=True, since_s=99.0)
    seen = view(there("a"), back, there("c"), broken="lost", over_since_s=90.0)
    assert move(seen) == MakeEpoch(nodes=("a", "c"), failures=0, reason="lost")
    assert move(seen, min_nodes=3) == Wait(until_s=690.0, reason="2 nodes are there, 3 are asked for: waiting for more")
    seen.nodes["b"] = dataclasses.replace(back, answered=True)
    assert move(seen, min_nodes=3) == MakeEpoch(nodes=("a", "b", "c"), failures=0, reason="lost")


def test_a_leader_is_not_cut_off_from_nodes_that_answer_with_an_error() -> None:
    broken = {"answered": False, "is_broken": True}
    seen = view(there("a"), there("b", **broken), there("c", **broken), broken="lost", over_since_s=90.0)
    assert move(seen) == EvictNode(name="b", reason="its agent did not answer within 5 s")


# Nothing to go on from.


def test_nodes_with_copies_are_waited_for_as_long_as_nodes_are() -> None:
    lack = LackOfStep(reason="no step is whole among b", exit_code=1)
    seen = view(there("b"), there("c"), over_since_s=50.0, no_step=lack)
    assert move(seen, 649.0) == Wait(until_s=650.0, reason="nothing to go on from yet: no step is whole among b")
    end = "no step is whole among b; that has not changed within 600 s (--wait-for-nodes)"
    assert move(seen, 650.0) == Finish(exit_code=1, reason=end)
    assert isinstance(move(dataclasses.replace(seen, no_step=None), 649.0), MakeEpoch)


def test_too_few_nodes_come_before_a_lack_of_copies() -> None:
    seen = view(there("b"), over_since_s=50.0, no_step=LackOfStep(reason="no step is whole among b", exit_code=1))
    assert move(seen, min_nodes=2) == Wait(until_s=650.0, reason="1 nodes are there, 2 are asked for: waiting for more")


# A job whose agents were all started again.


def test_the_agents_of_a_job_come_back_one_after_the_other() -> None:
    seen = view(there("a", "2", since_s=98.0), there("b", "2", since_s=99.0), over_since_s=98.0)
    assert move(seen) == Wait(until_s=101.0, reason="2 nodes, more may come")
    assert move(seen, 101.0) == MakeEpoch(nodes=("a", "b"), failures=0, reason="node a is gone")
    one_stayed = view(there("a"), there("b", "2", since_s=99.0), over_since_s=98.0)
    assert isinstance(move(one_stayed), MakeEpoch)


def test_a_job_that_was_started_again_begins_a_new_row() -> None:
    assert failures_in_a_row(failed(2, nodes={name: there(name, "2") for name in "ab"})) == 0


# Restarts without progress.


def failed(failures: int, **what: Any) -> View:
    epoch = epoch_of([node_info("a"), node_info("b")], number=5, start=RestorePoint(epoch=2, step=8), failures=failures)
    return view(there("a"), there("b"), epoch=epoch, **{"broken": "rank 1 failed", "over_since_s": 50.0, **what})


def test_the_third_failure_in_a_row_ends_the_run() -> None:
    assert move(failed(0)) == MakeEpoch(nodes=("a", "b"), failures=1, reason="rank 1 failed")
    assert move(failed(1)) == MakeEpoch(nodes=("a", "b"), failures=2, reason="rank 1 failed")
    end = move(failed(2))
    assert isinstance(end, Finish)
    assert end.exit_code == 1
    assert "3 epochs in a row broke with all their nodes there" in end.reason
    assert "because rank 1 failed; see the log" in end.reason


def test_a_committed_step_begins_a_new_row() -> None:
    assert failures_in_a_row(failed(2, committed=8)) == 3
    assert failures_in_a_row(failed(2, committed=9)) == 0


def test_a_lost_node_is_no_failure_and_begins_no_new_row() -> None:
    gone, other = {"a": there("a")}, {"a": there("a"), "b": there("b", "2")}
    assert failures_in_a_row(failed(2, nodes=gone)) == failures_in_a_row(failed(2, nodes=other)) == 2
    assert move(failed(2, nodes=other)) == MakeEpoch(nodes=("a", "b"), failures=2, reason="rank 1 failed")


def test_a_node_is_given_up_before_failures_are_counted() -> None:
    silent = {"a": there("a"), "b": there("b", answered=False), "c": there("c")}
    assert move(failed(2, nodes=silent)) == EvictNode(name="b", reason="its agent did not answer within 5 s")


def test_a_stop_as_asked_is_no_failure() -> None:
    stopped = {name: there(name, phase="stopped") for name in "ab"}
    assert failures_in_a_row(failed(2, nodes=stopped, broken=None, stop_requested="c joins")) == 0
    assert failures_in_a_row(failed(2, nodes=stopped, stop_requested="c joins")) == 3


# Notices.


def test_a_leave_stops_at_a_step() -> None:
    leaving = there("b", leaves_by_s=float("inf"))
    assert move(view(there("a"), leaving)) == RequestStop(reason="node b leaves")
    asked = view(there("a"), leaving, stop_requested="node b leaves")
    assert move(asked) == Wait(until_s=float("inf"), reason="node b leaves")


def test_a_notice_whose_deadline_is_too_short_is_a_loss() -> None:
    """A step of 1 s and 2 s to commit."""
    assert move(view(there("a"), there("b", leaves_by_s=103.0))) == RequestStop(reason="node b leaves")
    late = EvictNode(name="b", reason="its notice leaves no time to commit the step")
    assert move(view(there("a"), there("b", leaves_by_s=102.9))) == late
    asked = view(there("a"), there("b", leaves_by_s=102.9), stop_requested="node b leaves")
    assert move(asked, 102.0) == Wait(until_s=102.9, reason="node b leaves")
    assert move(asked, 102.9) == late


def test_a_notice_of_a_node_that_does_not_train_changes_nothing() -> None:
    assert move(view(there("a"), there("b"), there("c", leaves_by_s=101.0))) == Wait(until_s=None, reason="training")


SAVES = RunFlags(num_steps=40, save="saved", resumes=True)


def all_leave(**what: Any) -> View:
    nodes = [there(name, leaves_by_s=200.0, **what.pop(f"of_{name}", {})) for name in "ab"]
    return view(*nodes, **{"run": SAVES, **what})


def test_where_no_node_stays_the_step_in_hand_is_saved() -> None:
    stop = RequestStop(reason="all nodes leave", is_for_good=True)
    assert move(all_leave()) == stop
    asked = {"stop_requested": "all nodes leave", "is_stop_for_good": True}
    assert move(all_leave(**asked)) == Wait(until_s=200.0, reason="all nodes leave")
    assert move(all_leave(run=RunFlags(num_steps=40))) == RequestStop(reason="node a leaves")


@pytest.mark.parametrize(
    ("run", "is_stop", "step", "says", "resumes"),
    [
        (SAVES, True, 12, "all nodes leave after step 12 of 40, which is saved in saved; agents that are sta", True),
        (SAVES, False, 20, "the flags end the run after step 20 of 40, which is saved in saved; agents that", True),
        (SAVES, True, 40, "all ranks have finished", False),
        (SAVES, False, 41, "all ranks have finished", False),
        (
            RunFlags(num_steps=40, save="saved"),
            True,
            12,
            "12 of 40, which is saved in saved; to go on from it, giv",
            False,
        ),
        (RunFlags(num_steps=40), False, 20, "the flags end the run after step 20 of 40", False),
    ],
)
def test_a_run_that_is_saved_before_its_last_step_may_go_on(
    run: RunFlags, is_stop: bool, step: int, says: str, resumes: bool
) -> None:
    finished = {"of_a": {"phase": "finished"}, "of_b": {"phase": "finished"}, "finished_step": step}
    end = move(all_leave(run=run, is_stop_for_good=is_stop, **finished))
    assert isinstance(end, Finish)
    assert (end.exit_code, end.resumes) == (0, resumes)
    assert says in end.reason


def test_a_node_that_stays_keeps_the_job() -> None:
    seen = all_leave()
    seen.nodes["c"] = there("c")
    assert move(seen) == RequestStop(reason="node a leaves")


def test_the_last_notice_may_come_after_a_stop_was_asked_for() -> None:
    seen = all_leave(stop_requested="node a leaves")
    assert move(seen) == RequestStop(reason="all nodes leave", is_for_good=True)


def test_nodes_that_leave_make_one_more_epoch_if_nothing_is_saved() -> None:
    """Their ranks had stopped for another epoch when the last notice came, or a rank was lost before it had saved."""
    stopped = {"of_a": {"phase": "stopped"}, "of_b": {"phase": "stopped"}, "over_since_s": 99.0}
    reason = "all nodes leave, and nothing is saved yet: node a leaves"
    again = all_leave(**stopped, stop_requested="node a leaves")
    assert move(again) == MakeEpoch(nodes=("a", "b"), failures=0, reason=reason)
    assert move(again, min_nodes=3) == MakeEpoch(nodes=("a", "b"), failures=0, reason=reason)
    without_save = all_leave(**stopped, stop_requested="node a leaves", run=RunFlags())
    assert isinstance(move(without_save), Wait)
    broken = all_leave(
        over_since_s=99.0, broken="rank 1 failed", is_stop_for_good=True, stop_requested="all nodes leave"
    )
    assert isinstance(move(broken), MakeEpoch)


def test_a_save_that_fails_while_all_nodes_leave_is_tried_three_times() -> None:
    """Each try commits a step more, which is no progress then: the job would go on for as long as it has steps."""
    tried = all_leave(
        over_since_s=99.0,
        broken="rank 1 failed",
        is_stop_for_good=True,
        stop_requested="all nodes leave",
        committed=TRAINING.start.step + 1,
    )
    for failures in (0, 1):
        seen = dataclasses.replace(tried, epoch=dataclasses.replace(TRAINING, failures=failures))
        next_epoch = move(seen)
        assert isinstance(next_epoch, MakeEpoch)
        assert next_epoch.failures == failures + 1
    end = move(dataclasses.replace(tried, epoch=dataclasses.replace(TRAINING, failures=2)))
    assert isinstance(end, Finish)
    assert end.exit_code == 1
    assert "3 epochs in a row broke with all their nodes there and saved nothing, though all nodes leave" in end.reason


# Changes for the better.


def test_a_node_that_joins_waits_until_the_epoch_is_old_enough() -> None:
    seen = view(there("a"), there("b"), there("c"), epoch_since_s=50.0)
    assert move(seen, 109.0) == Wait(until_s=110.0, reason="training; other nodes wait to join")
    assert move(seen, 110.0) == RequestStop(reason="a step of 1 s takes 0.667 s on a, b, c")


@pytest.mark.parametrize(("step_s", "changes"), [(0.7, False), (0.701, False), (0.702, True), (None, False)])
def test_a_change_has_to_gain_enough(step_s: float | None, changes: bool) -> None:
    """Three nodes take 2/3 s, which is 95 % of 0.7018 s."""
    found = move(view(there("a"), there("b"), there("c"), step_s=step_s))
    assert isinstance(found, RequestStop) is changes


def test_nodes_that_cannot_be_reached_do_not_join() -> None:
    assert move(view(there("a"), there("b"), there("c", answered=False))) == Wait(until_s=None, reason="training")


def test_a_straggler_is_planned_for_as_another_type() -> None:
    """Two nodes at the pace of the slower one take 2 s; for a fast and a slow one there is a plan of 4/3 s."""
    slow = NodeView(info=node_info("b", node_type="slow"), since_s=0.0)
    assert move(view(there("a"), slow, step_s=2.0)) == RequestStop(reason="a step of 2 s takes 1.33 s on a, b as slow")
    assert move(view(there("a"), slow, step_s=1.34)) == Wait(
        until_s=None, reason="training; a, b as slow would gain less than 5%"
    )
    assert move(view(there("a"), slow, step_s=2.0, epoch_since_s=50.0)) == Wait(
        until_s=110.0, reason="training; another plan waits"
    )


def test_a_stop_that_was_asked_for_is_not_asked_for_again() -> None:
    seen = view(there("a"), there("b"), there("c"), stop_requested="c joins")
    assert move(seen) == Wait(until_s=None, reason="c joins")


# The end.


def test_the_run_ends_when_all_nodes_have_finished() -> None:
    done = [there("a", phase="finished"), there("b", phase="finished")]
    assert (
        move(view(*done))
        == move(view(*done, broken="too late"))
        == Finish(exit_code=0, reason="all ranks have finished")
    )
    assert not isinstance(move(view(done[0], there("b", phase="step"))), Finish)
