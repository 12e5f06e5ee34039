"""Which differences between the cluster of a launch and that of its plan change the prediction."""

import dataclasses

from hetero.launch.cluster_of_plan import changes_since
from hetero.spec.cluster import ClusterSpec
from tests.unit.launch.plans import CLUSTER, made_for


def test_nodes_of_other_names_change_nothing() -> None:
    """A job that is requeued discovers other nodes of the same kind."""
    named = [
        dataclasses.replace(each, nodes=tuple(f"{each.name}{i}" for i in range(each.count)))
        for each in CLUSTER.node_types
    ]
    renamed = ClusterSpec(node_types=tuple(named), links=CLUSTER.links)
    assert renamed != CLUSTER
    assert changes_since(made_for(CLUSTER), renamed) == ""
    costlier = [dataclasses.replace(each, price_per_hour=1.0) for each in named]
    assert "the cluster has other node_types than" in changes_since(
        made_for(CLUSTER), ClusterSpec(node_types=tuple(costlier), links=CLUSTER.links)
    )
