"""Activations that wait on the host for their backward: every layout trains like one process, whatever copies take.

To 1e-9 in float64, with the bits of a training that keeps them on the device; and what is held is what is predicted.
"""

import dataclasses
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs
from hetero.cost.stage_memory import ACTIVATION_SLOTS, blocks_on_host
from hetero.plan.ir import Plan, Stage
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer
from tests.helpers.comparison import assert_same_training
from tests.helpers.host_training import activations_to_hosts, delay_copies, left_to_hosts
from tests.helpers.layouts import in_turns, layout, layouts
from tests.helpers.models import gpt2_model, llama_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 2
TOLERANCE = 1e-9


ALWAYS = ("one-stage-llama-gqa", "uneven-layers-llama-tied")
"""What every run has: the smallest layouts that find a planted fault which not all layouts find."""


def cases() -> Iterator[Any]:
    for name, style, described in layouts():
        always = f"{name}-{style}" in ALWAYS
        marks = [pytest.mark.slow, *([] if always else [in_turns(name, every=12, first=9)])]
        yield pytest.param(activations_to_hosts(described), id=f"{name}-{style}", marks=marks)


@pytest.mark.parametrize("made", list(cases()))
def test_a_layout_trains_like_one_process(made: Plan) -> None:
    validate(made)
    traces = run_ranks(train_late, made.world_size, made, 0.002)
    alone = run_alone(train, one_process_plan(made), NUM_STEPS)
    assert_same_training(made, traces, alone, tolerance=TOLERANCE)
    assert any(trace is not None and trace.activations_on_host for trace in traces), "something went out"


def train_late(rank: int, made: Plan, late_by_s: float) -> Trace | None:
    """Every copy begins up to so much later, at random."""
    lateness = random.Random(rank)

    def prepare(trainer: Trainer, rank: int) -> None:
        activations: Any = trainer.host_activations
        if activations._order:
            delay_copies(activations._copies, lambda: late_by_s * lateness.random())

    # Where something is on the host, gradients are added in a pass of their own, which rounds otherwise.
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=False)
    return train(rank, made, NUM_STEPS, SMALL_BUCKETS, options, weights_at="the end", prepare=prepare)


def two_stages(*untils: float | None, **fields: Any) -> Plan:
    """Three layers on each of two ranks, with several microbatches in flight."""
    stages = (stage(layers=(0, 3), ranks=(0,), depth=3, **fields), stage(layers=(3, 6), ranks=(1,), depth=2))
    offload = [Offload(activations_until=until) for until in untils]
    return plan(gpt2_model(), [replica(*stages, num_samples=5).with_each_stage(offload=offload)])


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_nothing_overtakes_copies_that_are_late() -> None:
    """By hundredths of a second, each; the bits are those of activations that stay."""
    assert_same_bits(two_stages(None, None), two_stages(2, 5), late_by_s=0.02)


@pytest.mark.slow
@pytest.mark.rotates("styles", every=2, turn=0)
@pytest.mark.parametrize("style", ["gpt2-tied", "llama-gqa"])
def test_optimizer_and_activations_are_there_together(style: str) -> None:
    described = left_to_hosts(layout("everything", style), speculate=False)
    assert_same_bits(described, activations_to_hosts(described), late_by_s=0.0)


def assert_same_bits(kept: Plan, on_host: Plan, *, late_by_s: float) -> None:
    validate(on_host)
    both = [run_ranks(train_late, each.world_size, each, late_by_s) for each in (kept, on_host)]
    for theirs, ours in zip(*both, strict=True):
        if theirs is None or ours is None:
            continue
        assert ours.losses == theirs.losses
        for name, weight in ours.weights[-1].items():
            np.testing.assert_array_equal(weight, theirs.weights[-1][name], err_msg=name)


def held_of(made: Plan) -> list[Trace]:
    traces = run_ranks(train_late, made.world_size, made, 0.0)
    return [trace for trace in traces if trace is not None]


def predicted_of(made: Plan, s: int) -> tuple[int, int]:
    """Of a stage of the first replica, bytes on the way and on the host."""
    costs = memory_costs(made)
    blocks = blocks_on_host(made.replicas[0].stages[s], costs).values()
    on_host = host_memory(made, costs)
    return ACTIVATION_SLOTS * max(each.num_bytes for each in blocks), on_host[0, s].activations


@pytest.mark.slow
def test_what_is_held_is_what_is_predicted() -> None:
    made = two_stages(2, 5)
    for s, trace in enumerate(held_of(made)):
        on_way, on_host = predicted_of(made, s)
        assert trace.activations_on_way == pytest.approx(on_way, rel=0.03)
        assert trace.activations_on_host == pytest.approx(on_host, rel=0.03)


@pytest.mark.slow
def test_of_a_layer_that_is_computed_again_the_input_goes_out() -> None:
    """Which takes a small part of what its other activations would."""
    (again, _), (whole, _) = held_of(two_stages(2, 5, recompute="full")), held_of(two_stages(2, 5))
    _, on_host = predicted_of(two_stages(2, 5, recompute="full"), 0)
    assert again.activations_on_host == pytest.approx(on_host, rel=0.05)
    assert again.activations_on_host < 0.2 * whole.activations_on_host


def inputs_of_second_stage(rank: int, made: Plan) -> list[int]:
    """Bytes of the stage's inputs whenever a backward begins, of all microbatches that are in flight."""
    found: list[int] = []

    def prepare(trainer: Trainer, rank: int) -> None:
        if rank == 1:
            runner: Any = trainer._executor._stages[1]
            backward = runner.backward

            def noted(*args: Any) -> None:
                found.append(sum(each.untyped_storage().nbytes() for each in runner._inputs.values()))
                backward(*args)

            runner.backward = noted

    train(rank, made, 1, SMALL_BUCKETS, prepare=prepare)
    return found


@pytest.mark.slow
def test_the_memory_of_a_stages_input_is_given_back() -> None:
    _, kept = run_ranks(inputs_of_second_stage, 2, two_stages(None, None))
    _, gone = run_ranks(inputs_of_second_stage, 2, two_stages(None, 5))
    assert len(kept) == len(gone) == 5
    # All but those of blocks that are still on their way out.
    assert min(gone) == 0 < min(kept)


def test_what_a_copy_raises_is_raised() -> None:
    with pytest.raises(AssertionError, match="MemoryError: no more"):
        run_ranks(failing_copy, 1, plan(llama_model(num_layers=2), [replica(one_stage(), num_samples=2)]))


def one_stage() -> Stage:
    return dataclasses.replace(stage(layers=(0, 2), ranks=(0,)), offload=Offload(activations_until=1))


def failing_copy(rank: int, made: Plan) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no more")

    def prepare(trainer: Trainer, rank: int) -> None:
        activations: Any = trainer.host_activations
        activations._copies.copy = fail
        assert isinstance(activations._out, ThreadPoolExecutor)

    train(rank, made, 1, SMALL_BUCKETS, prepare=prepare)
