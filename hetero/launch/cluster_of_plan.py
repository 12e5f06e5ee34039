"""Finds the cluster that a plan is launched on: the given one, or that which the plan was made for."""

import dataclasses
from pathlib import Path

from hetero.errors import ConfigError, PlanError
from hetero.launch.hosts import nodes_in_words
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec


def cluster_of_launch(plan: Plan, given: ClusterSpec | None, *, plan_file: Path, file: Path | None) -> ClusterSpec:
    """The ``given`` cluster, else the one that the plan carries.

    Args:
        file: that of the given cluster, for messages.

    Raises:
        ConfigError: there is neither.
        PlanError: the plan was made for a cluster of other nodes.
    """
    made_for = plan.provenance.cluster if plan.provenance is not None else None
    if given is None:
        if made_for is None:
            raise ConfigError(f"{plan_file}: it does not say for which cluster it was made; add --cluster CLUSTER.yaml")
        return made_for
    if made_for is not None and _nodes(made_for) != _nodes(given):
        raise PlanError(
            f"{plan_file}: it was made for {nodes_in_words(made_for)}; {file} has {nodes_in_words(given)}; give the "
            "cluster that it was made for, or plan for this one"
        )
    return given


def changes_since(plan: Plan, cluster: ClusterSpec) -> str:
    """What of ``cluster`` has other figures than when the plan was made, in words; empty if nothing has.

    Such a plan is as right as it was, but its prediction is not, and another plan may be faster.
    """
    if plan.provenance is None:
        return ""
    before, now = plan.provenance.cluster.without_node_names(), cluster.without_node_names()
    if before == now:
        return ""
    changed = [
        field.name for field in dataclasses.fields(now) if getattr(before, field.name) != getattr(now, field.name)
    ]
    return (
        f"the cluster has other {' and '.join(changed)} than when the plan was made; its prediction is of before, and "
        f"this plans again: {plan.provenance.shown_command}"
    )


def _nodes(cluster: ClusterSpec) -> list[tuple[str, int]]:
    """What decides where ranks land: the device and the number of them of every node, in order."""
    return [(each.device, each.gpus_per_node) for each in cluster.node_types for _ in range(each.count)]
