"""A prediction as JSON: the step with its range, MFU, memory, and what would settle it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hetero.cost.capacity import capacity_bytes
from hetero.cost.host_memory import host_memory_of_nodes
from hetero.cost.measured_utilization import utilization_warnings
from hetero.cost.memory import PlanMemory, device_memory
from hetero.cost.model_flops import Products, Utilization, overall_mfu
from hetero.cost.simulation.simulator import Simulation
from hetero.planner.certainty import Certainty
from hetero.report.tables.certainty import CommandsOf, commands_for
from hetero.spec.cluster import ClusterSpec

if TYPE_CHECKING:
    from hetero.planner.plan_cluster import PlanResult


def prediction_json(
    simulation: Simulation,
    memory: PlanMemory,
    cluster: ClusterSpec,
    certainty: Certainty,
    utilizations: Mapping[Products, Utilization],
    commands_of: CommandsOf,
) -> dict[str, Any]:
    """The figures that ``hetero plan`` and ``hetero simulate`` print: seconds, bytes, shares from 0 to 1."""
    plan = simulation.plan
    return {
        "step_s": simulation.step_s,
        "step_low_s": certainty.step.low_s,
        "step_high_s": certainty.step.high_s,
        "samples_per_s": simulation.samples_per_s,
        "tokens_per_s": simulation.tokens_per_s,
        "bubble_share": simulation.bubble_share,
        "confidence": simulation.confidence.name.lower(),
        "mfu": overall_mfu(utilizations) if utilizations else None,
        "devices": [
            {
                "device": products.device,
                "arithmetic": products.arithmetic,
                "num_devices": found.num_devices,
                "mfu": found.mfu,
                "computing": found.computing,
            }
            for products, found in utilizations.items()
        ],
        "warnings": list(utilization_warnings(utilizations)),
        "memory": [
            {
                "replica": r,
                "stages": plan.replicas[r].group_of(s),
                "device": plan.replicas[r].stages[s].device,
                "bytes": parts.total,
                "capacity_bytes": capacity_bytes(plan.replicas[r].stages[s], cluster),
            }
            for (r, s), parts in device_memory(plan, memory).items()
        ],
        "host_memory": [
            {
                "node": node,
                "bytes": memory.named(),
                "capacity_gib": cluster.node_type_of_node(node).usable_host_memory_gib,
            }
            for node, memory in host_memory_of_nodes(plan, cluster).items()
        ],
        "rivals": [
            {"name": each.name, "ratio": each.ratio, "certain_from": each.certain_from, "is_certain": each.is_certain}
            for each in certainty.rivals
        ],
        "measurements": [
            {
                "what": each.what,
                "commands": list(commands_for(each, commands_of)),
                "step_low_s": each.settled.low_s,
                "step_high_s": each.settled.high_s,
            }
            for each in certainty.measurements
        ],
    }


def bounds_json(result: "PlanResult") -> dict[str, Any]:
    """What the planner knows of plans that it did not find: seconds, and gaps as shares from 0 to 1.

    ``formula`` is about the planner's own formula and templates, ``any_plan`` about every plan by the simulator.
    """
    return {
        "formula": {
            "best_s": None if result.score is None else result.score.step_s,
            "none_below_s": None if result.score is None else result.bound_s,
            "gap": None if result.score is None else result.gap,
        },
        "any_plan": {"none_below_s": result.lower_bound_s, "gap": result.gap_to_any},
        "rings_with_one_interface_s": None if result.rings is None else result.rings.step_s,
        "finished": result.finished,
    }
