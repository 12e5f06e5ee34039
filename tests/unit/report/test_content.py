"""What a report says before it is drawn."""

import dataclasses

from hetero.report.cluster_figure import _run_texts as run_texts
from hetero.report.content import NUM_HUES, named
from hetero.report.nodes import node_boxes
from hetero.units import GIB
from tests.helpers.plans import plan, replica, stage
from tests.unit.report.samples import (
    MODEL,
    cluster,
    compared_report,
    fleet_report,
    many_sorts_report,
    mixed_report,
    report_of,
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


def test_a_row_says_what_its_devices_hold_of_all_their_stages() -> None:
    """And a box of the cluster, which stages its devices have."""
    cuts = ((0, 1), (1, 3), (3, 4), (4, 6))
    apart = [stage(layers=c, ranks=(s,), device="A100-40", depth=4) for s, c in enumerate(cuts)]
    spec = cluster(("fast", "A100-40", 4, 1))
    plain = report_of(spec, [replica(*apart, num_samples=4)])
    turns = [dataclasses.replace(each, ranks=(s % 2,)) for s, each in enumerate(apart)]
    made = plan(MODEL, [replica(*turns, num_samples=4)], idle_ranks=(2, 3))
    report = dataclasses.replace(plain, simulation=dataclasses.replace(plain.simulation, plan=made))
    held = [report.memory[0, s].total for s in range(4)]
    assert [row.memory.total for row in report.rows] == held
    assert [row.device_bytes for row in report.rows] == [held[0] + held[2], held[1] + held[3]] * 2
    (box,) = node_boxes(report)
    assert [(run.first, run.size, run.stage) for run in box.runs] == [(0, 1, 0), (1, 1, 1), (2, 2, None)]
    assert run_texts(report, 0, 1)[:2] == [
        ["replica 0 · stages 1 3", "r0 · stages 1 3", "r0 · s1 3"],
        ["layers 1-2, 4-5", "L 1-2, 4-5", "1-2, 4-5"],
    ]


def test_few_replicas_have_a_colour_each_and_many_one_per_group() -> None:
    few, many = mixed_report(), fleet_report()
    assert few.hue_per_replica
    assert [few.hue(r) for r in range(2)] == [0, 1]
    assert few.owner(1) == "replica 1"
    assert len(many.plan.replicas) > NUM_HUES
    assert {many.hue(r) for r in range(12)} == {0}
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
