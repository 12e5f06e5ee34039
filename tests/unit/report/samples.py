"""Reports to look at: small models on clusters that have a bit of everything."""

import dataclasses
from typing import Any

from hetero.cost.memory import plan_memory
from hetero.cost.network import Topology
from hetero.cost.runtime_model import HETERO
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs
from hetero.plan.ir import Replica
from hetero.plan.offload import Offload, hosts_update
from hetero.planner.certainty import certainty_of
from hetero.planner.cover.cover import CoverScore
from hetero.planner.listed.listed_plans import TooLarge
from hetero.planner.plan_cluster import PlanResult
from hetero.planner.reference.yardsticks import Yardstick
from hetero.planner.scoring import ScoredPlan
from hetero.report.content import Report
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.host import HostProfile, UpdateRate
from hetero.spec.link import Link
from hetero.units import GIB
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.synthetic_profiles import cost_model, profile

LINK = Link(bandwidth_gb_per_s=10, latency_us=10)

MODEL = llama_model()


def cluster(*node_types: tuple[str, str, int, int] | tuple[str, str, int, int, str]) -> ClusterSpec:
    """``(name, device, GPUs per node, nodes[, zone])`` per node type."""
    return ClusterSpec(
        node_types=tuple(
            NodeType(
                name=name, device=device, gpus_per_node=gpus, count=count, inside_node=LINK,
                zone=zone[0] if zone else "default",
            )
            for name, device, gpus, count, *zone in node_types
        ),
        links=Links(between_nodes=LINK),
    )  # fmt: skip


def report_of(spec: ClusterSpec, replicas: list[Replica], *, idle: tuple[int, ...] = (), **overrides: Any) -> Report:
    planned = plan(MODEL, replicas, idle_ranks=idle)
    if hosts_update(stage for _, _, stage in planned.stages()):
        planned = sharded(planned)
    costs = model_costs(MODEL, seq_length=16, precision="fp32", data_sheets=True)
    simulation = simulate(planned, spec, costs)
    parts = {
        "model_name": "small",
        "cluster_name": "room",
        "cluster": spec,
        "costs": costs,
        "simulation": simulation,
        "memory": plan_memory(planned, costs),
        "certainty": certainty_of(simulation, Topology(spec), costs),
    }
    return Report(**{**parts, **overrides})


MIXED = cluster(("fast", "A100-40", 4, 1), ("slow", "V100-16", 4, 1))


def mixed_report(**overrides: Any) -> Report:
    """Two replicas that are alike, each across both nodes, and two idle ranks."""
    twins = [
        replica(
            stage(layers=(0, 2), ranks=(4 + r,), device="V100-16", depth=2, recompute="full"),
            stage(layers=(2, 6), ranks=(2 * r, 2 * r + 1), tp=2, sp=True, device="A100-40", depth=1),
            num_samples=5,
        )
        for r in range(2)
    ]
    return report_of(MIXED, twins, idle=(6, 7), **overrides)


def half_cut_report() -> Report:
    """Stages that end between the attention and the MLP of a layer."""
    stages = (
        stage(layers=(0, 2.5), ranks=(4,), device="V100-16", depth=3),
        stage(layers=(2.5, 3), ranks=(5,), device="V100-16", depth=2),
        stage(layers=(3, 6), ranks=(0, 1), tp=2, sp=True, device="A100-40", depth=1),
    )
    return report_of(MIXED, [replica(*stages, num_samples=6)], idle=(2, 3, 6, 7))


SHORT = TooLarge(device="V100-16", tp=2, num_layers=3, needed_bytes=18 * GIB, capacity_bytes=16 * GIB)


def compared_report(**overrides: Any) -> Report:
    """:func:`mixed_report` as the planner's answer, with three yardsticks of which one does not fit."""
    ours = mixed_report()
    slower = dataclasses.replace(ours.simulation, step_s=2 * ours.simulation.step_s)
    slowest = dataclasses.replace(ours.simulation, step_s=3 * ours.simulation.step_s)
    result = PlanResult(
        plan=ours.plan,
        simulation=ours.simulation,
        memory=ours.memory,
        score=CoverScore(compute_s=0.9, sync_s=0.1, milli_price=0),
        bound_s=0.95,
        num_templates=1234,
        planning_s=1.5,
        finished=False,
    )
    others = (
        Yardstick(name="uniform", best=ScoredPlan(plan=ours.plan, simulation=slowest, memory=ours.memory)),
        Yardstick(name="uniform, fast", best=ScoredPlan(plan=ours.plan, simulation=slower, memory=ours.memory)),
        Yardstick(name="harp", best=None, closest=SHORT),
    )
    return mixed_report(**{"result": result, "others": others, **overrides})


def fleet_report(num_nodes: int = 12) -> Report:
    """As many replicas that are alike as there are fast nodes, and slow nodes in another zone that idle."""
    spec = cluster(("fast", "A100-40", 8, num_nodes), ("slow", "V100-16", 4, 3, "far"))
    replicas = [
        replica(
            stage(layers=(0, 3), ranks=range(8 * r, 8 * r + 4), dp=4, device="A100-40", depth=2),
            stage(layers=(3, 6), ranks=range(8 * r + 4, 8 * r + 8), tp=4, mbs=4, device="A100-40", depth=1),
            num_samples=8,
        )
        for r in range(num_nodes)
    ]
    return report_of(spec, replicas, idle=tuple(range(8 * num_nodes, 8 * num_nodes + 12)))


def long_report() -> Report:
    """A step of so many microbatches that its middle is left out."""
    stages = (
        stage(layers=(0, 3), ranks=(0,), device="A100-40", depth=2),
        stage(layers=(3, 6), ranks=(1,), device="A100-40", depth=1),
    )
    return report_of(cluster(("fast", "A100-40", 2, 1)), [replica(*stages, num_samples=200)])


def split_report() -> Report:
    """A pipeline whose stages split their backward."""
    stages = (
        stage(layers=(0, 3), ranks=(0,), device="A100-40", depth=2, delay=0),
        stage(layers=(3, 6), ranks=(1,), device="A100-40", depth=1, delay=2),
    )
    return report_of(cluster(("fast", "A100-40", 2, 1)), [replica(*stages, num_samples=6)])


def interleaved_report() -> Report:
    """Two replicas that are alike, of two device groups with two stages each, and one GPipe beside them."""
    twins = [
        replica(
            *(
                stage(layers=layers, ranks=(2 * r + s % 2,), device="A100-40", depth=depth)
                for s, (layers, depth) in enumerate([((0, 2), 3), ((2, 3), 2), ((3, 5), 2), ((5, 6), 1)])
            ),
            num_samples=4,
        )
        for r in range(2)
    ]
    apart = (
        stage(layers=(0, 3), ranks=(4,), depth=2, device="A100-40"),
        stage(layers=(3, 6), ranks=(5,), device="A100-40"),
    )
    last = dataclasses.replace(replica(*apart, num_samples=2), schedule="gpipe")
    return report_of(cluster(("fast", "A100-40", 6, 1)), [*twins, last])


def many_sorts_report() -> Report:
    """Twelve replicas of which no two are alike, on nodes of one device."""
    replicas = [replica(stage(layers=(0, 6), ranks=(r,), device="A100-40"), num_samples=1 + r) for r in range(12)]
    return report_of(cluster(("one", "A100-40", 1, 12)), replicas)


def cpu_report() -> Report:
    """Two stages on the host's processor, whose memory nobody states."""
    as_profiled = dataclasses.replace(HETERO, implementation=None)
    costs = cost_model(MODEL, [profile(MODEL, device="cpu", micro_batch_sizes=(1, 2))], runtime=as_profiled)
    spec = cluster(("laptop", "cpu", 2, 1))
    planned = plan(MODEL, [replica(stage(layers=(0, 4), ranks=(0,)), stage(layers=(4, 6), ranks=(1,)))])
    simulation = simulate(planned, spec, costs)
    return Report(
        model_name="small",
        cluster_name="laptop",
        cluster=spec,
        costs=costs,
        simulation=simulation,
        memory=plan_memory(planned, costs),
        certainty=certainty_of(simulation, Topology(spec), costs),
    )


def offloaded_report() -> Report:
    """One stage of two leaves its end to its host."""
    copy = Link(bandwidth_gb_per_s=20, latency_us=10)
    rates = (UpdateRate(threads=1, elements_per_s=1e8),)
    host = HostProfile(source="a test", memory_gib=64, updates=rates, to_device=copy, to_host=copy)
    fast, slow = MIXED.node_types
    spec = dataclasses.replace(MIXED, node_types=(fast, dataclasses.replace(slow, host=host)))
    first = stage(layers=(0, 3), ranks=(0,), device="A100-40")
    pipeline = replica(first, stage(layers=(3, 6), ranks=(4,), device="V100-16"), num_samples=8)
    left = pipeline.with_stage(1, offload=Offload(optimizer_from=4))
    return report_of(spec, [left], idle=(1, 2, 3, 5, 6, 7))
