"""Checks that a plan fits a cluster: the number of ranks, their devices, and tensor parallelism inside nodes.

One rule per function, as in :mod:`hetero.plan.validate`. Rank r of the plan runs on device r of the cluster. Each rank
checks its own device again when it starts.
"""

from dataclasses import fields

from hetero.errors import PlanError
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec
from hetero.spec.devices import DeviceType


def check_every_device_has_a_rank(plan: Plan, cluster: ClusterSpec) -> None:
    """The plan names as many ranks, working or idle, as the cluster has devices."""
    if plan.world_size != cluster.num_devices:
        other = "make a plan for this cluster, or name the one that it was made for"
        lists = "list devices without work under idle_ranks, or " if plan.world_size < cluster.num_devices else ""
        raise PlanError(
            f"plan: it names {plan.world_size} ranks, the cluster has {cluster.num_devices} devices; {lists}{other}"
        )


def check_devices_match(plan: Plan, cluster: ClusterSpec) -> None:
    """Every rank of a stage is a device of the type that the stage asks for."""
    for r, s, stage in plan.stages():
        for rank in stage.ranks:
            found = cluster.device_of_rank(rank).name
            if found != stage.device:
                raise PlanError(
                    f"replica {r} stage {s}: it wants {stage.device}, but rank {rank} is a {found} on node "
                    f"{cluster.node_of_rank(rank)} ({cluster.node_type_of_rank(rank).name}); "
                    "give the stage ranks of its own device type"
                )


def check_descriptions_match(plan: Plan, cluster: ClusterSpec) -> None:
    """Plan and cluster describe a device of one name alike: a plan made for other figures is another plan."""
    for name in dict.fromkeys(stage.device for _, _, stage in plan.stages()):
        ours, theirs = plan.device_types.of(name), cluster.device_types.of(name)
        if ours != theirs:
            field = next(
                each.name for each in fields(DeviceType) if getattr(ours, each.name) != getattr(theirs, each.name)
            )
            raise PlanError(
                f"plan: it describes device {name} with another {field} than the cluster does: "
                f"{getattr(ours, field)} and {getattr(theirs, field)}; make a plan for this cluster, or correct the "
                "description"
            )


def check_tensor_parallelism_stays_inside_a_node(plan: Plan, cluster: ClusterSpec) -> None:
    """Every tensor-parallel group lies on one node: several collectives per layer are too much for any network."""
    for r, s, stage in plan.stages():
        for group in stage.tp_groups:
            nodes = sorted({cluster.node_of_rank(rank) for rank in group})
            if len(nodes) > 1:
                raise PlanError(
                    f"replica {r} stage {s}: the tp {stage.tp} group of ranks {list(group)} spans nodes {nodes}; "
                    "choose ranks of one node or a smaller tp"
                )


CHECKS = (
    check_every_device_has_a_rank,
    check_devices_match,
    check_descriptions_match,
    check_tensor_parallelism_stays_inside_a_node,
)


def check_plan_on_cluster(plan: Plan, cluster: ClusterSpec) -> None:
    """Applies all rules of this page to a legal ``plan``, and raises on the first one that it breaks.

    Raises:
        PlanError: another number of ranks, a stage on another device type, or tensor parallelism between nodes.
    """
    for check in CHECKS:
        check(plan, cluster)
