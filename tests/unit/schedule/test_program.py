"""The text form of programs, and the order in which a host issues them."""

import pytest

from hetero.errors import ScheduleError
from hetero.schedule.actions import UPDATE, Action, ActionKind, parse_row
from hetero.schedule.program import NO_REPLICA, Point, Program, QueuedAction, parse_programs

TEXT = """\
replica 1, stages 0 2
compute  0F0 2B0[2RECV_B0] UPDATE[REDUCE2]
0SEND_F  0SEND_F0[0F0]
2RECV_B  2RECV_B0
reduce   REDUCE0[2B0@5.5] REDUCE2[2B0@-1]
gather   GATHER2[UPDATE]<0F0@-1 GATHER0[UPDATE]<0F0@5.5"""


def test_a_program_prints_as_it_parses() -> None:
    (program,) = parse_programs(TEXT)
    assert str(program) == TEXT
    assert (program.replica, program.stages) == (1, (0, 2))
    assert program.queues["compute"][1] == QueuedAction(
        Action(2, ActionKind.B, 0), after=(Point(Action(2, ActionKind.RECV_B, 0)),)
    )
    assert program.queues["reduce"][0].after == (Point(Action(2, ActionKind.B, 0), 5.5),)
    assert program.queues["gather"][0].before == (Point(Action(0, ActionKind.F, 0), -1),)


def test_comments_and_empty_lines_do_not_count() -> None:
    text = f"# two groups\n\n{TEXT}\n\n# the other\nreplica 1, stages 1\ncompute 1F0 1B0 UPDATE\n"
    programs = parse_programs(text)
    assert [program.stages for program in programs] == [(0, 2), (1,)]
    assert parse_programs("\n".join(map(str, programs))) == programs


@pytest.mark.parametrize("text", ["1B7", "0F0@2", "0F0@2.5", "3B1@-1", "UPDATE", "REDUCE4"])
def test_a_point_prints_as_it_parses(text: str) -> None:
    assert str(Point.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["0F0", "0B0[0RECV_B0]", "0B0[0RECV_B0,0RECV_B1]", "GATHER2[UPDATE]<0F0@-1", "GATHER2<0F0@0,2F0@4"]
)
def test_a_step_prints_as_it_parses(text: str) -> None:
    assert str(QueuedAction.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("compute 0F0", r"not a queue of a program: 'compute 0F0', expected e\.g\. compute 0F0 0B0 UPDATE"),
        ("replica 0, stages 0\nsend 0SEND_F0", "not a queue of a program: 'send 0SEND_F0'"),
        ("replica 0, stages\ncompute 0F0", "not a queue of a program: 'replica 0, stages'"),
        (
            "replica 0, stages 0\ncompute 0F0[",
            r"not an action of a queue: '0F0\[', expected e\.g\. 0B0\[0RECV_B0\] or GATHER2",
        ),
        ("replica 0, stages 0\ncompute 0F0[]", r"not an action of a queue: '0F0\[\]'"),
        ("replica 0, stages 0\ncompute F0", "not an action: 'F0'"),
        ("replica 0, stages 0\nreduce REDUCE0[0B0@top]", "not a position: 'top' in '0B0@top', expected a layer"),
    ],
)
def test_other_texts_are_no_programs(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_programs(text)


def test_the_host_posts_the_receives_that_come_next_behind_a_compute_and_its_sends() -> None:
    row = parse_row("0RECV_B0 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B0 0B1")
    program = Program.of_row(row, replica=0, stages=(0,), num_microbatches=[2, 2])
    assert program.queues["0RECV_B"] == (QueuedAction.parse("0RECV_B0"), QueuedAction.parse("0RECV_B1[0F1]"))
    assert program.host_order == (*row, Action.parse("UPDATE"))
    assert parse_programs(str(program))[0].host_order == program.host_order


def test_the_update_waits_for_the_last_sum() -> None:
    reduces = (QueuedAction.parse("REDUCE1[0B0@3]"), QueuedAction.parse("REDUCE4[0B0@0]"))
    row = parse_row("0F0 0B0")
    program = Program.of_row(row, replica=0, stages=(0,), num_microbatches=[1], beside={"reduce": reduces})
    assert program.queues["compute"][-1] == QueuedAction.parse("UPDATE[REDUCE4]")
    alone = Program.of_row(row, replica=0, stages=(0,), num_microbatches=[1])
    assert set(alone.queues) == {"compute"}
    assert alone.queues["compute"][-1] == QueuedAction.parse("UPDATE")


def test_a_rank_that_idles_has_a_program_too() -> None:
    idle = Program(replica=NO_REPLICA, stages=(), queues={"compute": (QueuedAction.parse("UPDATE"),)})
    assert str(idle) == "idle\ncompute  UPDATE"
    assert parse_programs(str(idle)) == [idle]
    assert idle.host_order == (UPDATE,)


def test_a_program_that_computes_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"the program of replica 0, stages \[0, 2\] has no queue compute"):
        parse_programs("replica 0, stages 0 2\n0SEND_F  0SEND_F0")
