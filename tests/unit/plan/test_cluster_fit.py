"""Each rule alone: a plan that fits the cluster, one that does not, and what it says."""

import pytest

from hetero.errors import PlanError
from hetero.plan.cluster_fit import check_plan_on_cluster
from hetero.plan.ir import Plan
from hetero.spec.cluster import ClusterSpec, NodeType
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage

CLUSTER = ClusterSpec(
    node_types=(
        NodeType(name="fast", device="A100-40", gpus_per_node=2, count=2),
        NodeType(name="slow", device="V100-16", gpus_per_node=1, count=1),
    )
)
"""Ranks 0 1 | 2 3 are A100, rank 4 is a V100."""


def two_stages(fast: tuple[int, ...], slow: tuple[int, ...], *, tp: int, idle_ranks: tuple[int, ...] = ()) -> Plan:
    dp = len(fast) // tp
    stages = (
        stage(layers=(0, 5), ranks=fast, tp=tp, dp=dp, device="A100-40"),
        stage(layers=(5, 6), ranks=slow, device="V100-16"),
    )
    return plan(gpt2_model(), [replica(*stages)], idle_ranks=idle_ranks)


def in_turns(fast: tuple[int, int], slow: tuple[int]) -> Plan:
    """Four stages on two groups, the other devices idle."""
    idle = sorted(set(range(5)) - {*fast, *slow})
    groups = ((fast, "A100-40"), (slow, "V100-16")) * 2
    stages = (
        stage(layers=(s, s + 1 if s < 3 else 6), ranks=ranks, tp=len(ranks), device=device)
        for s, (ranks, device) in enumerate(groups)
    )
    return plan(gpt2_model(), [replica(*stages)], idle_ranks=idle)


@pytest.mark.parametrize(
    "fitting",
    [
        two_stages((0, 1, 2, 3), (4,), tp=2),
        two_stages((2, 3, 1, 0), (4,), tp=2),
        two_stages((0, 2), (4,), tp=1, idle_ranks=(1, 3)),
        in_turns((2, 3), (4,)),
    ],
    ids=["tp inside nodes", "in another order", "dp across nodes", "in turns"],
)
def test_fits(fitting: Plan) -> None:
    check_plan_on_cluster(fitting, CLUSTER)


@pytest.mark.parametrize(
    ("unfit", "message"),
    [
        (two_stages((0, 1), (2,), tp=2), "it names 3 ranks, the cluster has 5 devices; .* idle_ranks"),
        (two_stages((0, 1, 2, 3), (4,), tp=2, idle_ranks=(5,)), "it names 6 ranks, the cluster has 5 devices"),
        (
            two_stages((0, 4), (1,), tp=1, idle_ranks=(2, 3)),
            r"replica 0 stage 0: it wants A100-40, but rank 4 is a V100-16 on node 2 \(slow\)",
        ),
        (
            two_stages((0, 1, 2, 4), (3,), tp=1),
            "replica 0 stage 0: it wants A100-40, but rank 4 is a V100-16",
        ),
        (
            two_stages((0, 2, 1, 3), (4,), tp=2),
            r"replica 0 stage 0: the tp 2 group of ranks \[0, 2\] spans nodes \[0, 1\]",
        ),
        (in_turns((1, 2), (4,)), r"replica 0 stage 0: the tp 2 group of ranks \[1, 2\] spans nodes \[0, 1\]"),
        (in_turns((0, 1), (3,)), r"replica 0 stage 1: it wants V100-16, but rank 3 is a A100-40"),
        (two_stages((0, 1, 2, 3), (4,), tp=4), r"the tp 4 group of ranks \[0, 1, 2, 3\] spans nodes \[0, 1\]"),
    ],
)
def test_does_not_fit(unfit: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan_on_cluster(unfit, CLUSTER)
