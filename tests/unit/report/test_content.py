"""What a report says before it is drawn."""

from hetero.report.content import MOST_NAMED_REPLICAS, named
from hetero.report.figures.colours import hue_of
from hetero.units import GIB
from tests.unit.report.samples import (
    compared_report,
    fleet_report,
    interleaved_report,
    many_sorts_report,
    mixed_report,
)


def test_replicas_that_are_alike_share_their_rows() -> None:
    report = mixed_report()
    assert report.groups == ((0, 1),)
    assert [(row.members, row.index, row.stage.device) for row in report.rows] == [
        ((0, 1), 0, "V100-16"),
        ((0, 1), 1, "A100-40"),
    ]
    assert [row.capacity_bytes for row in report.rows] == [16 * GIB, 40 * GIB]
    assert report.group_title(report.rows[0]) == "replicas 0-1, 5 samples each"


def test_a_row_has_the_memory_of_its_fullest_member() -> None:
    report = mixed_report()
    assert [row.memory.total for row in report.rows] == [
        max(report.memory[r, s].total for r in range(2)) for s in range(2)
    ]


def test_stages_that_the_same_devices_hold_share_a_row() -> None:
    report = interleaved_report()
    assert report.groups == ((0, 1), (2,))
    assert [(row.members, row.indices, row.title) for row in report.rows] == [
        ((0, 1), (0, 2), "stages 0,2"),
        ((0, 1), (1, 3), "stages 1,3"),
        ((2,), (0,), "stage 0"),
        ((2,), (1,), "stage 1"),
    ]
    assert [row.place for row in report.rows] == [(0, 2), (1, 2)] * 2
    assert report.rows[0].memory.total == report.memory[0, 0].total + report.memory[0, 2].total


def test_few_replicas_have_a_colour_each_and_many_one_per_group() -> None:
    few, many = mixed_report(), fleet_report()
    assert few.names_each_replica
    assert [hue_of(few, r) for r in range(2)] == [0, 1]
    assert few.owner(1) == "replica 1"
    assert len(many.plan.replicas) > MOST_NAMED_REPLICAS
    assert {hue_of(many, r) for r in range(12)} == {0}
    assert many.owner(11) == "group 0"
    assert many.group_title(many.rows[0]) == "group 0: replicas 0-11, 8 samples each"


def test_rows_are_drawn_by_whole_groups() -> None:
    assert len(mixed_report().drawn_rows(1)) == 2, "one group in any case"
    assert [row.group for row in many_sorts_report().drawn_rows(5)] == [0, 1, 2, 3, 4]


def test_the_best_uniform_plan_is_the_fastest_of_them() -> None:
    report = compared_report()
    name, best = report.best_uniform() or ("", None)
    assert name == "uniform, fast"
    assert best is not None
    assert best.step_s == 2 * report.simulation.step_s
    assert mixed_report().best_uniform() is None


def test_long_lists_of_numbers_are_told_by_their_length() -> None:
    assert named("rank", [3]) == "rank 3"
    assert named("rank", [0, 1, 2, 5]) == "ranks 0-2,5"
    assert named("rank", range(0, 100, 2)) == "50 ranks"
