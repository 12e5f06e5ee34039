"""Weights that live on the host: every layout trains like one process, whatever copies take.

To 1e-9 in float64, with the bits of a training that keeps them on the device; and what is held is what is predicted.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hetero.cost.host_memory import host_memory
from hetero.cost.memory import memory_costs, plan_memory
from hetero.cost.stage_memory import WEIGHT_SLOTS, fetched_weights
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.plan.offload import Offload
from hetero.plan.validate import validate
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer
from tests.helpers.comparison import assert_same_training
from tests.helpers.host_training import activations_to_hosts, delay_copies, weights_to_hosts
from tests.helpers.layouts import in_turns, layouts
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, Trace, microbatches, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

NUM_STEPS = 2
TOLERANCE = 1e-9
EACH_ALONE = DataParallelOptions(bucket_numel=1, overlap_param_gather=True)


ALWAYS = ("uneven-layers-gpt2-tied",)
"""What every run has: the smallest layouts that find a planted fault which not all layouts find."""


def cases() -> Iterator[Any]:
    for number, (name, style, described) in enumerate(layouts()):
        always = f"{name}-{style}" in ALWAYS
        marks = [pytest.mark.slow, *([] if always else [in_turns(name, every=12, first=6)])]
        made = weights_to_hosts(described, turn=number, speculate=number % 2 == 0)
        yield pytest.param(made, id=f"{name}-{style}", marks=marks)


@pytest.mark.parametrize("made", list(cases()))
def test_a_layout_trains_like_one_process(made: Plan) -> None:
    validate(made)
    traces = run_ranks(train_late, made.world_size, made, 0.0005)
    alone = run_alone(train, one_process_plan(made), NUM_STEPS)
    assert_same_training(made, traces, alone, tolerance=TOLERANCE)
    assert any(trace is not None and trace.weights_there for trace in traces), "something came in"


def train_late(rank: int, made: Plan, late_by_s: float) -> Trace | None:
    """Every copy of a weight begins so much later, on its way in and out."""

    def prepare(trainer: Trainer, rank: int) -> None:
        for each in (trainer.host_weights, trainer._gather):
            copies: Any = getattr(each, "_copies", None)
            if copies is not None:
                delay_copies(copies, lambda: late_by_s)

    return train(rank, made, NUM_STEPS, EACH_ALONE, weights_at="the end", prepare=prepare)


def two_stages(weights: float | None, **fields: Any) -> Plan:
    """Three layers, whole on each of two ranks, with several microbatches; and three more on another rank."""
    offload = [
        Offload(optimizer_from=1, gradients_from=1, weights_from=weights),
        Offload(optimizer_from=3, gradients_from=3, weights_from=None if weights is None else 4),
    ]
    shared = stage(layers=(0, 3), ranks=(0, 1), dp=2, **fields)
    made = replica(shared, stage(layers=(3, 6), ranks=(2,), **fields), num_samples=6)
    return sharded(plan(gpt2_model(), [made.with_each_stage(offload=offload)]))


@pytest.mark.slow
@pytest.mark.rotates("recomputations", every=2, turn=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_bits_are_those_of_the_device_however_late_copies_are(recompute: str) -> None:
    """Also of weights that ranks gather, and of layers that are computed again."""
    kept, fetched = (
        run_ranks(train_late, 3, two_stages(first, recompute=recompute), late_by_s)
        for first, late_by_s in ((None, 0.0), (1.5, 0.003))
    )
    for theirs, ours in zip(kept, fetched, strict=True):
        assert ours.weights_there > theirs.weights_there == 0
        assert ours.losses == theirs.losses
        for name, weight in ours.weights[-1].items():
            np.testing.assert_array_equal(weight, theirs.weights[-1][name], err_msg=name)


@pytest.mark.slow
@pytest.mark.rotates(every=2, turn=0)
def test_activations_and_weights_are_there_together() -> None:
    """Of which hooks on saved tensors tell one from the other, also where weights come and go."""
    made = two_stages(1.5)
    both = activations_to_hosts(made)
    theirs, ours = (run_ranks(train_late, 3, each, 0.0) for each in (made, both))
    assert ours[0].activations_on_host > theirs[0].activations_on_host == 0
    assert [trace.losses for trace in ours] == [trace.losses for trace in theirs]
    assert ours[0].activations_on_host == run_ranks(train_late, 3, without_weights(both), 0.0)[0].activations_on_host


def without_weights(made: Plan) -> Plan:
    kept = [dataclasses.replace(s.offload, weights_from=None) for s in made.replicas[0].stages]
    return made.with_replica(0, made.replicas[0].with_each_stage(offload=kept))


def alone(first: float | None) -> Plan:
    """A tied embedding and six layers on one rank, all of whose gradients are on its host."""
    held = stage(layers=(0, 6), ranks=(0,))
    offload = Offload(optimizer_from=-1, gradients_from=-1, weights_from=first)
    return sharded(plan(gpt2_model(), [replica(dataclasses.replace(held, offload=offload), num_samples=3)]))


@pytest.mark.slow
@pytest.mark.parametrize("first", [-1, 2.5])
def test_what_is_held_is_what_is_predicted(first: float) -> None:
    """With copies that are late, so that all slots are in use."""
    made = alone(first)
    (trace,) = run_ranks(train_late, 1, made, 0.0005)
    costs, held = memory_costs(made), made.replicas[0].stages[0]
    slots = plan_memory(made, costs)[0, 0].working - plan_memory(alone(None), costs)[0, 0].working
    assert slots == WEIGHT_SLOTS * max(fetched_weights(held, costs).values()) * costs.element_bytes
    assert 0.6 * slots < trace.weights_there <= slots
    assert trace.static_bytes[0] == pytest.approx(plan_memory(made, costs)[0, 0].weights, rel=0.05)
    assert trace.host_bytes == pytest.approx(host_memory(made, costs)[0, 0].held, rel=0.05)


@pytest.mark.slow
def test_an_evaluation_fetches_them_as_well() -> None:
    (kept, fetched) = (run_ranks(evaluated, 1, alone(first))[0] for first in (None, -1))
    assert fetched == kept


def evaluated(rank: int, made: Plan) -> list[float]:
    """Losses of an evaluation in front of a step, behind it, and of a step that follows."""
    context = create_groups(made, device=torch.device("cpu"))
    options = StageOptions(init_method_std=0.1)
    trainer = Trainer(context, options=options, adam=ADAM, seed=7, data_parallel=SMALL_BUCKETS, warms_up=True)
    batch = microbatches(made, rank, step=0)
    before, _ = trainer.evaluate(batch)
    losses = [before, trainer.step(batch).loss]
    after, _ = trainer.evaluate(batch)
    return [*losses, after, trainer.step(batch).loss]


def test_what_a_copy_raises_is_raised() -> None:
    with pytest.raises(AssertionError, match="MemoryError: no more"):
        run_ranks(failing_copy, 1, alone(5))


def failing_copy(rank: int, made: Plan) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no more")

    def prepare(trainer: Trainer, rank: int) -> None:
        weights: Any = trainer.host_weights
        weights._copies.copy = fail

    train(rank, made, 1, SMALL_BUCKETS, prepare=prepare)
