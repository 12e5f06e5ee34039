"""Dropout under asymmetric plans: ranks that compute the same draw the same, others draw differently."""

import dataclasses

import numpy as np
import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan, Recompute
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.options import StageOptions
from hetero.runtime.stage import StageModel, build_stages
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, microbatches, train

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

MODEL = gpt2_model(num_layers=3)
NUM_STEPS = 3
DROPOUT = StageOptions(init_method_std=0.1, attention_dropout=0.2, hidden_dropout=0.2)


def in_float64(plan: Plan) -> Plan:
    return dataclasses.replace(plan, precision="fp64")


def unlike_replicas() -> Plan:
    """tp 2 with and without sequence parallelism, dp 2, and an idle rank."""
    first = replica(
        stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=True), stage(layers=(2, 3), ranks=(2, 3), dp=2), num_samples=4
    )
    second = replica(stage(layers=(0, 1), ranks=(4,)), stage(layers=(1, 3), ranks=(5, 6), tp=2), num_samples=2)
    return in_float64(plan(MODEL, [first, second], idle_ranks=(7,)))


def test_training_with_dropout_keeps_copies_of_weights_equal() -> None:
    """Finite losses, the same on all ranks; what several ranks hold is equal bit for bit after every step."""
    made = unlike_replicas()
    with_dropout = run_ranks(train, made.world_size, made, NUM_STEPS, SMALL_BUCKETS, DROPOUT)
    traces = [trace for trace in with_dropout if trace is not None]
    assert len(traces) == made.world_size - 1
    assert all(trace.losses == traces[0].losses for trace in traces)
    assert np.isfinite(traces[0].losses).all()
    assert np.isfinite(traces[0].grad_norms).all()
    for step in range(NUM_STEPS):
        assert_copies_are_equal(traces, step)
    assert_shards_are_equal(traces)
    (undropped, *_) = run_ranks(train, made.world_size, made, 1)
    assert abs(undropped.losses[0] - traces[0].losses[0]) > 1e-3, "dropout is off"


def assert_copies_are_equal(traces: list[Trace], step: int) -> None:
    for parameter in parameters(MODEL):
        copies = [trace.weights[step][parameter.name] for trace in traces if parameter.name in trace.weights[step]]
        if parameter.shard_dim is None:
            assert len(copies) > 1
            for copy in copies[1:]:
                np.testing.assert_array_equal(copy, copies[0], parameter.name)


def assert_shards_are_equal(traces: list[Trace]) -> None:
    """Two tp ranks' halves of the embedding, one below the other, are what a rank without tp holds."""
    name = "embedding.word_embeddings.weight"
    held = [(trace.tp, trace.tp_rank, trace.weights[-1][name]) for trace in traces if name in trace.weights[-1]]
    (whole, *_) = [weight for tp, _, weight in held if tp == 1]
    for tp, tp_rank, weight in held:
        np.testing.assert_array_equal(weight, np.split(whole, tp)[tp_rank])


def build(rank: int, plan: Plan) -> StageModel:
    context = create_groups(plan, device=torch.device("cpu"))
    (model,) = build_stages(context, options=DROPOUT, seed=7)
    return model


def forward_twice(rank: int, plan: Plan, batch: Microbatch) -> list[np.ndarray]:
    """Two forwards of the same microbatch through a rank's stage: activations, or token losses on a last stage.

    Later stages get zeros as input.
    """
    model = build(rank, plan)
    place = plan.placement(rank)
    assert place is not None
    held_by = plan.replicas[place.replica].stages[place.stage]
    rows = plan.seq_length // (held_by.tp if held_by.sequence_parallel else 1)
    zeros_SBH = torch.zeros(rows, held_by.micro_batch_size, plan.model.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        return [model.forward(zeros_SBH if place.stage else None, batch).numpy() for _ in range(2)]


def any_batch(plan: Plan) -> Microbatch:
    return microbatches(plan, plan.replicas[0].stages[0].ranks[0], step=0)[0]


@pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp-sp"])
def test_tensor_parallel_ranks_agree_on_what_they_all_hold(sp: bool) -> None:
    """The losses of a stage's tokens; without sequence parallelism the activations between stages as well."""
    stages = stage(layers=(0, 2), ranks=(0, 1), tp=2, sp=sp), stage(layers=(2, 3), ranks=(2, 3), tp=2, sp=sp)
    made = in_float64(plan(MODEL, [replica(*stages)]))
    first, second, third, fourth = run_ranks(forward_twice, 4, made, any_batch(made))
    if not sp:
        np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(third, fourth)
    assert not np.array_equal(first[0], first[1]), "two microbatches must not drop the same"


def test_replicas_and_data_parallel_ranks_drop_differently() -> None:
    """The same microbatch through the same layers: equal without dropout, so what differs is what was dropped."""
    whole = stage(layers=(0, 3), ranks=(0, 1), dp=2), stage(layers=(0, 3), ranks=(2,))
    made = in_float64(plan(MODEL, [replica(whole[0]), replica(whole[1])]))
    losses = [seen[0] for seen in run_ranks(forward_twice, 3, made, any_batch(made))]
    assert not np.array_equal(losses[0], losses[1])
    assert not np.array_equal(losses[0], losses[2])
    assert not np.array_equal(losses[1], losses[2])


def gradients(rank: int, plan: Plan, batch: Microbatch) -> dict[str, np.ndarray]:
    model = build(rank, plan)
    model.forward(None, batch).sum().backward()
    return {name: tensor.grad.numpy() for name, (_, tensor) in model.parameters.items()}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("tp", [1, 2])
def test_recompute_drops_again_what_was_dropped(recompute: Recompute, tp: int) -> None:
    """Else the backward would be that of another forward."""
    ranks = tuple(range(tp))
    kept = in_float64(plan(MODEL, [replica(stage(layers=(0, 3), ranks=ranks, tp=tp, sp=True))]))
    computed_again = in_float64(
        plan(MODEL, [replica(stage(layers=(0, 3), ranks=ranks, tp=tp, sp=True, recompute=recompute))])
    )
    expected = run_ranks(gradients, tp, kept, any_batch(kept))
    actual = run_ranks(gradients, tp, computed_again, any_batch(kept))
    for ours, theirs in zip(actual, expected, strict=True):
        for name, gradient in theirs.items():
            np.testing.assert_allclose(ours[name], gradient, rtol=0, atol=1e-10 * np.abs(gradient).max(), err_msg=name)
