"""Simulate a plan that is written by hand, find its best cut, and draw the step: a trace and a figure.

    python examples/simulate_and_draw.py [FOLDER]

A V100 and an A100 share twelve layers over a slow link. No torch.
"""

import json
import sys
from pathlib import Path

from hetero.cost.memory import plan_memory
from hetero.cost.network import Topology
from hetero.cost.simulation.simulator import simulate
from hetero.data.cost_models import model_costs
from hetero.plan.ir import Plan, Replica, Stage
from hetero.plan.validate import validate
from hetero.planner.certainty import certainty_of
from hetero.report.content import Report
from hetero.report.figures.catalogue import figure_bytes
from hetero.report.trace import chrome_trace
from hetero.spec.cluster import ClusterSpec, Links, NodeType
from hetero.spec.link import Link
from hetero.spec.model_import import load_model

PRESETS = Path(__file__).parents[1] / "scripts/presets"
folder = Path(sys.argv[1]) if sys.argv[1:] else Path()

model = load_model(PRESETS / "models/gpt-200m.yaml")
cluster = ClusterSpec(
    node_types=tuple(NodeType(name=device, device=device, gpus_per_node=1) for device in ("V100-16", "A100-40")),
    links=Links(between_nodes=Link(bandwidth_gb_per_s=1.2, latency_us=30)),
)
costs = model_costs(model, seq_length=2048, precision="fp32", where=cluster)


def cut_at(layer: int) -> Plan:
    """Two stages; the first one keeps four microbatches in flight, so that the link has time."""
    first = Stage(first_layer=0, end_layer=layer, ranks=(0,), device="V100-16", micro_batch_size=1, in_flight=4)
    last = Stage(first_layer=layer, end_layer=12, ranks=(1,), device="A100-40", micro_batch_size=1, in_flight=1)
    plan = Plan(
        model=model,
        seq_length=2048,
        global_batch_size=16,
        replicas=(Replica(num_samples=16, stages=(first, last)),),
    )
    validate(plan)
    return plan


simulations = {layer: simulate(cut_at(layer), cluster, costs) for layer in range(1, 7)}
for layer, simulation in simulations.items():
    print(f"{layer} layers on the V100: {simulation.step_s:.3f} s per step")
best = min(simulations.values(), key=lambda simulation: simulation.step_s)

report = Report(
    model_name="gpt-200m",
    cluster_name="a V100 and an A100",
    cluster=cluster,
    costs=costs,
    simulation=best,
    memory=plan_memory(best.plan, costs),
    certainty=certainty_of(best, Topology(cluster), costs),
)
(folder / "timeline.svg").write_bytes(figure_bytes(report, "timeline", "svg"))
(folder / "trace.json").write_text(json.dumps(chrome_trace(best, costs)), encoding="utf-8")
print(f"drawn: {folder / 'timeline.svg'}, and {folder / 'trace.json'} for ui.perfetto.dev")
