"""``hetero discover`` on several ranks: all tell rank 0 of their nodes, and end as it does."""

import dataclasses
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hetero.discovery.describe import describe
from hetero.discovery.facts import NodeFacts, nodes_of
from hetero.distributed import launch_store
from hetero.distributed.launch_store import dismiss, dismissed, tell, told_by_all
from hetero.errors import MembershipError
from hetero.spec.cluster import ClusterSpec
from tests.helpers.ranks import run_ranks
from tests.unit.discovery.samples import EIGHT_A100, FOUR_V100, gpu_node

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]


def facts_of(rank: int) -> NodeFacts:
    """Two ranks on each of two nodes, numbered in turns."""
    made = gpu_node("fast", *EIGHT_A100) if rank % 2 == 0 else gpu_node("slow", *FOUR_V100)
    return dataclasses.replace(made, boot_id=made.node)


def discover(rank: int, exit_code: int) -> ClusterSpec | int:
    store = dist.PrefixStore(f"discovery-{exit_code}", _get_default_store())
    tell(store, facts_of(rank), rank=rank)
    if rank > 0:
        return dismissed(store, rank=rank)
    ranks = told_by_all(store, NodeFacts, world_size=4)
    dismiss(store, exit_code, world_size=4)
    assert ranks == [facts_of(each) for each in range(4)]
    return describe(nodes_of(ranks), date="2026-11-23").cluster


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 2])
def test_rank_0_describes_all_nodes_and_the_others_end_as_it_does(exit_code: int) -> None:
    cluster, *others = run_ranks(discover, 4, exit_code)
    assert others == [exit_code] * 3
    assert [(each.device, each.gpus_per_node, each.count) for each in cluster.node_types] == [
        ("A100-40", 8, 1),
        ("V100-16", 4, 1),
    ]


def rank_0_is_silent(rank: int) -> str:
    if rank == 0:
        return ""
    store = dist.PrefixStore("discovery", _get_default_store())
    with mock.patch.object(launch_store, "ARRIVE_WITHIN_S", 0.5), pytest.raises(MembershipError) as caught:
        dismissed(store, rank=rank)
    return str(caught.value)


def test_ranks_do_not_wait_for_ever() -> None:
    _, said = run_ranks(rank_0_is_silent, 2)
    assert said == "rank 1: rank 0 ended, or was silent for too long; look at its output"
