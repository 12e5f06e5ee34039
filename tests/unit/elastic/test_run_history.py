from pathlib import Path

import pytest

from hetero.cli import main
from hetero.elastic.events import ElasticEvent, EventKind
from hetero.elastic.run_history import history, read_history
from hetero.errors import ConfigError
from hetero.report.elastic_run import ElasticRun, NodeState
from hetero.report.figures.elastic_run import elastic_figure_bytes
from hetero.report.page.elastic_page import elastic_page
from hetero.serialization import to_json


def event(
    time_s: float,
    node: str,
    kind: EventKind,
    *,
    epoch: int = 0,
    step: int = 0,
    committed: int = 0,
    nodes: tuple[str, ...] = (),
    detail: str = "",
) -> ElasticEvent:
    return ElasticEvent(
        time_s=1000 + time_s,
        node=node,
        kind=kind,
        since_change_s=time_s - max(noticed for noticed in (0, 10, 40) if time_s >= noticed),
        epoch=epoch,
        step=step,
        committed=committed,
        nodes=nodes,
        detail=detail,
    )


ALL, ONE = ("a", "b"), ("a",)

EVENTS = [
    event(0, "a", "agent_started"),
    event(1, "b", "agent_started"),
    event(2, "a", "plan", detail="2x (cpu: 4); plan solved, predicted step 0.1 s"),
    event(2, "a", "epoch_made", epoch=1, nodes=ALL, detail="the first"),
    event(2.5, "a", "forked", epoch=1, nodes=ALL),
    event(2.5, "b", "forked", epoch=1, nodes=ALL),
    event(4, "a", "first_step", epoch=1, step=1),
    event(4.5, "b", "first_step", epoch=1, step=1),
    event(6, "b", "progress", epoch=1, step=61, committed=60),
    event(8, "a", "published", epoch=1, step=60),
    event(8, "a", "progress", epoch=1, step=100, committed=98),
    event(10, "a", "detected", epoch=1, step=120, detail="node b is gone <&>"),
    event(10.1, "a", "waiting", epoch=1, detail="node b is gone <&>"),
    event(10.5, "a", "ranks_gone", epoch=1, step=120, committed=117),
    event(10.9, "a", "plan", epoch=1, detail="1x (cpu: 4); plan made ahead"),
    event(11, "a", "epoch_made", epoch=2, step=117, nodes=ONE, detail="without b"),
    event(11.2, "a", "forked", epoch=2, step=117, nodes=ONE),
    event(13, "a", "restored", epoch=2, step=117),
    event(14, "a", "first_step", epoch=2, step=118),
    event(20, "b", "agent_started"),
    event(30, "a", "progress", epoch=2, step=200, committed=198),
    event(40, "a", "stop_requested", epoch=2, step=250, detail="b is back"),
    event(41, "a", "stopped", epoch=2, step=251, committed=251),
    event(42, "a", "epoch_made", epoch=3, step=251, nodes=ALL, detail="b is back"),
    event(43, "a", "first_step", epoch=3, step=252),
    event(44, "b", "first_step", epoch=3, step=252),
    event(50, "b", "progress", epoch=3, step=300, committed=300),
    event(51, "a", "finished", detail="all ranks have finished"),
    event(51, "b", "finished", detail="all ranks have finished"),
]


@pytest.fixture
def run() -> ElasticRun:
    return history(EVENTS, name="gpt", origin="measured: by clocks")


def spans(run: ElasticRun, node: str) -> list[tuple[NodeState, float, float]]:
    return [(each.state, each.start_s, each.end_s) for each in run.spans if each.node == node]


def test_a_node_is_present_training_lost_idle(run: ElasticRun) -> None:
    assert run.nodes == ("a", "b")
    assert spans(run, "a") == [
        ("present", 0, 4.5),
        ("training", 4.5, 10),
        ("present", 10, 14),
        ("training", 14, 41),
        ("present", 41, 44),
        ("training", 44, 50),
        ("present", 50, 51),
    ]
    assert spans(run, "b") == [
        ("present", 1, 4.5),
        ("training", 4.5, 10),
        ("lost", 10, 20),
        ("idle", 20, 41),
        ("present", 41, 44),
        ("training", 44, 50),
        ("present", 50, 51),
    ]
    assert run.training_share == pytest.approx((5.5 + 27 + 6) / (51 - 4.5))


def test_a_log_that_ends_with_the_others_is_that_of_no_lost_node() -> None:
    ended = history([each for each in EVENTS if each.time_s < 1009], name="gpt", origin="")
    assert {each.state for each in ended.spans} == {"present", "training"}
    assert ended.ending == ""


def test_an_epoch_has_its_steps_and_its_plan(run: ElasticRun) -> None:
    first, second, third = run.epochs
    assert [each.start_step for each in run.epochs] == [0, 117, 251]
    assert [each.last_step for each in run.epochs] == [120, 251, 300]
    assert first.plan == "2x (cpu: 4); plan solved, predicted step 0.1 s"
    assert second.plan == third.plan == "1x (cpu: 4); plan made ahead"
    assert second.step_s == pytest.approx((41 - 14) / (251 - 118))
    assert (run.steps, run.committed, run.repeated) == (300, 300, 3)
    assert run.published == ((8, 60),)


def test_a_change_has_its_phases_from_the_moment_at_which_it_was_noticed(run: ElasticRun) -> None:
    loss, planned = run.changes
    assert (loss.epoch, loss.is_loss, loss.begin_s, loss.repeated) == (2, True, 10, 3)
    assert loss.phases == pytest.approx(
        {
            "end ranks": 0.5,
            "ask nodes, plan": 0.4,
            "agree on the epoch": 0.1,
            "fork": 0.2,
            "restore": 1.8,
            "first step": 1.0,
        }
    )
    assert loss.seconds == pytest.approx(4)
    assert (planned.is_loss, planned.repeated) == (False, 0)
    assert planned.phases == pytest.approx(
        {"finish and commit the step": 1.0, "agree on the epoch": 1.0, "first step": 1.0}
    )
    assert run.phases()[:2] == ["finish and commit the step", "end ranks"]


def test_a_loss_that_only_a_failed_rank_tells_of_is_one() -> None:
    """Of a node whose last rank has ended: there is nothing left that it would detect. It counts on from before."""
    alone = [
        event(0, "a", "agent_started"),
        event(2, "a", "epoch_made", epoch=1, nodes=ONE, detail="the first"),
        event(4, "a", "first_step", epoch=1, step=1),
        event(7, "a", "rank_failed", epoch=1, step=60, detail="rank 0 on node a: ended with the code 1"),
        event(7.5, "a", "plan", epoch=1, detail="1x (cpu: 4); plan made ahead"),
        event(7.6, "a", "epoch_made", epoch=2, step=58, nodes=ONE, detail="a rank failed"),
        event(7.8, "a", "forked", epoch=2, step=58, nodes=ONE),
        event(9, "a", "first_step", epoch=2, step=59),
    ]
    run = history(alone, name="gpt", origin="")
    (change,) = run.changes
    assert (change.is_loss, change.begin_s, change.repeated) == (True, 7, 2)
    assert change.phases == pytest.approx(
        {"ask nodes, plan": 0.5, "agree on the epoch": 0.1, "fork": 0.2, "first step": 1.2}
    )
    assert (run.epochs[0].end_s, run.epochs[0].last_step) == (7, 60)
    assert [each.text for each in run.notes] == ["rank failed: rank 0 on node a: ended with the code 1"]
    assert "1 loss, 0 planned" in elastic_page(run)


def test_a_straggler_is_told() -> None:
    detail = "node b computes 1.8 times as slowly as box should: it counts as box-slower-1.75"
    run = history([*EVENTS, event(46, "a", "straggler", epoch=3, detail=detail)], name="gpt", origin="")
    assert [(each.time_s, each.node, each.text) for each in run.notes] == [(46, "a", f"straggler: {detail}")]
    assert detail in elastic_page(run)


def test_what_a_leader_waits_for_is_told_once(run: ElasticRun) -> None:
    assert run.notes == ()


def test_the_page_has_all_of_it_and_loads_nothing(run: ElasticRun) -> None:
    page = elastic_page(run)
    assert page == elastic_page(run)
    for text in ("Measured: by clocks.", "2 nodes, 3 epochs, 51.0 s. The end: all ranks have finished.", "without b"):
        assert text in page
    assert "300 known to be committed; 3 done twice" in page
    assert "<svg" in page
    assert "src=" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_figure_tells_states_steps_and_what_was_done_again(run: ElasticRun) -> None:
    found = elastic_figure_bytes(run, "svg").decode()
    for text in ("measured: by clocks", "3 steps again", "lost", "idle", "in the store", "epoch 3, 2 nodes"):
        assert f">{text}</text>" in found
    assert elastic_figure_bytes(run, "png").startswith(b"\x89PNG")


def test_the_command_reads_the_logs_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for node in "ab":
        lines = (to_json(each).replace("\n", "") for each in EVENTS if each.node == node)
        (tmp_path / f"{node}.events.jsonl").write_text("\n".join(lines) + "\n")
    assert read_history(tmp_path, name="gpt", origin="").nodes == ("a", "b")
    for out in ("run.html", "run.svg"):
        assert main(["elastic", "report", str(tmp_path), "--out", str(tmp_path / out), "--name", "a run"]) == 0
        assert "a run" in (tmp_path / out).read_text()
        assert f"written to {tmp_path}/{out}\n" in capsys.readouterr().out
    assert main(["elastic", "report", str(tmp_path), "--out", str(tmp_path / "run.gif")]) == 2
    assert "must end in .html or .htm or .svg" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no event logs"):
        read_history(tmp_path / "nothing", name="", origin="")
