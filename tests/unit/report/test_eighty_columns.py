"""Every table on a terminal of 80 columns: nothing is wider, and every word of every cell is there in one piece."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console
from rich.table import Table

from hetero.commands.elastic import _status_table
from hetero.commands.sweep import _origins, _presets_table
from hetero.data.presets import preset_names, preset_path
from hetero.discovery.describe import describe
from hetero.discovery.facts import nodes_of
from hetero.discovery.report import _table
from hetero.doctor.checklist import print_diagnosis
from hetero.doctor.findings import Diagnosis, Finding
from hetero.elastic.job_store import JobState
from hetero.elastic.records import NodeReport, Notice, RankReport
from hetero.launch.hosts import invented_hosts
from hetero.plan.ir import Plan
from hetero.report.content import Report
from hetero.report.tables.devices import devices_table
from hetero.report.tables.fitting_table import LONGEST_WORD, FittingTable
from hetero.report.tables.host_memory import host_memory_table
from hetero.report.tables.hosts import hosts_table
from hetero.report.tables.launch import launch_table
from hetero.report.tables.measurement import measurement_table
from hetero.report.tables.plan import plan_picture, plan_table
from hetero.report.tables.planner_result import comparison_table
from hetero.report.tables.prediction import prediction_table
from hetero.serialization import load
from hetero.spec.cluster import ClusterSpec
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.helpers.elastic_epochs import epoch_of, node_info
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, stage
from tests.unit.discovery.samples import EIGHT_A100, FOUR_V100, gpu_node
from tests.unit.report.samples import (
    compared_report,
    half_cut_report,
    interleaved_report,
    mixed_report,
    offloaded_report,
    split_report,
)

ROOM = 80


def terminal() -> Console:
    return Console(width=ROOM, file=io.StringIO(), force_terminal=True, color_system=None)


def test_columns_that_lack_little_get_room_first() -> None:
    table = FittingTable("planner", "what it chose")
    table.add_row("uniform, fast", "one two three four five six seven eight nine ten eleven twelve thirteen fourteen")
    (console := terminal()).print(table)
    assert "uniform, fast" in shown_on(console)


def shown_on(console: Console) -> str:
    """What is on the terminal, which is as wide as it is and has cut nothing."""
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= ROOM
    assert "…" not in text
    return text


def check(table: Table) -> None:
    """Print it, and find every word of every cell."""
    console = terminal()
    console.print(table)
    found = set(shown_on(console).replace("│", " ").split())
    for column in table.columns:
        words = {word for cell in column.cells for word in str(cell).split() if len(word) <= LONGEST_WORD}
        assert words <= found, column.header


def plan_over(cluster: ClusterSpec) -> Plan:
    """Pipelines over one node of each type, as many as there are of all types; other ranks idle."""
    hosts = invented_hosts(cluster)
    by_type = [[host for host in hosts if host.node_type == each] for each in cluster.node_types]
    pipelines = list(zip(*by_type, strict=False))
    replicas = [
        replica(
            *(
                stage(layers=(8 * s, 8 * s + 8), ranks=host.ranks, dp=len(host.ranks), device=host.node_type.device)
                for s, host in enumerate(pipeline)
            ),
            num_samples=256,
        )
        for pipeline in pipelines
    ]
    used = {rank for pipeline in pipelines for host in pipeline for rank in host.ranks}
    idle = tuple(rank for rank in range(cluster.num_devices) if rank not in used)
    return plan(llama_model(num_layers=8 * len(by_type)), replicas, idle_ranks=idle)


@pytest.mark.parametrize("make", [mixed_report, half_cut_report, split_report, interleaved_report, offloaded_report])
def test_what_plan_simulate_and_show_print(make: Callable[[], Report]) -> None:
    report = make()
    check(prediction_table(report.simulation, report.memory, report.cluster, report.certainty.step))
    check(measurement_table(report.simulation, report.simulation))
    check(plan_table(report.plan))
    if (on_hosts := host_memory_table(report.plan, report.cluster)) is not None:
        check(on_hosts)


def test_what_plan_prints_of_other_planners() -> None:
    report = compared_report()
    assert report.result is not None
    check(comparison_table(report.result, report.others, report.cluster, ()))


@pytest.mark.parametrize("name", preset_names("cluster"))
def test_plans_and_launches_on_every_shipped_cluster(name: str) -> None:
    cluster = load(ClusterSpec, preset_path("cluster", name))
    made = plan_over(cluster)
    check(plan_table(made))
    check(launch_table(made, invented_hosts(cluster)))
    assert max(map(len, plan_picture(made, room=ROOM).splitlines())) <= ROOM
    if (hosts := hosts_table(cluster.node_types)) is not None:
        check(hosts)


def test_a_picture_has_less_than_a_column_per_layer_or_is_left_out() -> None:
    """Of 120 layers, and of so many stages that their boxes would be walls only."""
    few = [stage(layers=(first, first + 40), ranks=(first // 40,)) for first in (0, 40, 80)]
    lines = plan_picture(plan(llama_model(num_layers=120), [replica(*few)]), room=ROOM).splitlines()
    assert "layers 40-79" in lines[1]
    assert len({*map(len, lines)} - {0}) == 1
    assert 70 <= len(lines[0]) <= ROOM
    many = [stage(layers=(first, first + 1), ranks=(first,)) for first in range(30)]
    assert plan_picture(plan(llama_model(num_layers=30), [replica(*many)]), room=ROOM).startswith("no picture: ")


def test_devices_in_one_piece() -> None:
    table = devices_table(SHIPPED_DEVICES)
    check(table)
    console = terminal()
    console.print(table)
    assert shown_on(console).count("RTX-6000-Ada") == 1


def test_discovery_and_the_checklist() -> None:
    found = describe(nodes_of([gpu_node("a" * 30, *EIGHT_A100), gpu_node("v1", *FOUR_V100)]), date="2026-11-23")
    check(_table(found))
    console = terminal()
    todo = "install " + "x" * 90
    hosts = ("node-of-a-long-name-" * 3, "b")
    finding = Finding(severity="problem", subject="TransformerEngine", found="not there", todo=todo, hosts=hosts)
    print_diagnosis(Diagnosis(hosts=(), findings=(finding,)), console)
    assert shown_on(console).count("x") >= 90


def test_who_is_in_an_elastic_job() -> None:
    nodes = [node_info(f"node-{i}.rack.example.org", str(i)) for i in range(2)]
    ranks = (RankReport(epoch=1, rank=0, phase="step", step=1234, committed=1230, step_s=1.2345, compute_s=0.5),)
    state = JobState(
        token="t",
        nodes={node.name: node for node in nodes},
        leader="0",
        epoch=epoch_of(nodes),
        reports={nodes[0].name: NodeReport(node=nodes[0].name, incarnation="0", ended=0, ranks=ranks)},
        notices={nodes[1].name: Notice(node=nodes[1].name, reason="SLURM says that it ends at 12:30:00")},
    )
    check(_status_table("job", state))


def test_where_clusters_are_from() -> None:
    console = terminal()
    console.print(_presets_table())
    assert {word for each in _origins().values() for word in each.split()} <= set(shown_on(console).split())


def test_a_wide_table_goes_on_below_behind_its_keys() -> None:
    table = FittingTable(title="Wide", caption="all of it", keys=1)
    for c in range(20):
        table.add_column(f"column{c}")
    table.add_row(*(f"value{c}" for c in range(20)))
    check(table)
    console = terminal()
    console.print(table)
    lines = shown_on(console).splitlines()
    assert [line.split()[0] for line in lines if "value" in line] == ["value0"] * 3
    assert (lines[0].strip(), lines[-1].strip()) == ("Wide", "all of it")
    with_room = Console(width=400, file=io.StringIO())
    with_room.print(table)
    assert isinstance(with_room.file, io.StringIO)
    assert len(with_room.file.getvalue().splitlines()) == 7, "title, caption, one row, a head, three lines"
