"""The quick count of gradient buckets is that of the runtime."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.cost.gradient_volume import CountedBucket, owned_parameters, sync_buckets
from hetero.plan.gradient_groups import ALIGNMENT, gradient_buckets
from hetero.plan.ir import Plan
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage, with_shares
from tests.helpers.strategies import legal_plans, offloaded_plans, plans_with_domains


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
@given(
    st.one_of(legal_plans(), plans_with_domains(), offloaded_plans()), st.one_of(st.integers(1, 5000), st.just(10**9))
)
@settings(max_examples=150, deadline=None)
def test_the_buckets_are_those_of_the_runtime(legal: Plan, bucket_numel: int) -> None:
    expected = [
        CountedBucket(bucket.ranks, bucket.numel, bucket.position, bucket.domains)
        for bucket in gradient_buckets(legal, bucket_numel=bucket_numel)
        if len(bucket.ranks) > 1
    ]
    assert list(sync_buckets(legal, bucket_numel=bucket_numel)) == expected


TWO_REPLICAS = plan(
    gpt2_model(tied_embeddings=False),
    [
        replica(stage(layers=(0, 6), ranks=(0,))),
        replica(stage(layers=(0, 2), ranks=(1,)), stage(layers=(2, 6), ranks=(2,))),
    ],
)


def test_the_head_is_first_and_the_embedding_last() -> None:
    buckets = sync_buckets(TWO_REPLICAS, bucket_numel=1)
    assert [bucket.position for bucket in buckets] == sorted((b.position for b in buckets), reverse=True)
    assert (buckets[0].position, buckets[0].ranks) == (6, (0, 2))
    assert (buckets[-1].position, buckets[-1].ranks) == (-1, (0, 1))


def test_a_full_bucket_is_closed() -> None:
    whole = sync_buckets(TWO_REPLICAS, bucket_numel=10**9)
    small = sync_buckets(TWO_REPLICAS, bucket_numel=10_000)
    assert len(whole) == 2 < len(small)
    assert sum(bucket.numel for bucket in whole) == sum(bucket.numel for bucket in small)


@pytest.mark.parametrize("tied", [True, False])
def test_one_replica_shares_only_a_tied_embedding(tied: bool) -> None:
    alone = plan(
        gpt2_model(tied_embeddings=tied),
        [replica(stage(layers=(0, 2), ranks=(0,)), stage(layers=(2, 6), ranks=(1,)))],
    )
    assert [(bucket.ranks, bucket.numel) for bucket in sync_buckets(alone, bucket_numel=1)] == [
        ((0, 1), 64 * 32)
    ] * tied


@given(st.one_of(legal_plans(), offloaded_plans()), st.lists(st.integers(1, 4), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_what_a_rank_owns_is_its_shards(legal: Plan, shares: list[int]) -> None:
    """The quick count is that of the buckets, but for the alignment of shards."""
    legal = with_shares(legal, shares)
    expected, on_host, slack = Counter[int](), Counter[int](), Counter[int]()
    for bucket in gradient_buckets(legal, bucket_numel=10**9):
        for rank in bucket.ranks:
            shard = bucket.shard_of(rank)
            expected[rank] += shard.stop - shard.start
            on_host[rank] += (shard.stop - shard.start) * (rank in bucket.on_host)
            slack[rank] += (len(bucket.segments) + 2) * ALIGNMENT
    owned = owned_parameters(legal)
    for rank, of_stages in owned.items():
        assert sum(each.numel for each in of_stages.values()) == pytest.approx(expected[rank], abs=slack[rank])
        assert sum(each.on_host for each in of_stages.values()) == pytest.approx(on_host[rank], abs=slack[rank])
    assert sum(each.numel for of_stages in owned.values() for each in of_stages.values()) == pytest.approx(
        sum(p.numel for p in parameters(legal.model))
    )
