"""Plans on emulated clusters: predicted against executed steps, and how much slow links cost.

    python -m tests.bench.bench_emulation plans       predicted and executed step of every plan below
    python -m tests.bench.bench_emulation link        plain 1F1B and deeper 1F1B against the bound, c/t from 0.1 to 1
    python -m tests.bench.bench_emulation zones       8 V100 and 4 A100 on 5 Gbit/s, GPT 2.6B
    python -m tests.bench.bench_emulation room        A100, V100 and RTX 3090 in one room, OPT-350M

Everything is emulated on this machine's processor (:mod:`hetero.emulation`): the schedules, transfers and collectives
really run, their durations are those of profiles and links. Ratios are of steps of one and the same run of this script.
"""

import argparse
import dataclasses
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

warnings.filterwarnings("ignore")

from hetero.runtime import cpu_backend  # noqa: E402

cpu_backend.install()

from hetero.cost.cost_model import CostModel  # noqa: E402
from hetero.cost.network import Topology, transfer_cost  # noqa: E402
from hetero.cost.pipeline_period import smallest_depths  # noqa: E402
from hetero.cost.runtime_model import HETERO  # noqa: E402
from hetero.cost.simulation.simulator import simulate  # noqa: E402
from hetero.data.cost_models import model_costs  # noqa: E402
from hetero.emulation.options import EmulationOptions  # noqa: E402
from hetero.emulation.ranks.local_launch import EmulatedLaunch, run_emulated  # noqa: E402
from hetero.emulation.records import EmulatedRun  # noqa: E402
from hetero.plan.ir import Plan, Precision, Replica  # noqa: E402
from hetero.plan.reshard import transfers_by_phase  # noqa: E402
from hetero.planner.plan_cluster import plan_cluster  # noqa: E402
from hetero.planner.problem import Problem  # noqa: E402
from hetero.planner.reference.yardsticks import yardsticks  # noqa: E402
from hetero.runtime.options import DataParallelOptions  # noqa: E402
from hetero.serialization import load  # noqa: E402
from hetero.spec.cluster import ClusterSpec, Links, NodeType, ZonePair  # noqa: E402
from hetero.spec.link import Link  # noqa: E402
from hetero.spec.model import ModelSpec  # noqa: E402
from hetero.spec.model_import import load_model  # noqa: E402
from tests.helpers.models import gpt2_model  # noqa: E402
from tests.helpers.plans import plan, replica, stage  # noqa: E402
from tests.helpers.synthetic_profiles import cost_model, nodes, profile  # noqa: E402

NUM_CORES = len(os.sched_getaffinity(0))

PRESETS = Path(__file__).parents[2] / "scripts/presets"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, and where it runs."""

    name: str
    plan: Plan
    cluster: ClusterSpec
    costs: CostModel
    time_scale: float

    def run(self, num_steps: int) -> EmulatedRun:
        emulated = EmulatedLaunch(
            plan=self.plan,
            cluster=self.cluster,
            costs=self.costs,
            options=EmulationOptions(time_scale=self.time_scale, seq_length=16),
            data_parallel=DataParallelOptions(
                bucket_numel=self.costs.runtime.bucket_numel,
                overlap_param_gather=self.costs.runtime.overlaps_param_gather,
            ),
            num_steps=num_steps,
        )
        return run_emulated(emulated, timeout_s=1200)

    @property
    def predicted_s(self) -> float:
        return simulate(self.plan, self.cluster, self.costs).step_s


def priced(
    model: ModelSpec,
    *,
    seq_length: int | None = None,
    precision: Precision = "fp32",
    overlaps_param_gather: bool = False,
) -> CostModel:
    return model_costs(
        model,
        seq_length=seq_length or model.max_position_embeddings,
        precision=precision,
        data_sheets=precision != "fp32",
        runtime=dataclasses.replace(HETERO, overlaps_param_gather=overlaps_param_gather),
    )


def cluster_of(*kinds: tuple[str, int, str], gb_per_s: float = 2.9, zones_gb_per_s: float = 0.6) -> ClusterSpec:
    """Nodes of (device, devices, zone); 10 us inside and 30 us between them, 1 ms between zones."""
    inside = Link(bandwidth_gb_per_s=50.0, latency_us=10.0)
    zones = list(dict.fromkeys(zone for _, _, zone in kinds))
    link = Link(bandwidth_gb_per_s=zones_gb_per_s, latency_us=1000.0)
    return ClusterSpec(
        node_types=tuple(
            NodeType(name=f"node{i}", device=device, gpus_per_node=count, zone=zone, inside_node=inside)
            for i, (device, count, zone) in enumerate(kinds)
        ),
        links=Links(
            between_nodes=Link(bandwidth_gb_per_s=gb_per_s, latency_us=30.0),
            zone_pairs=tuple(ZonePair(zones=pair, link=link) for pair in pairwise(zones)),
        ),
    )


LAYER_S = 0.005
"""Processor seconds of a forward and a backward of one small layer, about and rather more than less."""


def case(name: str, described: Plan, cluster: ClusterSpec, costs: CostModel) -> Case:
    """With a time scale at which this machine, and each rank, is some 30 to 40 % busy."""
    most = total_s = 0.0
    for r, s, each in described.stages():
        num_microbatches = described.replicas[r].num_microbatches(s)
        # Tensor-parallel ranks also wait for one another.
        work_s = LAYER_S * num_microbatches * each.num_layers * (1 if each.tp == 1 else 2)
        total_s += work_s * len(each.ranks)
        most = max(most, work_s / (num_microbatches * costs.of(each).microbatch_s))
    step_s = simulate(described, cluster, costs).step_s
    return Case(
        name=name,
        plan=described,
        cluster=cluster,
        costs=costs,
        time_scale=round(3.2 * max(total_s / NUM_CORES / step_s, most), 2),
    )


def planned(
    name: str,
    cluster: ClusterSpec,
    costs: CostModel,
    batch: int,
    *,
    others: Sequence[str] = ("uniform",),
    distributed_optimizer: bool = False,
) -> Iterator[Case]:
    """The planner's plan and some of the yardsticks'."""
    problem = Problem(
        cluster=cluster,
        costs=costs,
        global_batch_size=batch,
        distributed_optimizer=distributed_optimizer,
        time_limit_s=30.0,
    )
    yield case(name, plan_cluster(problem).plan, cluster, costs)
    if not others:
        return
    for other in yardsticks(problem, limit_s=10.0):
        if other.name in others and other.best is not None:
            yield case(f"{name}, {other.name}", other.best.plan, cluster, costs)


def many_plans() -> Iterator[Case]:
    """Uniform and uneven plans, two zones, three device types, unequal microbatches and depths."""
    small = priced(load_model(PRESETS / "models/opt-350m.yaml"))
    two = cluster_of(("A100-40", 2, "a"), ("V100-16", 2, "a"))
    yield case(
        "microbatches 1, 4, 2",
        by_hand(
            small,
            replica(
                stage(layers=(0, 8), ranks=(0,), device="A100-40", recompute="selective"),
                stage(layers=(8, 12), ranks=(2, 3), device="V100-16", dp=2, mbs=2),
                stage(layers=(12, 24), ranks=(1,), device="A100-40", mbs=2),
                num_samples=48,
            ),
        ),
        two,
        small,
    )
    yield case(
        "two replicas of unequal depth",
        by_hand(
            small,
            replica(
                stage(layers=(0, 16), ranks=(0,), device="A100-40", mbs=2, recompute="selective"),
                stage(layers=(16, 24), ranks=(2, 3), device="V100-16", dp=2),
                num_samples=28,
            ),
            replica(stage(layers=(0, 24), ranks=(1,), device="A100-40"), num_samples=20),
        ),
        two,
        small,
    )
    yield case(
        "the same, 1 sample before dp 2",
        by_hand(
            small,
            replica(
                stage(layers=(0, 16), ranks=(0,), device="A100-40", recompute="selective"),
                stage(layers=(16, 24), ranks=(2, 3), device="V100-16", dp=2),
                num_samples=28,
            ),
            replica(stage(layers=(0, 24), ranks=(1,), device="A100-40"), num_samples=20),
        ),
        two,
        small,
    )
    yield from interleaved(two, small)
    alike = cluster_of(("A100-40", 4, "a"))
    yield from planned("4 A100", alike, small, 32, others=())
    yield from planned("2 A100, 2 V100", two, small, 32, others=("uniform", "whale", "autohet"))
    three = cluster_of(("A100-40", 2, "a"), ("V100-16", 2, "a"), ("RTX-3090", 2, "a"))
    yield from planned("three types", three, small, 48, others=("uniform", "whale", "autohet", "harp"))
    zones = cluster_of(("A100-40", 2, "a"), ("V100-16", 4, "b"), zones_gb_per_s=0.3)
    for each in planned("two zones", zones, small, 32):
        yield each
        yield dataclasses.replace(each, name=f"{each.name}, plain 1F1B", plan=plain(each.plan))
    for each in planned("three types, distributed optimizer", three, small, 48, others=(), distributed_optimizer=True):
        yield each
        beside = priced(small.model, overlaps_param_gather=True)
        yield case("the same, weights gathered beside the forward", each.plan, three, beside)


def interleaved(cluster: ClusterSpec, costs: CostModel) -> Iterator[Case]:
    """Ranks that hold two stages each, with few microbatches; once as one of two replicas."""
    yield case(
        "interleaved, 2 x 2 stages",
        by_hand(
            costs,
            replica(
                stage(layers=(0, 8), ranks=(0, 1), device="A100-40", dp=2, depth=3, recompute="selective"),
                stage(layers=(8, 12), ranks=(2, 3), device="V100-16", dp=2, depth=2),
                stage(layers=(12, 20), ranks=(0, 1), device="A100-40", dp=2, depth=2, recompute="selective"),
                stage(layers=(20, 24), ranks=(2, 3), device="V100-16", dp=2, depth=1),
                num_samples=16,
            ),
        ),
        cluster,
        costs,
    )
    yield case(
        "interleaved beside plain 1F1B",
        by_hand(
            costs,
            replica(
                stage(layers=(0, 8), ranks=(0,), device="A100-40", depth=3, recompute="selective"),
                stage(layers=(8, 12), ranks=(2,), device="V100-16", depth=2),
                stage(layers=(12, 20), ranks=(0,), device="A100-40", depth=2, recompute="selective"),
                stage(layers=(20, 24), ranks=(2,), device="V100-16", depth=1),
                num_samples=8,
            ),
            replica(
                stage(layers=(0, 16), ranks=(1,), device="A100-40", depth=2, recompute="selective"),
                stage(layers=(16, 24), ranks=(3,), device="V100-16", depth=1),
                num_samples=8,
            ),
        ),
        cluster,
        costs,
    )


def by_hand(costs: CostModel, *replicas: Replica) -> Plan:
    described = plan(costs.model, list(replicas))
    return dataclasses.replace(described, seq_length=costs.seq_length)


def plain(described: Plan) -> Plan:
    """The same plan with the depths of plain 1F1B: as many in flight as stages are left."""
    replicas = {}
    for r, each in enumerate(described.replicas):
        depths = [
            # Counted in the stage's own microbatches, as many samples as plain 1F1B would have in flight.
            max(1, -(-(len(each.stages) - s) * max_size(each) // stage.samples_per_microbatch))
            for s, stage in enumerate(each.stages)
        ]
        replicas[r] = each.with_each_stage(in_flight=depths)
    return described.with_replicas(replicas)


def max_size(each: Replica) -> int:
    """Samples of the replica's largest microbatch."""
    return max(s.samples_per_microbatch for s in each.stages)


def report_plans(num_steps: int) -> None:
    rows = []
    print(f"{'plan':46} {'ranks':>5} {'predicted s':>12} {'executed s':>11} {'error':>8} {'scale':>6} {'late ms':>8}")
    for each in many_plans():
        run, predicted_s = each.run(num_steps), each.predicted_s
        error = predicted_s / run.step_s - 1
        rows.append(abs(error))
        print(
            f"{each.name:46} {each.plan.world_size:5} {predicted_s:12.4f} {run.step_s:11.4f} {error:+8.2%} "
            f"{each.time_scale:6.2f} {run.lateness_s * 1e3:8.1f}",
            flush=True,
        )
    print(f"{len(rows)} plans: mean error {sum(rows) / len(rows):.2%}, worst {max(rows):.2%}")


def report_link(num_steps: int) -> None:
    """Four equal stages, 32 microbatches, one slow boundary after another: c/t from 0.1 to 1."""
    model = gpt2_model(num_layers=4, tied_embeddings=False)
    forward_s, backward_s, num_samples = 0.1, 0.2, 32
    costs = cost_model(model, [profile(model, block_s=(forward_s, backward_s))])
    times = [forward_s + backward_s] * 4
    print(f"{'c/t':>5} {'bound s':>8} {'plain 1F1B':>11} {'ours':>7} {'plain/bound':>12} {'ours/bound':>11} {'depths'}")
    for ratio in [tenth / 10 for tenth in range(1, 11)]:
        num_bytes = 4 * costs.seq_length * model.hidden_size
        # Devices of one node have a wire of their own for each neighbour, as the formula wants it.
        cluster = nodes(1, gpus_per_node=4, gb_per_s=num_bytes / (ratio * times[0]) / 1e9)
        transfers = [ratio * times[0]] * 3
        period_s = max(*times, *transfers)
        deep = smallest_depths(microbatch_s=times, boundary_s=transfers, period_s=period_s)
        bound_s = sum(times) + 2 * sum(transfers) + (num_samples - 1) * period_s
        executed = []
        for depths in ([4, 3, 2, 1], deep):
            stages = [
                stage(layers=(s, s + 1), ranks=(s,), device="A100-40", depth=depth) for s, depth in enumerate(depths)
            ]
            described = plan(model, [replica(*stages, num_samples=num_samples)])
            executed.append(case("", described, cluster, costs).run(num_steps).step_s)
        shallow_s, deep_s = executed
        print(
            f"{ratio:5.1f} {bound_s:8.3f} {shallow_s:11.3f} {deep_s:7.3f} {shallow_s / bound_s:12.3f} "
            f"{deep_s / bound_s:11.3f} {deep}",
            flush=True,
        )


def report_comparison(cluster: ClusterSpec, costs: CostModel, batch: int, num_steps: int, time_limit_s: float) -> None:
    """The planner's plan, the same with plain 1F1B, and the best uniform plan, all executed."""
    problem = Problem(cluster=cluster, costs=costs, global_batch_size=batch, time_limit_s=time_limit_s)
    ours = plan_cluster(problem).plan
    found = [("this planner", ours), ("the same, plain 1F1B", plain(ours))]
    uniform = {each.name: each.best for each in yardsticks(problem) if each.is_uniform and each.best}
    name = min(uniform, key=lambda name: uniform[name].step_s)
    found.append((f"best uniform ({name})", uniform[name].plan))
    runs = []
    for name, described in found:
        each = case(name, described, cluster, costs)
        run = each.run(num_steps)
        runs.append(run)
        print(
            f"{name:40} predicted {each.predicted_s:8.3f} s, executed {run.step_s:8.3f} s, "
            f"{run.step_s / runs[0].step_s:.3f}x this planner's; late {run.lateness_s * 1e3:.0f} ms; "
            f"losses {', '.join(f'{loss:.6f}' for loss in run.losses)}",
            flush=True,
        )
    bound_s = max(bound(ours, r, cluster, costs) for r in range(len(ours.replicas)))
    print(
        f"sum_s (t_s + 2 c_s) + (M - 1) max(t, c) of its slowest replica: {bound_s:.3f} s; "
        f"executed is {runs[0].step_s / bound_s - 1:+.1%}"
    )


def bound(described: Plan, r: int, cluster: ClusterSpec, costs: CostModel) -> float:
    """The fill of a replica's pipeline and a period of its slowest stage or boundary for each further microbatch."""
    each = described.replicas[r]
    size = max_size(each)
    times = [costs.of(s).microbatch_s * size / s.samples_per_microbatch for s in each.stages]
    row_bytes = described.model.hidden_size * costs.element_bytes
    transfers = []
    for here, after in pairwise(each.stages):
        slices = size // min(here.samples_per_microbatch, after.samples_per_microbatch)
        topology = Topology(cluster)
        by_phase = transfers_by_phase(here, after, seq_length=described.seq_length)
        slowest_s = max(transfer_cost(each, topology, row_bytes=row_bytes).seconds for each in by_phase)
        transfers.append(slices * slowest_s)
    return sum(times) + 2 * sum(transfers) + (each.num_samples // size - 1) * max(*times, *transfers)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plans", "link", "zones", "room"])
    parser.add_argument("--steps", type=int, default=2, help="emulated steps of each plan")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds to plan (zones and room)")
    args = parser.parse_args(argv)
    match args.what:
        case "plans":
            report_plans(args.steps)
        case "link":
            report_link(args.steps)
        case "zones":
            cluster = load(ClusterSpec, PRESETS / "clusters/two_zones_5gbit.yaml")
            costs = priced(load_model(PRESETS / "models/gpt-2.6b.yaml"), precision="fp16")
            report_comparison(cluster, costs, 1024, args.steps, args.time_limit)
        case "room":
            cluster = load(ClusterSpec, PRESETS / "clusters/one_room.yaml")
            costs = priced(load_model(PRESETS / "models/opt-350m.yaml"))
            report_comparison(cluster, costs, 128, args.steps, args.time_limit)


if __name__ == "__main__":
    main(sys.argv[1:])
