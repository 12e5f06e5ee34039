"""The loss of an evaluation is one process's, under any plan, and leaves training as it was."""

import dataclasses

import numpy as np
import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from tests.helpers.layouts import layouts
from tests.helpers.plans import sharded
from tests.helpers.ranks import run_alone, run_ranks
from tests.helpers.shared_memory_group import with_shared_memory
from tests.helpers.training import ADAM, SMALL_BUCKETS, microbatches, one_process, one_process_plan, train

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

SHARDED = dataclasses.replace(SMALL_BUCKETS, overlap_param_gather=True)
CHOSEN = [
    (f"{name}-{style}", sharded(plan))
    for name, style, plan in layouts()
    if (name, style) in (("everything", "gpt2-tied"), ("micro-batch-2|4|1", "llama-gqa"), ("moe", "moe"))
]


def losses_around_a_step(rank: int, plan: Plan) -> tuple[list[tuple[float, int]], dict[str, np.ndarray]]:
    """Evaluate the second step's batch before and after a step on the first; then take that second step.

    Tensor-parallel ranks sum over what :func:`train` sums over, as four of them do it in another order over gloo.
    """
    context = with_shared_memory(create_groups(plan, device=torch.device("cpu")))
    dropout = StageOptions(init_method_std=0.1, hidden_dropout=0.0)
    trainer = Trainer(context, options=dropout, adam=ADAM, seed=7, data_parallel=SHARDED)
    first, second = (microbatches(plan, rank, step=step) if reads_data(context) else None for step in (0, 1))
    losses = [trainer.evaluate(second)]
    trainer.step(first)
    losses.append(trainer.evaluate(second))
    trainer.step(second)
    trainer.finish_gather()
    return losses, {name: tensor.detach().numpy() for name, (_, tensor) in trainer.parameters.items()}


@pytest.mark.rotates("layouts", every=2, turn=0)
@pytest.mark.parametrize(("name", "plan"), CHOSEN, ids=[name for name, _ in CHOSEN])
def test_evaluation_is_one_processs(name: str, plan: Plan) -> None:
    expected, _ = run_alone(losses_around_a_step, sharded(one_process_plan(plan)))
    alone = one_process(plan, 2)
    loss, num_tokens = expected[1]
    assert loss / num_tokens == pytest.approx(alone.losses[1], rel=1e-12), "what training says of the same batch"
    assert expected[0][0] != loss
    ranks = run_ranks(losses_around_a_step, plan.world_size, plan)
    trained = run_ranks(train, plan.world_size, plan, 2, SHARDED)
    for (losses, weights), trace in zip(ranks, trained, strict=True):
        for (ours, tokens), (theirs, all_tokens) in zip(losses, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
            assert tokens == all_tokens
        for parameter, weight in weights.items():
            np.testing.assert_array_equal(weight, trace.weights[-1][parameter], "evaluating changed the training")


def evaluate_twice(rank: int, plan: Plan) -> list[tuple[float, int]]:
    context = create_groups(plan, device=torch.device("cpu"))
    dropout = StageOptions(init_method_std=0.1, hidden_dropout=0.5, attention_dropout=0.5)
    trainer = Trainer(context, options=dropout, adam=ADAM, seed=7, data_parallel=SHARDED)
    batches = microbatches(plan, rank, step=0) if reads_data(context) else None
    return [trainer.evaluate(batches) for _ in range(2)]


def test_evaluation_drops_nothing_out() -> None:
    _, plan = CHOSEN[0]
    for once, again in run_ranks(evaluate_twice, plan.world_size, plan):
        assert once == again


def losses_with_dropout(rank: int, plan: Plan, evaluates: bool) -> list[float]:
    context = create_groups(plan, device=torch.device("cpu"))
    dropout = StageOptions(init_method_std=0.1, hidden_dropout=0.5, attention_dropout=0.5)
    trainer = Trainer(context, options=dropout, adam=ADAM, seed=7, data_parallel=SHARDED)
    losses = []
    for step in range(2):
        batches = microbatches(plan, rank, step=step) if reads_data(context) else None
        losses.append(trainer.step(batches).loss)
        if evaluates:
            trainer.evaluate(batches)
    return losses


def test_training_drops_out_after_an_evaluation_what_it_would_have_without() -> None:
    _, plan = CHOSEN[0]
    undisturbed, evaluated = (run_ranks(losses_with_dropout, plan.world_size, plan, each) for each in (False, True))
    assert undisturbed == evaluated
