"""Which node of an allocation is of which node type, by what Slurm says of nodes and has given the job on them."""

import dataclasses
import itertools
import re
from collections.abc import Sequence

import pytest

from hetero.errors import ConfigError
from hetero.launch.slurm_nodes import place_nodes
from hetero.slurm.controller import AllocatedNode, SlurmNode
from hetero.spec.cluster import ClusterSpec, NodeType

A100 = NodeType(name="fast", device="A100-40", gpus_per_node=2)
V100 = NodeType(name="slow", device="V100-16", gpus_per_node=4, count=2)
GPUS = ClusterSpec(node_types=(A100, V100))
CPUS = ClusterSpec(
    node_types=(
        NodeType(name="fast", device="cpu", gpus_per_node=2),
        NodeType(name="slow", device="cpu", gpus_per_node=1, count=2),
    )
)


def node(
    name: str,
    component: int = 0,
    *,
    marks: str = "all",
    has: dict[str, int] | None = None,
    indices: dict[str, tuple[int, ...]] | None = None,
    **gpus: int,
) -> AllocatedNode:
    """A node of a job that has these GPUs there, of those that the node ``has``."""
    of_type = {gpu_type.removeprefix("untyped"): count for gpu_type, count in gpus.items()}
    site = SlurmNode(
        name=name,
        address=f"{name}.address",
        gpus=has if has is not None else of_type,
        features=frozenset(marks.split(",")),
        partitions=frozenset(),
    )
    return AllocatedNode(node=site, component=component, gpus=of_type, gpu_indices=indices or {})


def assigned(
    cluster: ClusterSpec, *nodes: AllocatedNode, hosts: Sequence[str] = (), components: Sequence[str] = ()
) -> str:
    """``fast=a slow=b,c``, and in which order the plan counts them."""
    placed = place_nodes(cluster, nodes, hosts=hosts, components=components)
    assert [each.host.node for each in placed] == list(range(len(placed)))
    by_type = itertools.groupby(placed, key=lambda each: each.host.node_type.name)
    return " ".join(f"{name}={','.join(each.host.name for each in of_type)}" for name, of_type in by_type)


def refused(
    cluster: ClusterSpec, *nodes: AllocatedNode, hosts: Sequence[str] = (), components: Sequence[str] = ()
) -> str:
    with pytest.raises(ConfigError) as caught:
        place_nodes(cluster, nodes, hosts=hosts, components=components)
    return str(caught.value)


def test_the_type_of_gpus_decides_in_any_order_of_nodes_and_components() -> None:
    kinds = {"a1": {"a100": 2}, "v1": {"v100": 4}, "v2": {"v100": 4}}
    for order in itertools.permutations(kinds):
        for components in ((0, 0, 0), (0, 1, 2), (0, 0, 1)):
            nodes = [node(name, at, **kinds[name]) for name, at in zip(order, components, strict=True)]
            slow = ",".join(name for name in order if name != "a1")
            assert assigned(GPUS, *nodes) == f"fast=a1 slow={slow}"


def test_the_number_of_gpus_decides_where_a_site_has_no_types() -> None:
    assert assigned(GPUS, node("x", untyped=4), node("y", untyped=2), node("z", untyped=4)) == "fast=y slow=x,z"


def test_more_gpus_than_the_plan_needs_are_enough() -> None:
    mixed = node("m1", v100=4, a100=1, indices={"v100": (1, 2, 3, 4), "a100": (0,)})
    placed = place_nodes(GPUS, [node("a1", a100=8), node("v1", v100=4), mixed])
    assert [(each.host.name, each.visible_gpus) for each in placed] == [("a1", ()), ("v1", ()), ("m1", (1, 2, 3, 4))]


def test_a_mixed_node_is_what_the_plan_lacks() -> None:
    nodes = [node("m1", v100=4, a100=2), node("v1", v100=4), node("v2", v100=4)]
    assert assigned(GPUS, *nodes) == "fast=m1 slow=v1,v2"


def test_names_of_nodes_in_the_cluster_file_decide_where_they_are_those_of_the_allocation() -> None:
    named = ClusterSpec(
        node_types=(
            dataclasses.replace(CPUS.node_types[0], nodes=("c",)),
            dataclasses.replace(CPUS.node_types[1], nodes=("a", "b")),
        )
    )
    assert assigned(named, node("a"), node("b"), node("c")) == "fast=c slow=a,b"
    assert "does not say which of its nodes (a, b, d)" in refused(named, node("a"), node("b"), node("d"))


@pytest.mark.parametrize("marks", ["all,slow", "slow,ib"])
def test_a_feature_or_a_partition_called_like_a_node_type_decides(marks: str) -> None:
    nodes = [node("x", 0, marks=marks), node("y", 0, marks=marks), node("z", 1, marks="all,fast")]
    assert assigned(CPUS, *nodes) == "fast=z slow=x,y"


def test_the_components_are_in_the_order_of_the_file_if_nothing_else_is_known() -> None:
    assert assigned(CPUS, node("x", 0), node("y", 1), node("z", 1)) == "fast=x slow=y,z"
    said = refused(CPUS, node("x", 0), node("y", 0), node("z", 1))
    assert said == (
        "this allocation of Slurm does not say which of its nodes (x, y, z) is of which type (1 x fast (2 cpu), 2 x "
        "slow (1 cpu)); name them: --hosts fast=NODE slow=NODE,..."
    )


def test_a_script_and_a_user_may_say_it() -> None:
    nodes = [node("x", 0), node("y", 0), node("z", 1)]
    assert assigned(CPUS, *nodes, components=("slow", "fast")) == "fast=z slow=x,y"
    assert assigned(CPUS, *nodes, hosts=("slow=z,x", "fast=y")) == "fast=y slow=z,x"
    assert "--components slow: must name the node type of each of the job's 2 components" in refused(
        CPUS, *nodes, components=("slow",)
    )
    wrong = [node("a1", 0, a100=2), node("v1", 1, v100=4), node("v2", 1, v100=4)]
    assert "the plan needs 1 node of 'fast' with 2 x A100-40" in refused(GPUS, *wrong, hosts=("fast=v1", "slow=v2,a1"))


def test_one_node_type_may_be_in_several_components() -> None:
    one = ClusterSpec(node_types=(V100,))
    assert assigned(one, node("v2", 0, v100=4), node("v1", 1, v100=4)) == "slow=v2,v1"


def test_sites_whose_slurm_does_not_count_gpus_are_taken_at_their_word() -> None:
    assert assigned(GPUS, node("x", 0), node("y", 1), node("z", 1)) == "fast=x slow=y,z"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        (
            [node("m1", v100=1), node("a1", has={"a100": 2}), node("v1", v100=4)],
            "the plan needs 1 node of 'fast' with 2 x A100-40 and 2 nodes of 'slow' with 4 x V100-16; of this job m1 "
            "has 1 x v100; a1 has no GPU; v1 has 4 x v100; ask Slurm for them by type (such as --gpus-per-node=TYPE:2)",
        ),
        (
            [node("a1", a100=2), node("t1", t4=4), node("v1", v100=4)],
            "the plan needs 2 nodes of 'slow' with 4 x V100-16; of this job a1 has 2 x a100; t1 has 4 x t4",
        ),
        ([node("a1", a100=2)], "has 1 node (a1), the plan needs 3: 1 x fast (2 A100-40), 2 x slow (4 V100-16); submit"),
    ],
    ids=["too few", "another card", "too few nodes"],
)
def test_an_allocation_that_does_not_fit_says_what_it_has(nodes: list[AllocatedNode], said: str) -> None:
    assert re.search(re.escape(said), refused(GPUS, *nodes))
