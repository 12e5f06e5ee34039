"""Which communicators a plan has, which share, and how many a rank may be in."""

import dataclasses

import pytest
from hypothesis import given, settings

from hetero.errors import PlanError
from hetero.plan.communicators import (
    Communicator,
    PlanCommunicators,
    _at_most,
    check_communicators,
    communicators_of,
    gradient_communicators,
    max_communicators,
)
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.sync_domains import rails_of
from hetero.plan.uniform import UniformLayout, uniform_plan
from hetero.plan.validate import validate
from tests.helpers.layouts import layouts
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import eight_unlike_replicas, plan, replica, stage, two_unlike_replicas
from tests.helpers.strategies import legal_plans, plans_with_domains

BOTH_WAYS = ("activations", "activation gradients")


def test_the_communicators_of_a_plan() -> None:
    """All of them, for one plan by hand, in the order in which every rank makes them."""
    made = PlanCommunicators(two_unlike_replicas())
    expected = [
        ("sums", tuple(range(9))),
        ("tensor parallelism", (3, 4)),
        # The first boundaries of both replicas, then the second one; forward and backward.
        *[
            (use, ranks)
            for ranks in [(1, 2, 3, 4), (6, 8), (1, 2, 5)]
            for use in ("activations", "activation gradients")
        ],
        ("sums", (5, 8)),
    ]
    assert [(each.use, each.ranks) for each in made.ordered[: len(expected)]] == expected
    holders = {
        # Layers 0 and 1, 2, 3 and 4, and 5: replicated parameters on all ranks of both stages, ...
        (3, 4, 6),
        (3, 4, 8),
        (1, 2, 8),
        # ... cut ones half by half; the tied embedding is also with the last stages.
        (3, 6),
        (4, 6),
        (3, 8),
        (4, 8),
        (3, 5, 6, 8),
        (4, 5, 6, 8),
    }
    rest = made.ordered[len(expected) :]
    assert {each.ranks for each in rest} == holders
    assert len(rest) == len(holders)
    # Layer 5 lies on the last stages, whose group for the losses sums it as well.
    assert made.gradients[5, 8] == made.losses


def test_equal_ranks_share_where_their_order_is_certain() -> None:
    """Two replicas of one stage: the world, the losses and the gradients are the same ranks."""
    made = PlanCommunicators(plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(r,))) for r in range(2)]))
    assert made.world == made.losses == made.gradients[0, 1]
    assert made.of(0) == (made.world,)


def test_tensor_parallelism_and_hierarchical_sums_share_with_nobody() -> None:
    one_stage = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0, 1), tp=2))])
    made = PlanCommunicators(one_stage)
    assert [each.use for each in made.of(0)] == ["sums", "tensor parallelism"]
    four = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(r,))) for r in range(4)])
    sums = dataclasses.replace(four, gradient_sync=GradientSyncPlan(domains=((0, 1), (2, 3))))
    assert [(each.use, each.ranks) for each in communicators_of(sums, 0)] == [
        ("sums", (0, 1, 2, 3)),
        ("domains and rails", (0, 1)),
        ("domains and rails", (0, 2)),
    ]


def test_directions_of_a_boundary_are_two() -> None:
    made = PlanCommunicators(uniform(pp=2))
    both = made.boundaries[0, 0]
    assert both.forward.ranks == both.backward.ranks == (0, 1)
    assert both.forward != both.backward


def uniform(*, pp: int, stages_per_rank: int = 1, world_size: int | None = None) -> Plan:
    return uniform_plan(
        UniformLayout(
            model=llama_model(num_layers=2 * pp * stages_per_rank),
            world_size=world_size or pp,
            pp=pp,
            stages_per_rank=stages_per_rank,
            micro_batch_size=1,
            global_batch_size=4 * (world_size or pp),
            seq_length=16,
            device="A100-40",
        )
    )


@pytest.mark.parametrize("stages_per_rank", [2, 4, 8])
@pytest.mark.parametrize(("pp", "of_boundaries"), [(2, 4), (3, 4), (4, 4)])
def test_interleaved_stages_share_one_per_neighbour_and_direction(
    pp: int, of_boundaries: int, stages_per_rank: int
) -> None:
    """However many stages a rank has: it sends to two neighbours, and hears from them. Two ranks are both."""
    made = communicators_of(uniform(pp=pp, stages_per_rank=stages_per_rank), 0)
    assert sum(each.use in BOTH_WAYS for each in made) == of_boundaries


@pytest.mark.parametrize("made", [made for name, style, made in layouts() if style in ("llama-gqa", "moe")])
def test_layouts_stay_below_the_limit(made: Plan) -> None:
    assert max(PlanCommunicators(made).counts().values(), default=0) <= max_communicators(made)


def test_every_second_boundary_is_made_at_the_same_time() -> None:
    """Else the ranks of a long pipeline would be connected one after the other."""
    made = [each for each in PlanCommunicators(uniform(pp=6)).ordered if each.use == "activations"]
    assert [each.ranks for each in made] == [(0, 1), (2, 3), (4, 5), (1, 2), (3, 4)]


@pytest.mark.slow
@given(legal_plans())
@settings(max_examples=60, deadline=None)
def test_gradient_groups_are_those_of_the_parameters(made: Plan) -> None:
    buckets = [bucket for bucket in gradient_buckets(made, bucket_numel=1) if len(bucket.ranks) > 1]
    assert set(PlanCommunicators(made).gradients) == {bucket.ranks for bucket in buckets}


@pytest.mark.slow
@given(plans_with_domains())
@settings(max_examples=60, deadline=None)
def test_so_are_domains_and_rails(made: Plan) -> None:
    buckets = [bucket for bucket in gradient_buckets(made, bucket_numel=1) if len(bucket.ranks) > 1]
    found = PlanCommunicators(made)
    assert set(found.gradients) == {bucket.ranks for bucket in buckets if not bucket.domains}
    parts = {ranks for bucket in buckets for ranks in (*bucket.domains, *rails_of(bucket.domains)) if len(ranks) > 1}
    assert set(found.hierarchical) == parts
    assert gradient_communicators(made) == {*found.gradients, *found.hierarchical}
    # What two ranks are both in, they make in the same order, and there is no way to have it twice.
    assert len(set(found.ordered)) == len(found.ordered)
    assert max(found.counts().values(), default=0) <= _at_most(made)


def test_too_many_are_refused_with_the_cuts_that_make_them() -> None:
    made = eight_unlike_replicas()
    assert max(PlanCommunicators(made).counts().values()) == 61
    for check in (check_communicators, validate):
        with pytest.raises(PlanError) as refused:
            check(made)
        assert str(refused.value) == (
            "replica 5 stage 1: rank 42 would be in 61 communicators, at most 28 have a stream and a hardware queue "
            "of their own; 56 of them sum gradients, one for each set of ranks that holds the same layers and shards: "
            "beside layers [13, 35) with tp 2, replica 4 (cuts at 18, 23, 27, 34; tp 1), "
            "replica 7 (cuts at 18, 20, 26, 30; tp 1), replica 0 (tp 8); "
            "cut these replicas at the same layers, give their stages the same tp, or make "
            "fewer of them"
        )


def test_the_same_replicas_cut_alike_are_accepted() -> None:
    cuts = ((0, 12), (12, 24), (24, 36), (36, 48))
    model = eight_unlike_replicas().model
    alike = [
        replica(*(stage(layers=cut, ranks=range(8 * r + 2 * s, 8 * r + 2 * s + 2), tp=2) for s, cut in enumerate(cuts)))
        for r in range(8)
    ]
    validate(plan(model, alike))


def test_one_rank_has_its_world_alone() -> None:
    made = PlanCommunicators(plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))]))
    assert made.ordered == (made.world,)
    assert made.losses is None


def test_a_communicator_is_known_by_its_value() -> None:
    assert Communicator("sums", (0, 1)) == Communicator("sums", (0, 1))
    assert Communicator("sums", (0, 1)) != Communicator("tensor parallelism", (0, 1))
