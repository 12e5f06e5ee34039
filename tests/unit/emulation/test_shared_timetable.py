"""Meetings and wires: the last to come decides, first come first served."""

from pathlib import Path

import pytest

from hetero.emulation.cluster.shared_timetable import Appointment, Occupation, SharedTimetable

NOTHING = Occupation(seconds=0.0)


def timetable(path: Path, **meetings: int) -> SharedTimetable:
    path.touch()
    return SharedTimetable(path, meetings=meetings, wires=["wire", "other"])


def test_a_meeting_starts_when_the_last_one_is_ready(tmp_path: Path) -> None:
    here = timetable(tmp_path / "timetable", sum=3)
    for ready_s in (1.0, 5.0, 2.0):
        here.come("sum", 1, ready_s=ready_s, takes=Occupation(seconds=0.5))
    assert here.appointment("sum", 1) == Appointment(5.0, 5.5)


def test_a_busy_wire_is_waited_for(tmp_path: Path) -> None:
    here = timetable(tmp_path / "timetable", a=1, b=1, c=1)
    here.come("a", 1, ready_s=1.0, takes=Occupation(seconds=2.0, wires=(("wire", 1.5),)))
    here.come("b", 1, ready_s=1.0, takes=Occupation(seconds=1.0, wires=(("wire", 1.0), ("other", 1.0))))
    here.come("c", 1, ready_s=0.0, takes=Occupation(seconds=1.0, wires=(("other", 1.0),)))
    assert here.appointment("a", 1) == Appointment(1.0, 3.0)
    assert here.appointment("b", 1) == Appointment(2.5, 3.5), "the wire is free before the latency is over"
    assert here.appointment("c", 1) == Appointment(3.5, 4.5)


def test_two_processes_see_one_timetable(tmp_path: Path) -> None:
    here = timetable(tmp_path / "timetable", message=2)
    there = SharedTimetable(tmp_path / "timetable", meetings={"message": 2}, wires=["wire", "other"])
    here.come("message", 1, ready_s=1.0, takes=NOTHING)
    there.come("message", 1, ready_s=4.0, takes=NOTHING)
    assert here.appointment("message", 1) == there.appointment("message", 1) == Appointment(4.0, 4.0)


def test_a_meeting_takes_place_again_while_the_last_one_is_still_read(tmp_path: Path) -> None:
    here = timetable(tmp_path / "timetable", sum=1)
    for number in (1, 2):
        here.come("sum", number, ready_s=float(number), takes=NOTHING)
    assert here.appointment("sum", 1).start_s == 1.0
    assert here.appointment("sum", 2).start_s == 2.0
    here.come("sum", 3, ready_s=3.0, takes=NOTHING)
    assert here.appointment("sum", 3).start_s == 3.0


def test_an_unknown_meeting_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        timetable(tmp_path / "timetable", sum=1).come("other", 1, ready_s=0.0, takes=NOTHING)
