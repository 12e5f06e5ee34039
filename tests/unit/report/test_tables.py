"""Plans as people read them."""

import dataclasses
import io
from itertools import pairwise

import pytest
from rich.console import Console
from rich.table import Table

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import device_memory, memory_costs, plan_memory
from hetero.cost.prediction_range import StepRange
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.offload import Offload
from hetero.report.plan_wording import orders_of, range_of, shape_of
from hetero.report.tables.measurement import measurement_table
from hetero.report.tables.plan import PICTURE_COLUMNS, plan_picture, plan_table
from hetero.report.tables.prediction import fullest, prediction_table
from hetero.report.tables.static_memory import StaticBytes, static_memory_table
from hetero.units import GIB, MIB
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.unit.report.samples import interleaved_report


def uneven_plan() -> Plan:
    return plan(
        llama_model(num_layers=12),
        [
            replica(
                stage(layers=(0, 5), ranks=(0, 1), tp=2, sp=True, device="A100-40", depth=3),
                stage(layers=(5, 8), ranks=(2,), mbs=2, device="V100-16", depth=2),
                stage(layers=(8, 12), ranks=(3,), device="V100-16", depth=1),
                num_samples=12,
            ),
            replica(
                stage(
                    layers=(0, 8), ranks=(4, 5), dp=2, device="A100-40", depth=2, recompute="full",
                    recompute_num_layers=3,
                ),
                stage(layers=(8, 12), ranks=(6,), device="V100-16", depth=1, recompute="selective"),
                num_samples=4,
            ),
        ],
        idle_ranks=(7,),
    )  # fmt: skip


def rows(table: Table) -> list[list[str]]:
    """Cells as text, one list per row."""
    return [list(cells) for cells in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize("step_s", [0.0123, 1.0, 10.0, 123.0])
def test_a_range_has_three_digits(step_s: float) -> None:
    found = StepRange(step_s, {})
    shown = range_of(found).split(" to ")
    assert [float(each) for each in shown] == pytest.approx([found.low_s, found.high_s], rel=5e-3)
    assert all(len(each.lstrip("0.").replace(".", "")) == 3 and not each.endswith(".") for each in shown)


def test_the_table_has_a_row_per_stage() -> None:
    assert rows(plan_table(uneven_plan())) == [
        ["0", "12 (75%)", "0", "emb + 0-4", "0-1", "A100-40", "2", "1", "yes", "1", "12", "3", "-"],
        ["", "", "1", "5-7", "2", "V100-16", "1", "1", "-", "2", "6", "2", "-"],
        ["", "", "2", "8-11 + head", "3", "V100-16", "1", "1", "-", "1", "12", "1", "-"],
        ["1", "4 (25%)", "0", "emb + 0-7", "4-5", "A100-40", "1", "2", "-", "1", "2", "2", "full 3/8"],
        ["", "", "1", "8-11 + head", "6", "V100-16", "1", "1", "-", "1", "4", "1", "selective"],
    ]


def test_a_split_backward_is_told_beside_the_depth() -> None:
    stages = (stage(layers=(0, 3), ranks=(0,), depth=2), stage(layers=(3, 6), ranks=(1,), depth=1, delay=1))
    table = plan_table(plan(llama_model(), [replica(*stages, num_samples=2)]))
    assert [row[-2] for row in rows(table)] == ["2", "1+1"]
    assert table.columns[-2].header == "in\nflight\n+delay"
    assert plan_table(uneven_plan()).columns[-2].header == "in\nflight"


def test_replicas_are_set_apart_and_idle_ranks_are_told() -> None:
    table = plan_table(uneven_plan())
    assert [row.end_section for row in table.rows] == [False, False, True, False, True]
    assert table.title == "12 layers, sequence 16, global batch 16, fp32, 8 ranks"
    assert table.caption == "idle ranks: 7"


def test_the_table_fits_120_columns() -> None:
    console = Console(width=120, file=io.StringIO())
    assert console.measure(plan_table(uneven_plan())).maximum <= 120


def test_one_stage_holds_everything() -> None:
    whole = plan(llama_model(num_layers=1), [replica(stage(layers=(0, 1), ranks=(0,)))])
    assert rows(plan_table(whole))[0][3] == "emb + 0 + head"
    assert plan_table(whole).caption == "idle ranks: none"


def test_one_line_says_how_gradients_are_summed() -> None:
    sync = GradientSyncPlan(domains=((4, 5, 6), (3, 0, 1, 2)), bucket_numel=5_000_000)
    caption = plan_table(dataclasses.replace(uneven_plan(), gradient_sync=sync)).caption
    assert caption == "idle ranks: 7\ngradient sums: inside 4-6 | 0-3 first, then between them; buckets of 5 M"
    many = GradientSyncPlan(domains=tuple((rank,) for rank in range(8)))
    caption = plan_table(dataclasses.replace(uneven_plan(), gradient_sync=many)).caption
    assert isinstance(caption, str)
    assert caption.endswith("inside 0 | 1 | 2 | 3 | 4 | 5 | 2 more first, then between them")


def test_the_picture_shows_where_each_replica_cuts() -> None:
    assert plan_picture(uneven_plan()) == "\n".join(
        [
            "           ┌────────────────────────┬──────────────┬───────────────────┐",
            "replica 0  │ layers 0-4             │ layers 5-7   │ layers 8-11       │",
            "12 of 16   │ A100-40                │ V100-16      │ V100-16           │",
            "samples    │ ranks 0-1, tp 2        │ rank 2       │ rank 3            │",
            "           ├────────────────────────┴──────────────┼───────────────────┤",
            "replica 1  │ layers 0-7                            │ layers 8-11       │",
            "4 of 16    │ A100-40                               │ V100-16           │",
            "samples    │ ranks 4-5, dp 2                       │ rank 6            │",
            "           └───────────────────────────────────────┴───────────────────┘",
            "idle       rank 7",
        ]
    )


def box_widths(picture: str, line: int) -> list[int]:
    """Columns of each box, its left wall included."""
    return [len(text) + 1 for text in picture.splitlines()[line].split("│")[1:-1]]


@pytest.mark.parametrize("cuts", [(0, 1, 2, 32), (0, 16, 32), (0, 31, 32)])
def test_boxes_are_as_wide_as_their_layers(cuts: tuple[int, ...]) -> None:
    layers = list(pairwise(cuts))
    stages = [stage(layers=each, ranks=(s,)) for s, each in enumerate(layers)]
    widths = box_widths(plan_picture(plan(llama_model(num_layers=32), [replica(*stages)])), 1)
    columns_per_layer = widths[0] // (cuts[1] - cuts[0])
    assert widths == [columns_per_layer * (end - first) for first, end in layers]
    assert sum(widths) <= PICTURE_COLUMNS


def half_cut_plan() -> Plan:
    cuts = ((0, 2.5), (2.5, 3), (3, 3.5), (3.5, 5.5), (5.5, 12))
    stages = [stage(layers=held, ranks=(s,), device="V100-16") for s, held in enumerate(cuts)]
    halves = replica(*stages).with_stage(3, recompute="full", recompute_num_layers=2)
    whole = replica(stage(layers=(0, 2), ranks=(5,)), stage(layers=(2, 12), ranks=(6,)))
    return plan(llama_model(num_layers=12), [halves, whole])


def test_halves_of_layers_are_told() -> None:
    cells = rows(plan_table(half_cut_plan()))
    assert [row[3] for row in cells[:5]] == [
        "emb + 0-1 + 2 attn",
        "2 mlp",
        "3 attn",
        "3 mlp + 4 + 5 attn",
        "5 mlp + 6-11 + head",
    ]
    assert cells[3][-1] == "full 2/3", "halves count as layers there"
    assert shape_of(half_cut_plan()).startswith("1x (V100-16: 2½ | V100-16: ½ | V100-16: ½ | V100-16: 2 | V100-16: 6½)")


def test_the_picture_cuts_layers_in_half() -> None:
    assert plan_picture(half_cut_plan()).splitlines()[:5] == [
        "           ┌───────────────────┬───┬───┬───────────────┬───────────────────────────────────────────────────┐",
        "replica 0  │ 0-1 + 2 attn      │ … │ … │ 3 mlp + 4 + … │ layers 5 mlp + 6-11                               │",
        "4 of 8     │ V100-16           │ … │ … │ V100-16       │ V100-16                                           │",
        "samples    │ rank 0            │ 1 │ 2 │ rank 3        │ rank 4                                            │",
        "           ├───────────────┬───┴───┴───┴───────────────┴───────────────────────────────────────────────────┤",
    ]


def test_the_columns_of_a_layer_can_be_halved() -> None:
    stages = [stage(layers=held, ranks=(s,)) for s, held in enumerate(((0, 0.5), (0.5, 120)))]
    picture = plan_picture(plan(llama_model(num_layers=120), [replica(*stages)]))
    assert box_widths(picture, 1) == [1, 239]


def test_what_does_not_fit_a_narrow_box_is_shortened() -> None:
    stages = [stage(layers=(s, s + 1), ranks=(s,), device="RTX-2080Ti") for s in range(16)]
    picture = plan_picture(plan(llama_model(num_layers=16), [replica(*stages)])).splitlines()
    assert len({len(line) for line in picture}) == 1, "walls stay straight"
    assert picture[1].startswith("replica 0  │ 0   │ 1   │ 2   │")
    assert picture[2].startswith("4 of 4     │ RT… │ RT… │ RT… │")


def test_more_layers_than_columns() -> None:
    """One column per layer at least: the picture grows, and no box disappears."""
    stages = [stage(layers=(s, s + 1), ranks=(s,)) for s in range(120)]
    picture = plan_picture(plan(llama_model(num_layers=120), [replica(*stages)]))
    assert box_widths(picture, 1) == [1] * 120


def test_predictions_are_told_by_device_group() -> None:
    report = interleaved_report()
    table = prediction_table(report.simulation, report.memory, report.cluster, report.certainty.step)
    cells = rows(table)
    assert [row[2:5] for row in cells] == [
        ["0,2", "emb + 0-1 | 3-4", "A100-40"],
        ["1,3", "2 | 5 + head", "A100-40"],
        ["0", "emb + 0-2", "A100-40"],
        ["1", "3-5 + head", "A100-40"],
    ]
    assert cells[0][8] == "3 | 2"
    total = report.memory[0, 0].total + report.memory[0, 2].total
    assert cells[0][-1] == f"{total / GIB:.1f} of 40"
    assert isinstance(table.caption, str)
    assert table.caption.endswith("order: replicas 0-1: stages 0,2 | 1,3 in turns; replica 2: gpipe")


def test_the_fullest_device_holds_all_of_its_stages() -> None:
    report = interleaved_report()
    devices = device_memory(report.plan, report.memory)
    most = max(parts.total for parts in devices.values())
    assert fullest(report.memory, report.plan, report.cluster) == f"{most / (40 * GIB):.0%}"


def test_measured_memory_stands_beside_what_all_stages_of_a_device_take() -> None:
    report = interleaved_report()
    measured = [StaticBytes(weights=rank * MIB, gradients=0, optimizer=0) for rank in range(6)]
    cells = rows(static_memory_table(report.plan, measured, report.memory, {}))
    assert [row[:3] for row in cells[:4]] == [
        ["0", "0,2", "0"],
        ["0", "1,3", "1"],
        ["1", "0,2", "2"],
        ["1", "1,3", "3"],
    ]
    weights = report.memory[0, 1].weights + report.memory[0, 3].weights
    assert cells[1][3] == f"1.00 | {weights / MIB:.2f}"


def test_seconds_stand_beside_one_another_by_device_group() -> None:
    report = interleaved_report()
    cells = rows(measurement_table(report.simulation, report.simulation))
    assert [row[:3] for row in cells[:2]] == [["0", "0,2", "0-1 | 3-4"], ["0", "1,3", "2 | 5"]]
    assert len(cells) == 6


def test_the_shape_adds_up_what_devices_hold_in_turns() -> None:
    assert shape_of(interleaved_report().plan) == "2x (A100-40: 2 + 2 | A100-40: 1 + 1), 1x (A100-40: 3 | A100-40: 3)"


def test_the_usual_order_goes_without_saying() -> None:
    assert orders_of(uneven_plan()) == ""
    stages = [stage(layers=(s, s + 1), ranks=(s,)) for s in range(6)]
    each = [replica(*stages, num_samples=4 + r) for r in range(5)]
    many = plan(llama_model(), [dataclasses.replace(one, schedule="gpipe") for one in each])
    assert orders_of(many) == "replica 0: gpipe; replica 1: gpipe; replica 2: gpipe; and 2 more sorts"


def test_what_hosts_have_is_said_below_the_table() -> None:
    """Of each sort of replica once; and of a rank its host's bytes have a column."""
    first, second, third = (stage(layers=held, ranks=(rank,)) for rank, held in enumerate([(0, 2.5), (2.5, 5), (5, 6)]))
    offloads = [
        Offload(optimizer_from=-1, activations_until=1),
        Offload(optimizer_from=2.5, gradients_from=3, weights_from=4, speculate=True, activations_until=2.5),
        Offload(optimizer_from=6),
    ]
    made = sharded(plan(gpt2_model(), [replica(first, second, third).with_each_stage(offload=offloads)]))
    caption = plan_table(made).caption
    assert isinstance(caption, str)
    assert caption.splitlines()[-4:] == [
        "updated on hosts: replica 0: stage 0 from the embedding; stage 1 from the MLP of layer 2, previewed; "
        "stage 2 from the head",
        "gradients on hosts: replica 0: stage 1 from layer 3",
        "weights on hosts: replica 0: stage 1 from layer 4",
        "activations on hosts: replica 0: stage 0 through layer 1; stage 1 through the MLP of layer 2",
    ]
    costs = memory_costs(made)
    on_hosts = host_memory(made, costs)
    measured = [StaticBytes(weights=0, gradients=0, optimizer=0, host=rank * MIB) for rank in range(3)]
    cells = rows(static_memory_table(made, measured, plan_memory(made, costs), on_hosts))
    assert cells[1][-1] == f"1.00 | {on_hosts[0, 1].held / MIB:.2f}"
