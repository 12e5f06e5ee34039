"""Random plans, with all that a plan can say, train as one process does.

In float64, to 1e-9 relative to the largest element of each tensor, over two clipped AdamW steps.
"""

import dataclasses

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetero.plan.holders import gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.runtime.options import DataParallelOptions
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import is_legal, trainable_plans
from tests.helpers.training import one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

Ranks = tuple[int, ...]
NUM_STEPS = 2
TOLERANCE = 1e-9


def options() -> st.SearchStrategy[DataParallelOptions]:
    return st.builds(
        DataParallelOptions,
        bucket_numel=st.sampled_from([1, 100, 3000, 10**6]),
        overlap_grad_reduce=st.booleans(),
        overlap_param_gather=st.booleans(),
    )


def assert_equals_one_process(made: Plan, data_parallel: DataParallelOptions) -> None:
    made = dataclasses.replace(made, precision="fp64")
    traces = run_ranks(train, made.world_size, made, NUM_STEPS, data_parallel, timeout_s=40)
    (alone,) = run_ranks(train, 1, one_process_plan(made), NUM_STEPS)
    assert_same_training(made, traces, alone, tolerance=TOLERANCE)


@pytest.mark.slow
@given(trainable_plans(max_ranks=8).filter(is_legal), options())
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a case that hangs takes its time, and is small already
    suppress_health_check=list(HealthCheck),
)
def test_a_random_plan_equals_one_process(made: Plan, data_parallel: DataParallelOptions) -> None:
    assert_equals_one_process(made, data_parallel)


@pytest.mark.parametrize("domains", [(), ((0, 1), (2,))], ids=["one-level", "two-levels"])
@pytest.mark.parametrize("overlap", [False, True], ids=["gathered-before", "gathered-beside"])
def test_a_rank_that_owns_nothing_gathers_what_the_others_own(domains: tuple[Ranks, ...], overlap: bool) -> None:
    """Its share of the optimizer is so small that no element of any bucket is its own."""
    replicas = [
        replica(dataclasses.replace(stage(layers=(0, 2), ranks=(rank,)), optimizer_share=share), num_samples=2)
        for rank, share in enumerate((1000, 1000, 1))
    ]
    made = dataclasses.replace(plan(gpt2_model(num_layers=2), replicas), gradient_sync=GradientSyncPlan(domains=domains))
    buckets = gradient_buckets(made, bucket_numel=3000)
    assert all(bucket.shard_of(2).start == bucket.shard_of(2).stop for bucket in buckets)
    data_parallel = DataParallelOptions(bucket_numel=3000, overlap_param_gather=overlap)
    assert_equals_one_process(sharded(made), data_parallel)
