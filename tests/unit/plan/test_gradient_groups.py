"""Gradient groups: whoever holds a segment sums its gradient, nobody else does, and every element is there once."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.plan.gradient_groups import ALIGNMENT, Bucket, gradient_buckets, gradient_scale
from hetero.plan.ir import Plan, Stage
from hetero.spec.parameters import EMBEDDING, Parameter, parameters, shard_intervals, stage_parameters
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage, with_shares
from tests.helpers.strategies import legal_plans

ALL_IN_ONE = 10**9


def held_indices(parameter: Parameter, held_by: Stage, rank: int) -> frozenset[int]:
    """Indices along the shard dimension that ``rank`` holds, by the shards themselves and not by the segments."""
    tp_rank = held_by.ranks.index(rank) % held_by.tp
    intervals = shard_intervals(parameter, tp=held_by.tp, tp_rank=tp_rank)
    return frozenset(i for each in intervals for i in range(each.global_start, each.global_start + each.length))


def every_shard(plan: Plan) -> Iterator[tuple[Parameter, int, frozenset[int]]]:
    """Every parameter on every rank that holds some of it."""
    for _, _, each in plan.stages():
        for parameter in stage_parameters(plan.model, first_layer=each.start, end_layer=each.end):
            for rank in each.ranks:
                yield parameter, rank, held_indices(parameter, each, rank)


def segments_by_name(buckets: tuple[Bucket, ...]) -> dict[str, list[tuple[int, int, tuple[int, ...]]]]:
    """Start, end and ranks of every segment."""
    segments = defaultdict(list)
    for bucket in buckets:
        for segment in bucket.segments:
            segments[segment.parameter.name].append((segment.start, segment.end, bucket.ranks))
    return {name: sorted(each) for name, each in segments.items()}


def groups(plan: Plan) -> set[tuple[int, ...]]:
    return {bucket.ranks for bucket in gradient_buckets(plan, bucket_numel=ALL_IN_ONE)}


@pytest.mark.slow
@given(legal_plans(), st.sampled_from([1, 1000, ALL_IN_ONE]))
@settings(max_examples=60, deadline=None)
def test_a_segment_is_held_by_exactly_its_group(random_plan: Plan, bucket_numel: int) -> None:
    """Each element that a rank holds is in one segment whose group has that rank, and no group has another rank."""
    segments = segments_by_name(gradient_buckets(random_plan, bucket_numel=bucket_numel))
    holding: dict[tuple[str, int], set[int]] = defaultdict(set)
    for parameter, rank, indices in every_shard(random_plan):
        covered = Counter(
            i for start, end, ranks in segments[parameter.name] if rank in ranks for i in range(start, end)
        )
        assert covered == Counter(indices)
        for i in indices:
            holding[parameter.name, i].add(rank)
    for name, each in segments.items():
        for start, end, ranks in each:
            assert list(ranks) == sorted(set(ranks))
            assert all(holding[name, i] == set(ranks) for i in range(start, end))


@given(legal_plans(), st.integers(1, 5000))
@settings(max_examples=30, deadline=None)
def test_buckets_hold_every_element_of_the_model_once(random_plan: Plan, bucket_numel: int) -> None:
    buckets = gradient_buckets(random_plan, bucket_numel=bucket_numel)
    assert sum(bucket.numel for bucket in buckets) == sum(p.numel for p in parameters(random_plan.model))
    for parameter in parameters(random_plan.model):
        size = 1 if parameter.shard_dim is None else parameter.shape[parameter.shard_dim]
        segments = segments_by_name(buckets)[parameter.name]
        assert [start for start, _, _ in segments] == [0, *(end for _, end, _ in segments[:-1])]
        assert segments[-1][1] == size


@pytest.mark.slow
@given(legal_plans(), st.integers(1, 5000))
@settings(max_examples=30, deadline=None)
def test_buckets_come_in_the_order_of_the_backward(random_plan: Plan, bucket_numel: int) -> None:
    """The head first, the embedding last: a bucket is ready with its lowest position."""
    buckets = gradient_buckets(random_plan, bucket_numel=bucket_numel)
    assert [bucket.position for bucket in buckets] == sorted((b.position for b in buckets), reverse=True)
    for bucket in buckets:
        assert bucket.position == min(segment.parameter.position for segment in bucket.segments)
        last = min(bucket.segments, key=lambda segment: segment.parameter.position).parameter.position
        others = [segment for segment in bucket.segments if segment.parameter.position > last]
        assert sum(segment.numel for segment in others) < bucket_numel, "it was full before its last layer"


def test_a_full_bucket_is_closed() -> None:
    one_stage = plan(llama_model(num_layers=2), [replica(stage(layers=(0, 2), ranks=(0, 1), dp=2))])
    whole = gradient_buckets(one_stage, bucket_numel=ALL_IN_ONE)
    assert [(bucket.ranks, bucket.position) for bucket in whole] == [((0, 1), -1)]
    single = gradient_buckets(one_stage, bucket_numel=1)
    names = [[segment.parameter.name for segment in bucket.segments] for bucket in single]
    assert all(len(set(each)) == 1 for each in names)
    assert len(names) == len(parameters(one_stage.model)), "gate and up stay together"


def test_bucket_numel_elements_are_enough_to_close() -> None:
    """The backward begins with the final norm, 32 elements: at 32 it fills a bucket, at 33 the head joins it."""
    one_stage = plan(llama_model(), [replica(stage(layers=(0, 6), ranks=(0, 1), dp=2))])
    assert [len(gradient_buckets(one_stage, bucket_numel=numel)[0].segments) for numel in (32, 33)] == [1, 2]


def test_data_parallel_ranks_agree_and_tensor_parallel_ranks_do_not() -> None:
    one_stage = plan(llama_model(), [replica(stage(layers=(0, 6), ranks=(0, 1, 2, 3), tp=2, dp=2))])
    segments = segments_by_name(gradient_buckets(one_stage, bucket_numel=ALL_IN_ONE))
    assert segments["output_layer.weight"] == [(0, 32, (0, 2)), (32, 64, (1, 3))]
    assert segments["decoder.layers.0.input_layernorm.weight"] == [(0, 1, (0, 1, 2, 3))]


def test_unequal_tensor_parallelism_cuts_at_the_finer_edges() -> None:
    """Rows 0 to 63 of fc1 are the gate and 64 to 127 up; tp 2 and tp 4 cut both halves."""
    replicas = [
        replica(stage(layers=(0, 6), ranks=(0, 1), tp=2)),
        replica(stage(layers=(0, 6), ranks=(2, 3, 4, 5), tp=4)),
    ]
    segments = segments_by_name(gradient_buckets(plan(llama_model(), replicas), bucket_numel=ALL_IN_ONE))
    quarters = [(0, 2), (0, 3), (1, 4), (1, 5)]
    gate = [(16 * i, 16 * (i + 1), ranks) for i, ranks in enumerate(quarters)]
    up = [(64 + start, 64 + end, ranks) for start, end, ranks in gate]
    assert segments["decoder.layers.3.mlp.linear_fc1.weight"] == gate + up


def test_tensor_parallelism_that_does_not_nest_is_cut_at_both_edges() -> None:
    """Rows of tp 2: 0-18-36. Of tp 3: 0-12-24-36."""
    model = gpt2_model(hidden_size=24, num_attention_heads=6, num_query_groups=6, kv_channels=4, ffn_hidden_size=36)
    replicas = [
        replica(stage(layers=(0, 6), ranks=(0, 1), tp=2)),
        replica(stage(layers=(0, 6), ranks=(2, 3, 4), tp=3)),
    ]
    segments = segments_by_name(gradient_buckets(plan(model, replicas), bucket_numel=ALL_IN_ONE))
    assert segments["decoder.layers.0.mlp.linear_fc2.weight"] == [
        (0, 12, (0, 2)),
        (12, 18, (0, 3)),
        (18, 24, (1, 3)),
        (24, 36, (1, 4)),
    ]


def test_a_tied_embedding_is_agreed_on_by_both_ends_of_every_replica() -> None:
    """The ends may have different tp: rows, not shard numbers, say who meets whom."""
    replicas = [
        replica(
            stage(layers=(0, 2), ranks=(0, 1), tp=2), stage(layers=(2, 4), ranks=(2,)), stage(layers=(4, 6), ranks=(3,))
        ),
        replica(stage(layers=(0, 6), ranks=(4,))),
    ]
    tied = segments_by_name(gradient_buckets(plan(gpt2_model(), replicas), bucket_numel=ALL_IN_ONE))
    assert tied[EMBEDDING] == [(0, 32, (0, 3, 4)), (32, 64, (1, 3, 4))]
    assert tied["embedding.position_embeddings.weight"] == [(0, 1, (0, 1, 4))]

    untied = segments_by_name(gradient_buckets(plan(llama_model(), replicas), bucket_numel=ALL_IN_ONE))
    assert untied[EMBEDDING] == [(0, 32, (0, 4)), (32, 64, (1, 4))]
    assert untied["output_layer.weight"] == [(0, 64, (3, 4))]


def pipeline_of(cuts: list[int], first_rank: int) -> tuple[Stage, ...]:
    return tuple(stage(layers=(first, end), ranks=(first_rank + s,)) for s, (first, end) in enumerate(pairwise(cuts)))


@pytest.mark.parametrize(
    ("cuts_a", "cuts_b", "num_groups"),
    [
        ([0, 12], [0, 12], 1),
        ([0, 6, 12], [0, 6, 12], 2),
        ([0, 4, 8, 12], [0, 6, 12], 4),
        (list(range(13)), list(range(13)), 12),
        (list(range(0, 13, 2)), [0, 1, 3, 5, 7, 9, 11, 12], 12),
    ],
)
def test_groups_grow_with_edges_and_not_with_paths(cuts_a: list[int], cuts_b: list[int], num_groups: int) -> None:
    """One group for every run of layers between two cuts of any replica: at most s + s' - 1, never s x s'."""
    replicas = [replica(*pipeline_of(cuts_a, 0)), replica(*pipeline_of(cuts_b, 20))]
    uneven = plan(llama_model(num_layers=12), replicas)
    assert len(groups(uneven)) == num_groups == len({*cuts_a, *cuts_b}) - 1


@given(legal_plans())
@settings(max_examples=40, deadline=None)
def test_groups_are_bounded_by_edges_and_holders(random_plan: Plan) -> None:
    """Between two neighbouring cuts: one group for what is replicated, one per cell of the finest common shards."""
    cuts = {each.start for _, _, each in random_plan.stages()} | {random_plan.model.num_layers}
    cells = math.lcm(*(each.tp for _, _, each in random_plan.stages()))
    runs_of_layers = len(cuts) - 1
    tied = cells if random_plan.model.tied_embeddings else 0
    assert len(groups(random_plan)) <= runs_of_layers * (cells + 1) + tied


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "scale"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", False, 1.0),
        ("decoder.layers.0.mlp.linear_fc1.weight", True, 1.0),
        ("decoder.layers.0.mlp.linear_fc2.bias", False, 0.25),
        ("decoder.layers.0.mlp.linear_fc2.bias", True, 1.0),
        ("decoder.layers.0.input_layernorm.weight", False, 0.25),
        ("decoder.layers.0.input_layernorm.weight", True, 1.0),
        ("decoder.layers.0.self_attention.q_layernorm.weight", False, 1.0),
        ("embedding.position_embeddings.weight", False, 0.25),
        ("embedding.position_embeddings.weight", True, 0.25),
    ],
)
def test_gradient_scale_at_tp_4(name: str, sequence_parallel: bool, scale: float) -> None:
    four = stage(layers=(0, 6), ranks=(0, 1, 2, 3), tp=4, sp=sequence_parallel)
    parameter = next(p for p in parameters(gpt2_model(qk_layernorm=True)) if p.name == name)
    assert gradient_scale(parameter, four) == scale


@pytest.mark.slow
@given(legal_plans(), st.sampled_from([1, 300, ALL_IN_ONE]), st.lists(st.integers(1, 5), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_shards_tile_the_buffer(random_plan: Plan, bucket_numel: int, shares: list[int]) -> None:
    """One behind the other, aligned, in proportion to the shares; and segments lie apart, those that decay first."""
    for bucket in gradient_buckets(with_shares(random_plan, shares), bucket_numel=bucket_numel):
        slices = [bucket.shard_of(rank) for rank in bucket.ranks]
        assert slices[0].start == 0
        assert slices[-1].stop == bucket.length >= bucket.offsets[-1] >= bucket.numel
        assert all(a.stop == b.start for a, b in pairwise(slices))
        assert all(edge % ALIGNMENT == 0 for edge in (*bucket.shard_edges, *bucket.offsets))
        total = sum(bucket.shares)
        for each, share in zip(slices, bucket.shares, strict=True):
            assert each.stop - each.start == pytest.approx(bucket.offsets[-1] * share / total, abs=ALIGNMENT)
        for segment, (start, end) in zip(bucket.segments, pairwise(bucket.offsets), strict=True):
            assert start + segment.numel <= end
        decays = [segment.parameter.decays for segment in bucket.segments]
        assert decays == sorted(decays, reverse=True)
