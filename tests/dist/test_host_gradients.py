"""Gradients that add up on the host: every layout trains like one process, whatever copies take.

To 1e-9 in float64, with the bits of a training that adds on the device; and what is held is what is predicted.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs
from hetero.cost.stage_memory import GRADIENT_SLOTS, gradients_to_host, largest_gradient
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer
from tests.helpers.comparison import assert_same_training
from tests.helpers.host_training import delay_copies, gradients_to_hosts
from tests.helpers.layouts import in_turns, layouts
from tests.helpers.models import llama_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 2
TOLERANCE = 1e-9
EACH_ALONE = DataParallelOptions(bucket_numel=1, overlap_param_gather=True)


ALWAYS = ("one-stage-tp4-sp-llama-gqa",)
"""What every run has: the smallest layouts that find a planted fault which not all layouts find."""


def cases() -> Iterator[Any]:
    for number, (name, style, described) in enumerate(layouts()):
        always = f"{name}-{style}" in ALWAYS
        marks = [pytest.mark.slow, *([] if always else [in_turns(name, every=12, first=3)])]
        made = gradients_to_hosts(described, speculate=number % 2 == 0)
        yield pytest.param(made, id=f"{name}-{style}", marks=marks)


@pytest.mark.parametrize("made", list(cases()))
def test_a_layout_trains_like_one_process(made: Plan) -> None:
    validate(made)
    traces = run_ranks(train_late, made.world_size, made, 0.002)
    alone = run_alone(train, one_process_plan(made), NUM_STEPS)
    assert_same_training(made, traces, alone, tolerance=TOLERANCE)
    assert any(trace is not None and trace.gradients_on_way for trace in traces), "something went out"


def train_late(rank: int, made: Plan, late_by_s: float) -> Trace | None:
    """Every copy of a gradient begins so much later."""

    def prepare(trainer: Trainer, rank: int) -> None:
        gradients: Any = trainer.host_gradients
        if gradients is not None:
            delay_copies(gradients._copies, lambda: late_by_s)

    # Where something is on the host, gradients are added in a pass of their own, which rounds otherwise.
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=False)
    return train(rank, made, NUM_STEPS, EACH_ALONE, options, weights_at="the end", prepare=prepare)


def shared_by_two(offload: Offload) -> Plan:
    """Three layers, whole on each of two ranks, with several microbatches."""
    held = dataclasses.replace(stage(layers=(0, 3), ranks=(0, 1), dp=2), offload=offload)
    return sharded(plan(llama_model(num_layers=3), [replica(held, num_samples=6)]))


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_the_bits_are_those_of_the_device_however_late_copies_are() -> None:
    """Also where they are slower than backwards, and where ranks sum up what their hosts have added."""
    kept, added = (
        run_ranks(train_late, 2, shared_by_two(Offload(optimizer_from=1, gradients_from=first)), late_by_s)
        for first, late_by_s in ((None, 0.0), (1.5, 0.005))
    )
    for theirs, ours in zip(kept, added, strict=True):
        assert ours.gradients_on_way > theirs.gradients_on_way == 0
        assert ours.losses == theirs.losses
        for name, weight in ours.weights[-1].items():
            np.testing.assert_array_equal(weight, theirs.weights[-1][name], err_msg=name)


def alone(first: float) -> Plan:
    held = stage(layers=(0, 6), ranks=(0,))
    offload = Offload(optimizer_from=first, gradients_from=first)
    model = llama_model(num_layers=6)
    return sharded(plan(model, [replica(dataclasses.replace(held, offload=offload), num_samples=3)]))


@pytest.mark.slow
def test_what_is_held_is_what_is_predicted() -> None:
    """With copies that are late, so that all slots are in use."""
    made = alone(1)
    (trace,) = run_ranks(train_late, 1, made, 0.005)
    costs, held = memory_costs(made), made.replicas[0].stages[0]
    elements = gradients_to_host(held, costs)
    assert list(elements) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "all blocks but the first ones"
    most = (GRADIENT_SLOTS * max(elements.values()) + largest_gradient(held, costs)) * costs.element_bytes
    assert 0.6 * most < trace.gradients_on_way <= most
    _, gradients, _ = trace.static_bytes
    kept = costs.parameters_per_rank(device="cpu", first_layer=0, end_layer=6, tp=1) - sum(elements.values())
    assert gradients == pytest.approx(costs.gradient_bytes * kept, rel=0.05)
    assert trace.host_bytes == pytest.approx(host_memory(made, costs)[0, 0].held, rel=0.05)


def test_what_a_copy_raises_is_raised() -> None:
    with pytest.raises(AssertionError, match="MemoryError: no more"):
        run_ranks(failing_copy, 1, alone(5))


def failing_copy(rank: int, made: Plan) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no more")

    def prepare(trainer: Trainer, rank: int) -> None:
        gradients: Any = trainer.host_gradients
        gradients._copies.copy = fail

    train(rank, made, 1, SMALL_BUCKETS, prepare=prepare)
