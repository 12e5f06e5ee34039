"""Random plans, with all that a plan can say, train as one process does.

In float64, to 1e-9 relative to the largest element of each tensor, over two clipped AdamW steps. The suite has the
first hundred of them; as many others as one likes are tried by

    python -m tests.dist.test_random_plans --first 100 --count 1000
"""

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan, Ranks
from hetero.runtime.options import DataParallelOptions
from hetero.serialization import to_json
from tests.helpers.comparison import assert_same_training
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.random_plans import MAX_RANKS, random_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.training import one_process, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(100)]

NUM_STEPS = 2
TOLERANCE = 1e-9
IN_THE_SUITE = 100
IN_EVERY_RUN = 2
"""The number of that plan, which is a small one."""

TURNS = 10
"""Of so many in a row every sixth run takes one."""


def assert_equals_one_process(made: Plan, data_parallel: DataParallelOptions) -> None:
    made = dataclasses.replace(made, precision="fp64")
    traces = run_ranks(train, made.world_size, made, NUM_STEPS, data_parallel, timeout_s=40)
    assert_same_training(made, traces, one_process(made, NUM_STEPS), tolerance=TOLERANCE)


def _cases() -> Iterator[Any]:
    for n in range(IN_THE_SUITE):
        first = n - n % TURNS
        turns = pytest.mark.rotates(f"from {first}", every=6, turn=first // TURNS % 6)
        marks = [] if n == IN_EVERY_RUN else [pytest.mark.slow, turns]
        yield pytest.param(n, marks=marks)


@pytest.mark.parametrize("number", list(_cases()))
def test_a_random_plan_equals_one_process(number: int) -> None:
    assert_equals_one_process(*random_plan(number))


@pytest.mark.slow
def test_random_plans_say_everything_that_a_plan_can_say() -> None:
    """Of those of the suite, so many at least have each of these."""
    drawn = [random_plan(number)[0] for number in range(IN_THE_SUITE)]
    said: Counter[str] = Counter()
    for made in drawn:
        stages = [each for _, _, each in made.stages()]
        said += Counter(
            {
                "several replicas": len(made.replicas) > 1,
                "several stages": any(len(each.stages) > 1 for each in made.replicas),
                "interleaved": any(each.is_interleaved for each in made.replicas),
                "another order": any(each.schedule != "1f1b" for each in made.replicas),
                "unequal tp": len({each.tp for each in stages}) > 1,
                "unequal microbatches": any(
                    len({each.samples_per_microbatch for each in row.stages}) > 1 for row in made.replicas
                ),
                "half layers": any(each.ends_with_attention for each in stages),
                "split backward": any(each.wgrad_delay is not None for each in stages),
                "recompute": any(each.recompute != "none" for each in stages),
                "sequence parallel": any(each.splits_sequence for each in stages),
                "hierarchical": bool(made.gradient_sync.domains),
                "shards": made.distributed_optimizer,
                "unequal shares": len({each.optimizer_share for each in stages}) > 1,
                "idle ranks": bool(made.idle_ranks),
                "tied": made.model.tied_embeddings,
                "experts": made.model.num_experts is not None,
            }
        )
    assert {what: count for what, count in said.items() if count < 10} == {}
    assert {made.world_size for made in drawn} == set(range(2, MAX_RANKS + 1))


@pytest.mark.slow
@pytest.mark.parametrize("domains", [(), ((0, 1), (2,))], ids=["flat", "hierarchical"])
@pytest.mark.parametrize("overlap", [False, True], ids=["gathered-before", "gathered-beside"])
def test_a_rank_that_owns_nothing_gathers_what_the_others_own(domains: tuple[Ranks, ...], overlap: bool) -> None:
    """Its share of the optimizer is so small that no element of any bucket is its own."""
    replicas = [
        replica(dataclasses.replace(stage(layers=(0, 2), ranks=(rank,)), optimizer_share=share), num_samples=2)
        for rank, share in enumerate((1000, 1000, 1))
    ]
    made = dataclasses.replace(
        plan(gpt2_model(num_layers=2), replicas), gradient_sync=GradientSyncPlan(domains=domains)
    )
    buckets = gradient_buckets(made, bucket_numel=3000)
    assert all(bucket.shard_of(2).start == bucket.shard_of(2).stop for bucket in buckets)
    data_parallel = DataParallelOptions(bucket_numel=3000, overlap_param_gather=overlap)
    assert_equals_one_process(sharded(made), data_parallel)


def main(argv: Sequence[str]) -> int:
    """Prints every plan that does not train as one process does; exit code 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m tests.dist.test_random_plans", description=__doc__)
    parser.add_argument("--first", type=int, default=IN_THE_SUITE, help="number of the first plan (default 100)")
    parser.add_argument("--count", type=int, default=1000, help="how many (default 1000)")
    args = parser.parse_args(argv)
    interleaved = wrong = 0
    for tried, number in enumerate(range(args.first, args.first + args.count), start=1):
        made, data_parallel = random_plan(number)
        interleaved += any(each.is_interleaved for each in made.replicas)
        try:
            assert_equals_one_process(made, data_parallel)
        except AssertionError as error:
            wrong += 1
            print(f"plan {number}: {error}\n{data_parallel}\n{to_json(made)}", flush=True)
        if tried % 50 == 0 or tried == args.count:
            print(f"{tried} plans, {interleaved} of them interleaved, {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
