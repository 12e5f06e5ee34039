"""Plan a cluster: who holds which layers, and how much faster that is than the same degrees everywhere.

    python examples/plan_a_cluster.py [OUT.json]

Four A100 with 40 GB in one node and four V100 with 16 GB in another; `hetero plan` does the same from files. No torch.
"""

import sys
from pathlib import Path

from hetero.commands.again import profile_run
from hetero.cost.model_flops import utilizations
from hetero.cost.wanted_profile import WantedProfile
from hetero.data import shipped_links
from hetero.data.cost_models import model_costs
from hetero.planner.certainty import certainty_of
from hetero.planner.plan_cluster import plan_cluster
from hetero.planner.problem import Problem
from hetero.planner.reference.yardsticks import best_uniform
from hetero.report.tables.plan import plan_picture
from hetero.report.tables.planner_result import result_lines
from hetero.serialization import save
from hetero.spec.cluster import ClusterSpec, Links
from hetero.spec.link import Link
from hetero.spec.model_import import load_model

MODEL = Path(__file__).parents[1] / "scripts/presets/models/opt-350m.yaml"

# Links inside a node as somebody measured them, and 25 Gbit/s Ethernet between the two.
published = shipped_links()
cluster = ClusterSpec(
    node_types=(
        published.node_type("A100-40", gpus_per_node=4),
        published.node_type("V100-16", gpus_per_node=4),
    ),
    links=Links(between_nodes=Link(bandwidth_gb_per_s=2.9, latency_us=30)),
)

# What a layer costs on a device in fp16: what was published of its kernels. In fp32 there are measured profiles of it.
model = load_model(MODEL)
costs = model_costs(model, seq_length=2048, precision="fp16", where=cluster)

problem = Problem(cluster=cluster, costs=costs, global_batch_size=256, time_limit_s=5)
uniform = best_uniform(problem)
result = plan_cluster(problem, yardsticks=[uniform])
print(plan_picture(result.plan), end="\n\n")
certainty = certainty_of(result.simulation, problem.topology, costs, result.runners_up)


def commands_of(wanted: WantedProfile) -> tuple[str, str]:
    """What measures layers, and what takes the measurements here."""
    measuring, profile = profile_run(wanted, model=str(MODEL))
    return measuring, f"model_costs(..., profiles=[Path('{profile}')])"


for line in result_lines(result, certainty, utilizations(result.simulation, costs), commands_of):
    print(line)

if uniform.best is not None:
    ratio = uniform.best.step_s / result.simulation.step_s
    print(f"the best uniform plan, {uniform.name}: {uniform.best.step_s:.4g} s per step, {ratio:.2f} times as long")

out = Path(sys.argv[1]) if sys.argv[1:] else Path("plan.json")
save(result.plan, out)
print(f"written to {out}; look at it with: hetero show {out} --schedule")
