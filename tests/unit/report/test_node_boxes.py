"""Nodes that hold the same become one box, and no device is lost on the way."""

from collections.abc import Callable

import pytest

from hetero.report.content import Report
from hetero.report.figures.node_boxes import NodeBox, node_boxes
from tests.helpers.plans import replica, stage
from tests.unit.report.samples import (
    cluster,
    fleet_report,
    interleaved_report,
    long_report,
    many_sorts_report,
    mixed_report,
    report_of,
)


def held(box: NodeBox) -> list[tuple[int, int, int | None, int | None]]:
    return [(run.first, run.size, run.replica, run.stage) for run in box.runs]


def test_a_box_tells_who_sits_on_it() -> None:
    fast, slow = node_boxes(mixed_report())
    assert (fast.node_type.name, fast.nodes, fast.first_rank) == ("fast", (0,), 0)
    assert held(fast) == [(0, 2, 0, 1), (2, 2, 1, 1)]
    assert held(slow) == [(0, 1, 0, 0), (1, 1, 1, 0), (2, 2, None, None)]


def test_equal_nodes_fold() -> None:
    fast, slow = node_boxes(fleet_report())
    assert fast.nodes == tuple(range(12))
    assert held(fast) == [(0, 4, 0, 0), (4, 4, 0, 1)]
    assert slow.nodes == (12, 13, 14)
    assert held(slow) == [(0, 4, None, None)]


def test_replicas_with_colours_of_their_own_do_not_fold() -> None:
    assert len(node_boxes(fleet_report(num_nodes=3))) == 3 + 1
    assert len(node_boxes(many_sorts_report())) == 12


def test_one_stage_over_several_nodes_folds() -> None:
    whole = replica(stage(layers=(0, 6), ranks=range(8), dp=8, device="A100-40"), num_samples=8)
    (box,) = node_boxes(report_of(cluster(("fast", "A100-40", 2, 4)), [whole]))
    assert box.nodes == (0, 1, 2, 3)


def test_a_device_with_several_stages_is_one_run() -> None:
    (box,) = node_boxes(interleaved_report())
    assert held(box) == [(0, 1, 0, 0), (1, 1, 0, 1), (2, 1, 1, 0), (3, 1, 1, 1), (4, 1, 2, 0), (5, 1, 2, 1)]


@pytest.mark.parametrize("make", [mixed_report, fleet_report, long_report, many_sorts_report, interleaved_report])
def test_every_device_is_in_one_box(make: Callable[[], Report]) -> None:
    report = make()
    boxes = node_boxes(report)
    assert sum(len(box.nodes) * box.node_type.gpus_per_node for box in boxes) == report.cluster.num_devices
    for box in boxes:
        assert sum(run.size for run in box.runs) == box.node_type.gpus_per_node
    assert sorted(node for box in boxes for node in box.nodes) == list(
        range(sum(node_type.count for node_type in report.cluster.node_types))
    )
