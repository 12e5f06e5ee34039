"""The loss of an evaluation is one process's, under any plan, and leaves training as it was."""

import dataclasses

import numpy as np
import pytest
import torch

from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from megatron.pretrain.cli.arguments import parse_args
from megatron.pretrain.tokenizer import NullTokenizer
from megatron.pretrain.training import build_datasets, build_trainer
from tests.helpers.commands import command_line
from tests.helpers.layouts import layouts
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, sharded, stage
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


def losses_in_other_batches(rank: int, plan: Plan, argv: list[str]) -> list[float]:
    """Evaluate by the flags before and after a step, whose batch is the plan's."""
    config = parse_args(argv)
    context = with_shared_memory(create_groups(plan, device=torch.device("cpu")))
    trainer = build_trainer(config, context)
    tokenizer = NullTokenizer(vocab_size=plan.model.vocab_size)
    _, (evaluation,) = build_datasets(config, plan, tokenizer)
    losses = [evaluation.loss(context, trainer)]
    trainer.step(microbatches(plan, rank, step=0) if reads_data(context) else None)
    return [*losses, evaluation.loss(context, trainer)]


@pytest.mark.parametrize(("batches", "size"), [("1", "24"), ("4", "6")], ids=["larger", "smaller"])
def test_the_batch_of_an_evaluation_changes_its_samples_alone(batches: str, size: str) -> None:
    """Two batches of 12, one of 24 and four of 6 are the same samples, on unlike replicas and in one process."""
    first = replica(stage(layers=(0, 4), ranks=(0, 1), tp=2, mbs=2), stage(layers=(4, 6), ranks=(2,)), num_samples=8)
    model = gpt2_model(num_layers=6)
    made = plan_of(model, [first, replica(stage(layers=(0, 6), ranks=(3,)), num_samples=4)], precision="fp64")
    flags = {"global_batch_size": "12", "hetero_plan": "given.json", "init_method_std": "0.1", "seed": "7"}
    whole = command_line(**flags, eval_iters="2")
    (expected,) = run_ranks(losses_in_other_batches, 1, one_process_plan(made), whole)
    other = command_line(**flags, eval_iters=batches, eval_global_batch_size=size)
    for losses in run_ranks(losses_in_other_batches, made.world_size, made, other):
        assert losses == pytest.approx(expected, rel=1e-9)
    (fewer,) = run_ranks(losses_in_other_batches, 1, one_process_plan(made), command_line(**flags, eval_iters="1"))
    assert fewer != pytest.approx(expected, rel=1e-6)


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
