"""The **structure** of a plan: what its replicas are made of, which is everything but layers, recomputation, samples,
depths and delays. Of plans with the same one it is enough to climb from one."""

from hetero.plan.ir import Plan
from hetero.planner.problem import Problem

PipelineStructure = tuple[tuple[int, int, int, int], ...]
"""Of each stage of a replica node type, tp, dp and micro_batch_size."""

PlanStructure = tuple[PipelineStructure, ...]
"""Of all replicas, whatever their order."""


def structure_of(plan: Plan, problem: Problem) -> PlanStructure:
    """What the replicas of ``plan`` are made of. Devices of one name may have more memory on nodes of another type, or
    slower links."""
    return tuple(
        sorted(
            tuple(
                (problem.node_type_of(stage.ranks[0]).index, stage.tp, stage.dp, stage.micro_batch_size)
                for stage in replica.stages
            )
            for replica in plan.replicas
        )
    )
