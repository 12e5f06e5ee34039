"""A batch that grows while a run goes on: under any plan the losses and weights of one process that ramps up alike."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero.checkpoint.folder import find_checkpoint, read_state
from hetero.distributed.process_groups import create_groups
from hetero.plan.batch_shares import with_batch_size
from hetero.plan.batch_sizes import BatchRampup, BatchSchedule
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.session import TrainingSession
from hetero.runtime.trainer import Trainer
from hetero.spec.parameters import parameters
from tests.helpers.commands import command_line
from tests.helpers.comparison import shard
from tests.helpers.host_training import activations_to_hosts, gradients_to_hosts, left_to_hosts
from tests.helpers.layouts import layout, with_delays
from tests.helpers.models import MOE_FLAGS, moe_model
from tests.helpers.plans import deep_enough, plan, replica, sharded, stage
from tests.helpers.played_streams import played_cuda
from tests.helpers.ranks import run_ranks
from tests.helpers.sessions import Session, session
from tests.helpers.training import ADAM, SMALL_BUCKETS, data_of, one_process_plan, trace_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

RAMPUP = ["--rampup-batch-size", "4", "4", "16"]
SCHEDULE = ["--step-batch-size-schedule", "0:4 128:12 320:8"]
SCHEDULED_SIZES = [4, 4, 12, 8, 8]
"""Of samples of 16 tokens: the third step begins at sample 8, the fourth at sample 20, as megatron-core counts."""

SIZES = [4, 4, 8, 12, 12]
"""Of a batch of 12: two increments, of 8 samples each; the fourth step is the first behind 16."""
HALF = 2


def two_unlike_replicas() -> Plan:
    """Units of 2 and 1, of which the first has two thirds."""
    first = replica(stage(layers=(0, 4), ranks=(0, 1), tp=2, mbs=2), stage(layers=(4, 6), ranks=(2,)), num_samples=8)
    model = layout("one-stage", "gpt2-tied").model
    return plan(model, [first, replica(stage(layers=(0, 6), ranks=(3,)), num_samples=4)], precision="fp64")


def experts() -> Plan:
    """One sample in each microbatch, as in one process: the auxiliary loss is a mean over microbatches."""
    first = replica(stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True), stage(layers=(1, 3), ranks=(2,)), num_samples=9)
    second = replica(stage(layers=(0, 3), ranks=(3,)), num_samples=3)
    return plan(moe_model(num_layers=3), [first, second], precision="fp64")


def experts_in_unlike_microbatches() -> Plan:
    """With a loss of each sequence, which is one process's for any microbatches."""
    first = replica(
        stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True), stage(layers=(1, 3), ranks=(2,), mbs=2), num_samples=8
    )
    second = replica(stage(layers=(0, 3), ranks=(3,)), num_samples=4)
    return plan(moe_model(num_layers=3), [deep_enough(first), second], precision="fp64")


def interleaved() -> Plan:
    """Stages in turns beside a rank, with hosts that update and keep activations, and backwards in two halves."""
    whole = layout("interleaved-3x2", "gpt2-tied")
    first = deep_enough(dataclasses.replace(whole.replicas[0], num_samples=8))
    second = replica(stage(layers=(0, 6), ranks=(3,)), num_samples=4)
    made = with_delays(left_to_hosts(plan(whole.model, [first, second], precision="fp64"), speculate=True), [1, None])
    alone = made.replicas[1]
    offload = dataclasses.replace(alone.stages[0].offload, activations_until=3.0)
    return made.with_replicas({1: alone.with_stage(0, offload=offload, wgrad_delay=None)})


def everything_on_hosts() -> Plan:
    """Hosts that update, add gradients up and keep activations, some of them for a part of a stage."""
    return activations_to_hosts(gradients_to_hosts(two_unlike_replicas(), speculate=True))


def run(made: Plan, *, end_step: int, rampup: Sequence[str] = RAMPUP, **flags: str | None) -> list[Session]:
    if made.model.num_experts is not None:
        flags |= MOE_FLAGS
        flags["moe_router_load_balancing_type"] = "aux_loss" if made.micro_batch_sizes == (1,) else "seq_aux_loss"
    words = command_line(
        global_batch_size=None if rampup == SCHEDULE else str(made.global_batch_size),
        train_iters=None,
        train_samples=str(sum(SIZES)),
        hetero_plan="given.json",
        init_method_std="0.1",
        **({"use_distributed_optimizer": "", "overlap_param_gather": ""} if made.distributed_optimizer else {}),
        **flags,
    )
    return run_ranks(session, made.world_size, made, [*words, *rampup], end_step)


@functools.cache
def alone(made: Plan, *, scheduled: bool = False) -> Session:
    """One process from the start to the end."""
    (one,) = run(one_process_plan(made), end_step=len(SIZES), rampup=SCHEDULE if scheduled else RAMPUP)
    return one


def assert_is_one_process(made: Plan, ranks: list[Session], *, from_step: int, scheduled: bool = False) -> None:
    expected = alone(made, scheduled=scheduled)
    by_name = {parameter.name: parameter for parameter in parameters(made.model)}
    for rank, mine in enumerate(ranks):
        assert mine.losses == pytest.approx(expected.losses[from_step:], rel=1e-9)
        norms = [result.grad_norm for result in expected.results[from_step:]]
        assert [result.grad_norm for result in mine.results] == pytest.approx(norms, rel=1e-9)
        assert mine.next_lr == expected.next_lr
        for tensor, values in mine.weights.items():
            whole = expected.weights[tensor]
            wanted = shard(whole, by_name[tensor], trace_of(made, rank))
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-9 * np.abs(whole).max(), err_msg=tensor)


@pytest.mark.slow
def test_a_run_that_ramps_up_goes_on_where_it_was(tmp_path: Path) -> None:
    """Without a stop and with one, under this plan and under another, in front of the first step of 8 samples."""
    made, folder = two_unlike_replicas(), str(tmp_path)
    assert_is_one_process(made, run(made, end_step=len(SIZES)), from_step=0)
    run(sharded(made), end_step=HALF, save=folder)
    state = read_state(find_checkpoint(tmp_path, HALF))
    assert (state.consumed_samples, state.scheduled_samples, state.adam_step) == (sum(SIZES[:HALF]), 8, HALF)
    assert state.train_samples == sum(SIZES)
    assert_is_one_process(made, run(made, end_step=len(SIZES), load=folder), from_step=HALF)
    with pytest.raises(AssertionError, match=r"with --rampup-batch-size 4 4 16, not without: .*; give --rampup-batch"):
        run(made, end_step=HALF, load=folder, rampup=())


def losses_with(played: bool, rank: int, made: Plan, varying_batch: BatchRampup | BatchSchedule) -> list[float]:
    """Train as many steps as :data:`SIZES` has, with CUDA's streams and pinned memory, or without."""
    with played_cuda() if played else contextlib.nullcontext():
        context = create_groups(made, device=torch.device("cpu"))
        trainer = Trainer(
            context, options=StageOptions(init_method_std=0.1), adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS
        )
        data = data_of(context, varying_batch=varying_batch)
        training = TrainingSession(context, trainer, data=data, varying_batch=varying_batch)
        return [training.step().loss for _ in SIZES]


def test_staging_buffers_hold_the_largest_step() -> None:
    """Of a batch that grows, and of one that shrinks again: the losses are those without staging."""
    made = two_unlike_replicas()
    growing = BatchRampup(start=4, increment=4, samples=16)
    varying = BatchSchedule(entries=((0, 4), (128, 12), (320, 8)), seq_length=16)
    for varying_batch in (growing, varying):
        expected, staged = (
            run_ranks(functools.partial(losses_with, played), made.world_size, made, varying_batch)
            for played in (False, True)
        )
        assert staged == expected


@pytest.mark.slow
def test_a_run_with_a_schedule_of_batch_sizes_goes_on_where_it_was(tmp_path: Path) -> None:
    """The same; the batch grows to its whole size at once and shrinks again."""
    made, folder = two_unlike_replicas(), str(tmp_path)
    assert_is_one_process(made, run(made, end_step=5, rampup=SCHEDULE), from_step=0, scheduled=True)
    counted = [result.num_tokens for result in alone(made, scheduled=True).results]
    assert [round(tokens / (0.85 * 16)) for tokens in counted] == SCHEDULED_SIZES
    run(sharded(made), end_step=3, save=folder, rampup=SCHEDULE)
    state = read_state(find_checkpoint(tmp_path, 3))
    assert (state.consumed_samples, state.scheduled_samples, state.adam_step) == (20, 20, 3)
    later = run(made, end_step=5, load=folder, rampup=SCHEDULE)
    assert_is_one_process(made, later, from_step=3, scheduled=True)
    with pytest.raises(
        AssertionError, match=r"with --step-batch-size-schedule '0:4 128:12 320:8', not without: .*; give"
    ):
        run(made, end_step=5, load=folder)


def test_tokens_of_a_step_are_those_of_its_batch() -> None:
    """One process, by hand: sample i counts all of its 16 tokens where i is a multiple of 4, and others most."""
    made = one_process_plan(two_unlike_replicas())
    counted = [result.num_tokens for result in alone(made).results]
    assert [round(tokens / (0.85 * 16)) for tokens in counted] == SIZES


@pytest.mark.slow
def test_a_small_batch_is_a_whole_one_to_who_knows_no_other() -> None:
    """The first step, with its auxiliary loss, is that of a plan whose batch has as many samples."""
    made = experts()
    (small,) = run(one_process_plan(with_batch_size(made, SIZES[0])), end_step=1, rampup=())
    first = alone(made).results[0]
    assert (first.loss, first.grad_norm) == pytest.approx((small.results[0].loss, small.results[0].grad_norm), rel=1e-9)


@pytest.mark.slow
@pytest.mark.rotates("plans", every=2, turn=0)
@pytest.mark.parametrize("made", [experts, experts_in_unlike_microbatches, interleaved, everything_on_hosts])
def test_what_depends_on_the_batch_follows_it(made: Callable[[], Plan]) -> None:
    """The share of a microbatch in an auxiliary loss; the order of computes of ranks with several stages; how many
    microbatches' gradients a host adds up before they are summed, and the order in which activations come back."""
    whole = made()
    assert_is_one_process(whole, run(whole, end_step=len(SIZES)), from_step=0)
