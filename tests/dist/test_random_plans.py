"""Random plans, with all that a plan can say, train as one process does.

In float64, to 1e-9 relative to the largest element of each tensor, over two clipped AdamW steps. The suite draws a
hundred of them, the same ones each time; as many others as one likes are tried by

    python -m tests.dist.test_random_plans --count 1000 --seed 7
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hetero.plan.holders import gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.runtime.options import DataParallelOptions
from hetero.serialization import to_json
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.strategies import is_legal, trainable_plans
from tests.helpers.training import one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

Ranks = tuple[int, ...]
NUM_STEPS = 2
TOLERANCE = 1e-9
MAX_RANKS = 8
IN_THE_SUITE = 100


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


def random_plans(count: int, check: Callable[[Plan, DataParallelOptions], None], *, first: int | None) -> None:
    """Call ``check`` with so many plans; with ``first`` as the seed, or the same ones each time."""

    @given(trainable_plans(max_ranks=MAX_RANKS).filter(is_legal), options())
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=first is None,
        database=None,
        phases=[Phase.generate],  # a case that hangs takes its time, and is small already
        suppress_health_check=list(HealthCheck),
    )
    def drawn(made: Plan, data_parallel: DataParallelOptions) -> None:
        check(made, data_parallel)

    (drawn if first is None else seed(first)(drawn))()


@pytest.mark.slow
def test_a_random_plan_equals_one_process() -> None:
    random_plans(IN_THE_SUITE, assert_equals_one_process, first=None)


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


def main(argv: Sequence[str]) -> int:
    """Prints every plan that does not train as one process does; exit code 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.dist.test_random_plans", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="plans to draw (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default 1)")
    args = parser.parse_args(argv)
    tried = interleaved = wrong = 0

    def check(made: Plan, data_parallel: DataParallelOptions) -> None:
        nonlocal tried, interleaved, wrong
        tried += 1
        interleaved += any(each.is_interleaved for each in made.replicas)
        try:
            assert_equals_one_process(made, data_parallel)
        except AssertionError as error:
            wrong += 1
            print(f"{error}\n{data_parallel}\n{to_json(made)}", flush=True)
        if tried % 50 == 0:
            print(f"{tried} plans, {interleaved} of them interleaved, {wrong} wrong", flush=True)

    random_plans(args.count, check, first=args.seed)
    print(f"{tried} plans, {interleaved} of them interleaved, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
