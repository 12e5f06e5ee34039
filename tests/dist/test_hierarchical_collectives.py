"""Hierarchical sums: what one process computes, whatever the domains, beside the backward or after it.

In float64, to 1e-9 relative to the largest element of each tensor, over clipped AdamW steps: two of a case that
rotates, three of the others.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero.distributed.process_groups import create_groups
from hetero.distributed.timing import Collective, Start, Timing, Waitable
from hetero.plan.communicators import PlanCommunicators, gradient_communicators
from hetero.plan.gradient_groups import Bucket, gradient_buckets
from hetero.plan.ir import GradientSyncPlan, Plan
from hetero.plan.validate import validate
from hetero.runtime import trainer
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer
from hetero.schedule.program import QueuedAction
from hetero.spec.model import ModelSpec
from hetero.spec.parameters import parameters
from tests.helpers.comparison import assert_same_training
from tests.helpers.first_contact import replaced
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, sharded, stage, with_unequal_shares
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, Training, microbatches, one_process, train, trained

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 3
TOLERANCE = 1e-9
BESIDE = DataParallelOptions(bucket_numel=3000)
AFTER = DataParallelOptions(bucket_numel=3000, overlap_grad_reduce=False)
SHARDED = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
GATHERED_FIRST = dataclasses.replace(SHARDED, overlap_param_gather=False, overlap_grad_reduce=False)

Domains = tuple[tuple[int, ...], ...]


def with_domains(made: Plan, *domains: tuple[int, ...], bucket_numel: int | None = None) -> Plan:
    sync = GradientSyncPlan(domains=domains, bucket_numel=bucket_numel)
    return dataclasses.replace(made, gradient_sync=sync, precision="fp64")


def equal_nodes(model: ModelSpec) -> Plan:
    """Data parallelism over two nodes of two ranks: two rails."""
    made = plan(model, [replica(stage(layers=(0, 6), ranks=(0, 1, 2, 3), dp=4), num_samples=4)])
    return with_domains(made, (0, 1), (2, 3))


def unequal_domains(model: ModelSpec) -> Plan:
    """A replica of three ranks in one domain, one of two in another; ranks interleave, so do shards and rails."""
    made = plan(
        model,
        [
            replica(stage(layers=(0, 6), ranks=(0, 2, 4), dp=3), num_samples=3),
            replica(stage(layers=(0, 6), ranks=(1, 3), dp=2), num_samples=4),
        ],
    )
    return with_domains(made, (1, 3), (4, 0, 2))


def tp_2_and_1(model: ModelSpec) -> Plan:
    """tp 2 and tp 1 cut each weight in two; a domain of one rank has one rail."""
    made = plan(
        model,
        [
            replica(stage(layers=(0, 6), ranks=(0, 1, 2, 3), tp=2, dp=2, sp=True), num_samples=4),
            replica(stage(layers=(0, 4), ranks=(4,)), stage(layers=(4, 6), ranks=(5,)), num_samples=2),
        ],
    )
    return with_domains(made, (0, 1, 2, 3), (4, 5))


def three_domains(model: ModelSpec) -> Plan:
    """Two replicas and an intra-stage dp over three domains, one idle rank in one of them."""
    made = plan(
        model,
        [
            replica(stage(layers=(0, 2), ranks=(0, 1), dp=2), stage(layers=(2, 6), ranks=(2,), mbs=2), num_samples=4),
            replica(stage(layers=(0, 3), ranks=(3, 4), tp=2), stage(layers=(3, 6), ranks=(5, 7), tp=2), num_samples=2),
        ],
        idle_ranks=(6,),
    )
    return with_domains(made, (0, 1, 3), (2, 5), (4, 6, 7), bucket_numel=2000)


PLANS = {
    "equal-nodes": equal_nodes,
    "unequal-domains": unequal_domains,
    "tp-2+1": tp_2_and_1,
    "three-domains": three_domains,
}
MODELS = {"gpt2-tied": gpt2_model, "llama-gqa": llama_model}
OPTIONS = {"beside": BESIDE, "after": AFTER, "sharded": SHARDED, "sharded-unequal": SHARDED, "gathered": GATHERED_FIRST}
DISTRIBUTED = ("sharded", "sharded-unequal", "gathered")
"""Of these, the plans have a distributed optimizer."""

ALWAYS = ("equal-nodes", "llama-gqa")
"""What every run has, and one more."""


def _cases() -> Iterator[Any]:
    """Every layout in all ways, in one visit of its ranks."""
    for layout, build in PLANS.items():
        for style, model in MODELS.items():
            turns = (pytest.mark.slow, pytest.mark.rotates(f"{style}", every=2, turn=list(MODELS).index(style)))
            marks = () if (layout, style) == ALWAYS else turns
            ways = {how: Training(in_the_way(build(model()), how), options) for how, options in OPTIONS.items()}
            yield pytest.param(ways, id=f"{layout}-{style}", marks=marks)


def in_the_way(made: Plan, how: str) -> Plan:
    made = with_unequal_shares(made) if how == "sharded-unequal" else made
    return sharded(made) if how in DISTRIBUTED else made


@pytest.mark.slow
@pytest.mark.parametrize("ways", list(_cases()))
def test_the_sums_are_those_of_one_process(
    ways: dict[str, Training], num_steps: int, subtests: pytest.Subtests
) -> None:
    for training in ways.values():
        validate(training.plan)
        assert PlanCommunicators(training.plan).hierarchical
    for how, traces in trained(ways, num_steps).items():
        with subtests.test(how):
            made = ways[how].plan
            assert_same_training(made, traces, one_process(made, num_steps), tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=1)
def test_a_bucket_may_be_too_small_for_its_rails() -> None:
    """A norm's 32 weights alone: one of two rails has nothing to carry, and no shard but one has an element."""
    whole = with_unequal_shares(unequal_domains(gpt2_model()))
    ways = {"whole": Training(whole, BESIDE), "sharded": Training(sharded(whole), SHARDED)}
    tiny = {
        how: dataclasses.replace(each, data_parallel=dataclasses.replace(each.data_parallel, bucket_numel=1))
        for how, each in ways.items()
    }
    for how, traces in trained(tiny, NUM_STEPS).items():
        assert_same_training(ways[how].plan, traces, one_process(whole, NUM_STEPS), tolerance=TOLERANCE)


@pytest.mark.slow
def test_every_holder_ends_with_the_same_bits() -> None:
    """An element is summed in one place, and copied from there."""
    made = three_domains(gpt2_model())
    seen: dict[str, np.ndarray] = {}
    for trace in run_ranks(train, made.world_size, made, NUM_STEPS):
        for parameter in parameters(made.model):
            if trace is not None and parameter.shard_dim is None and parameter.name in trace.weights[-1]:
                weight = trace.weights[-1][parameter.name]
                np.testing.assert_array_equal(weight, seen.setdefault(parameter.name, weight))
    assert seen


def collectives_of_a_step(rank: int, made: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """(operation, ranks) of all collectives of the sums, in the order of their start on this rank."""
    started: list[tuple[str, tuple[int, ...]]] = []
    for name in ("all_reduce", "reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, _recording(name, getattr(dist, name), started))
    with replaced((trainer, "connect_buckets"), lambda buckets: None):
        train(rank, made, 1, AFTER)
    return [(name, ranks) for name, ranks in started if ranks in gradient_communicators(made)]


def _recording(name: str, collective: Any, started: list[tuple[str, tuple[int, ...]]]) -> Any:
    def recording(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("async_op"):
            started.append((name, tuple(dist.get_process_group_ranks(kwargs["group"]))))
        return collective(*args, **kwargs)

    return recording


@pytest.mark.slow
def test_between_equal_domains_a_rail_carries_each_part_once() -> None:
    """Per bucket a reduce-scatter inside, one all-reduce over the rail, an all-gather inside."""
    made = equal_nodes(llama_model())
    count = len(gradient_buckets(made, bucket_numel=3000))
    for rank, started in enumerate(run_ranks(collectives_of_a_step, 4, made)):
        inside, rail = ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]
        phases = [("reduce_scatter_tensor", inside), ("all_reduce", rail), ("all_gather_into_tensor", inside)]
        assert started == phases * count


class Watching(Timing):
    """Lets a rank go on with its backward only when the bucket before is through, which nobody waits for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, tuple[int, ...], bool]] = []
        self._before: Sequence[Waitable] = ()

    def collective(
        self,
        queued: QueuedAction,
        operation: Collective,
        bucket: Bucket,
        start: Start,
        *,
        ready_s: float | None = None,
    ) -> Sequence[Waitable]:
        deadline = time.monotonic() + 60
        while not all(work.is_completed() for work in self._before):
            assert time.monotonic() < deadline, "the phases of the bucket before stand still"
            time.sleep(0.001)
        self._before = start()
        self.seen.append((operation, bucket.ranks, bool(bucket.domains)))
        return self._before


def watched_step(rank: int, made: Plan) -> list[tuple[str, tuple[int, ...], bool]]:
    timing = Watching()
    context = create_groups(made, device=torch.device("cpu"), timing=timing)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=BESIDE)
    trainer.compute_gradients(microbatches(made, rank, step=0))
    return timing.seen


@pytest.mark.slow
def test_phases_go_on_beside_the_backward() -> None:
    """All phases of a bucket end while this rank computes, and the timing has seen every bucket with its domains."""
    made = equal_nodes(gpt2_model())
    buckets = gradient_buckets(made, bucket_numel=3000)
    for seen in run_ranks(watched_step, made.world_size, made):
        assert seen == [("all_reduce", bucket.ranks, True) for bucket in buckets]


@pytest.mark.slow
def test_every_rank_creates_the_groups_inside_and_between_domains_in_one_order() -> None:
    """An idle rank too: torch counts the groups of a process to tell them apart."""
    made = three_domains(gpt2_model())
    first, *others = run_ranks(created_groups, made.world_size, made)
    assert all(groups == first for groups in others)
    last = list(PlanCommunicators(made).hierarchical)
    assert first[-len(last) :] == last


def created_groups(rank: int, made: Plan) -> list[tuple[int, ...]]:
    created: list[tuple[int, ...]] = []
    new_group = dist.new_group  # noqa: TID251

    def recording(ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        if not kwargs["use_local_synchronization"]:
            created.append(tuple(ranks))
        return new_group(ranks, *args, **kwargs)

    dist.new_group = recording  # noqa: TID251
    create_groups(made, device=torch.device("cpu"))
    return created
