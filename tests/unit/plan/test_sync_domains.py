"""Which sums are hierarchical, and by which rails they go."""

import dataclasses
import json

import pytest
from hypothesis import given, settings

from hetero.cost.gradient_volume import sync_buckets
from hetero.plan.communicators import PlanCommunicators
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.sync_domains import Domains, rails_of
from hetero.plan.validate import validate
from hetero.serialization import from_json, to_json
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.strategies import plans_with_domains

NODES = Domains([(0, 1, 2), (3, 4), (5,)])


@pytest.mark.parametrize(
    ("ranks", "parts", "rails"),
    [
        ((0, 1, 3, 4), ((0, 1), (3, 4)), ((0, 3), (1, 4))),
        ((0, 1, 2, 3, 4), ((0, 1, 2), (3, 4)), ((0, 3), (1, 4))),
        ((1, 2, 5), ((1, 2), (5,)), ((1, 5),)),
        ((0, 2, 3, 4, 5), ((0, 2), (3, 4), (5,)), ((0, 3, 5),)),
        ((0, 3, 5), (), ()),
        ((0, 2), (), ()),
    ],
)
def test_holders_by_domain_and_rail(
    ranks: tuple[int, ...], parts: tuple[tuple[int, ...], ...], rails: tuple[tuple[int, ...], ...]
) -> None:
    assert NODES.parts(ranks) == parts
    assert rails_of(parts) == rails
    assert NODES.spans(ranks) == (ranks != (0, 2))


def test_without_domains_every_sum_is_one_collective() -> None:
    assert Domains(()).parts((0, 1, 2)) == ()
    assert not Domains(()).spans((0, 1, 2))


@given(plans_with_domains())
@settings(max_examples=40, deadline=None)
def test_the_quick_count_of_the_cost_model_is_that_of_the_runtime(legal: Plan) -> None:
    validate(legal)
    assert from_json(Plan, to_json(legal), source="a test") == legal
    expected = {b.ranks: b.domains for b in gradient_buckets(legal, bucket_numel=1) if len(b.ranks) > 1}
    assert {b.ranks: b.domains for b in sync_buckets(legal, bucket_numel=1)} == expected
    assert not {*PlanCommunicators(legal).gradients} & {ranks for ranks, parts in expected.items() if parts}


def test_of_one_layer_what_leaves_its_domain_goes_first() -> None:
    """Of the two halves of a layer, that of ranks 0 and 1 stays inside and that of ranks 2 and 3 does not."""
    model = gpt2_model(tied_embeddings=False)
    made = plan(model, [replica(stage(layers=(0, 6), ranks=ranks, tp=2)) for ranks in ((0, 2), (1, 3))])
    flat = [bucket.ranks for bucket in gradient_buckets(made, bucket_numel=1) if bucket.position == 5]
    sync = GradientSyncPlan(domains=((0, 1, 3), (2,)))
    first = dataclasses.replace(made, gradient_sync=sync)
    ordered = [bucket.ranks for bucket in gradient_buckets(first, bucket_numel=1) if bucket.position == 5]
    assert flat.index((0, 1)) < flat.index((2, 3))
    assert ordered.index((2, 3)) < ordered.index((0, 1))
    assert sorted(flat) == sorted(ordered)


def test_a_plan_file_from_before_domains_is_as_good_as_ever() -> None:
    made = plan(gpt2_model(), [replica(stage(layers=(0, 6), ranks=(0,)))])
    fields = json.loads(to_json(made))
    del fields["gradient_sync"]
    assert from_json(Plan, json.dumps(fields), source="a test") == made
