"""The optimizer step: one decision on all ranks, the exact global norm, torch's clipping, Megatron's weight decay."""

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hetero.cost.memory import memory_costs, plan_memory
from hetero.distributed.process_groups import create_groups
from hetero.plan.ir import Plan
from hetero.runtime.main_grad import main_grad
from hetero.runtime.microbatch import Microbatch
from hetero.runtime.optimizer import AdamOptions, StepResult
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.trainer import Trainer, reads_data
from hetero.spec.parameters import parameters
from tests.helpers.models import gpt2_model
from tests.helpers.plans import plan, replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.training import ADAM, SMALL_BUCKETS, microbatches, one_process_plan, spoil_gradient, sums_of

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]

CPU = torch.device("cpu")
IDLE = 6
MODEL = gpt2_model(num_layers=3)


def unlike_replicas() -> Plan:
    """The tied embedding has tp 2 in one stage and none in others; norms are on tp 2 with and without sp."""
    first = replica(stage(layers=(0, 1), ranks=(0, 1), tp=2), stage(layers=(1, 3), ranks=(2, 3), dp=2), num_samples=2)
    second = replica(stage(layers=(0, 3), ranks=(4, 5), tp=2, sp=True), num_samples=2)
    return dataclasses.replace(plan(MODEL, [first, second], idle_ranks=(IDLE,)), precision="fp64")


Arrays = dict[str, np.ndarray]


@dataclass
class Step:
    """What a rank saw of one step; none on an idle rank. Weights by canonical name, gradients by name and offset.

    clipped: the gradients after the step.
    """

    result: StepResult
    gradients: Arrays
    clipped: Arrays
    weights: Arrays


def new_trainer(rank: int, plan: Plan, adam: AdamOptions) -> Trainer:
    context = create_groups(plan, device=CPU)
    return Trainer(
        context,
        options=StageOptions(init_method_std=0.1),
        adam=adam,
        seed=7,
        data_parallel=SMALL_BUCKETS,
    )


def batches(rank: int, plan: Plan, *, step: int) -> list[Microbatch] | None:
    place = plan.placement(rank)
    if place is None or place.stage not in (0, len(plan.replicas[place.replica].stages) - 1):
        return None
    return microbatches(plan, rank, step=step)


def weights_of(trainer: Trainer) -> Arrays:
    return {name: tensor.detach().numpy().copy() for name, (_, tensor) in trainer.parameters.items()}


def gradients_of(trainer: Trainer) -> Arrays:
    return {f"{name} from {offsets}": box for name, offsets, box in sums_of(trainer)}


def one_step(rank: int, plan: Plan, clip_grad: float) -> Step:
    trainer = new_trainer(rank, plan, dataclasses.replace(ADAM, clip_grad=clip_grad))
    trainer.compute_gradients(batches(rank, plan, step=0))
    gradients = gradients_of(trainer)
    result = trainer.update()
    return Step(result, gradients, gradients_of(trainer), weights_of(trainer))


@functools.cache
def steps_under(plan: Plan, clip_grad: float) -> list[Step]:
    return run_ranks(one_step, plan.world_size, plan, clip_grad)


@functools.cache
def alone(clip_grad: float) -> Step:
    """The same training in one process."""
    (step,) = steps_under(one_process_plan(unlike_replicas()), clip_grad)
    return step


def clipped_by_torch(rank: int, plan: Plan, clip_grad: float) -> tuple[float, Arrays]:
    """One process; torch's own function on its gradients."""
    trainer = new_trainer(rank, plan, ADAM)
    trainer.compute_gradients(batches(rank, plan, step=0))
    tensors = [tensor for _, tensor in trainer.parameters.values()]
    for tensor in tensors:
        tensor.grad = main_grad(tensor)
    norm = torch.nn.utils.clip_grad_norm_(tensors, clip_grad)
    return norm.item(), gradients_of(trainer)


@pytest.mark.parametrize("clip_grad", [0.25, 1000.0])
def test_clipping_is_torchs_on_the_whole_model(clip_grad: float) -> None:
    """The same norm on every rank, idle ones too, and the same factor, or none where the norm is small enough."""
    made = unlike_replicas()
    ((norm, clipped),) = run_ranks(clipped_by_torch, 1, one_process_plan(made), clip_grad)
    assert alone(clip_grad).result.grad_norm == pytest.approx(norm, rel=1e-12)
    for name, gradient in alone(clip_grad).clipped.items():
        np.testing.assert_allclose(gradient, clipped[name], rtol=1e-12, err_msg=name)
    factor = min(1.0, clip_grad / (norm + 1e-6))
    for step in steps_under(made, clip_grad):
        assert step.result.grad_norm == pytest.approx(norm, rel=1e-12)
        for name, gradient in step.clipped.items():
            np.testing.assert_allclose(gradient, step.gradients[name] * factor, rtol=1e-9, err_msg=name)


def test_clip_grad_0_leaves_gradients_alone() -> None:
    for name, gradient in alone(0.0).clipped.items():
        np.testing.assert_array_equal(gradient, alone(0.0).gradients[name])


def test_the_norm_counts_every_element_of_the_model_once() -> None:
    """Tensor-parallel copies of norms and biases, the replicas and the tied copy all hold the same gradient again."""
    made = unlike_replicas()
    once = norm_of([alone(1000.0).gradients])
    steps = steps_under(made, 1000.0)
    assert [step.result.grad_norm for step in steps] == pytest.approx([once] * made.world_size, rel=1e-12)
    # What else one could sum, and would be wrong here.
    each_copy = norm_of([step.gradients for step in steps])
    one_replica = norm_of([step.gradients for step in steps[:3]])
    assert each_copy > 1.3 * once
    assert one_replica > 1.01 * once


def norm_of(ranks: list[Arrays]) -> float:
    return sum(float((gradient**2).sum()) for gradients in ranks for gradient in gradients.values()) ** 0.5


def test_all_ranks_report_the_same() -> None:
    """Loss, tokens and norm travel together, so that also an idle rank knows them."""
    made = unlike_replicas()
    expected = alone(0.25).result
    results = [step.result for step in steps_under(made, 0.25)]
    assert all(result == results[0] for result in results)
    assert results[0].loss == pytest.approx(expected.loss, rel=1e-12)
    assert results[0].num_tokens == expected.num_tokens
    assert not results[0].skipped


@dataclass
class Spoilt:
    """A rank's weights before a step with a gradient that is not finite, after it, and after a good one."""

    before: Arrays
    after: Arrays
    largest_moment: float
    later: Arrays
    spoilt: StepResult
    good: StepResult


def spoil_a_step(rank: int, plan: Plan, bad_rank: int, name: str, value: float) -> Spoilt:
    """On ``bad_rank``, one step has ``value`` in one element of the gradient of ``name``."""
    trainer = new_trainer(rank, plan, ADAM)
    before = weights_of(trainer)
    hook = spoil_gradient(trainer, name, value) if rank == bad_rank else None
    spoilt = trainer.step(batches(rank, plan, step=0))
    if hook is not None:
        hook.remove()
    after = weights_of(trainer)
    moments = [state["exp_avg"].abs().max().item() for state in trainer.torch_optimizer.state.values()]
    good = trainer.step(batches(rank, plan, step=0))
    return Spoilt(before, after, max(moments, default=0.0), weights_of(trainer), spoilt, good)


@pytest.mark.parametrize(
    ("bad_rank", "name", "value"),
    [
        (1, "embedding.word_embeddings.weight", float("nan")),
        (2, "decoder.layers.1.mlp.linear_fc1.bias", float("-inf")),
        (5, "decoder.layers.0.input_layernorm.weight", float("inf")),
    ],
    ids=["tied-shard", "dp-rank", "tp-copy-of-a-norm"],
)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(bad_rank: int, name: str, value: float) -> None:
    """Weights stay bit for bit, moments are not touched, and the step after it is as if this one had not been."""
    made = unlike_replicas()
    ranks = run_ranks(spoil_a_step, made.world_size, made, bad_rank, name, value)
    undisturbed = steps_under(made, ADAM.clip_grad)
    for rank, (seen, expected) in enumerate(zip(ranks, undisturbed, strict=True)):
        assert seen.spoilt.skipped
        assert not np.isfinite(seen.spoilt.grad_norm)
        assert seen.largest_moment == 0, f"rank {rank} began to average gradients"
        assert (rank == IDLE) == (seen.before == {})
        for weight in seen.before:
            np.testing.assert_array_equal(seen.after[weight], seen.before[weight], f"rank {rank}: {weight}")
            np.testing.assert_array_equal(seen.later[weight], expected.weights[weight], f"rank {rank}: {weight}")
        assert seen.good == expected.result


def masked(batch: Microbatch) -> Microbatch:
    return dataclasses.replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))


def decay_only(rank: int, plan: Plan) -> tuple[StepResult, Arrays, Arrays]:
    """A step on tokens that do not count: gradients are 0, so only weight decay moves weights."""
    trainer = new_trainer(rank, plan, AdamOptions(lr=0.1, weight_decay=0.5, betas=(0.9, 0.95), eps=1e-8, clip_grad=1))
    before = weights_of(trainer)
    counting_nothing = [masked(batch) for batch in batches(rank, plan, step=0) or []]
    result = trainer.step(counting_nothing or None)
    return result, before, weights_of(trainer)


def test_matrices_decay_and_vectors_do_not() -> None:
    made = unlike_replicas()
    decays = {p.name: len(p.shape) > 1 for p in parameters(MODEL)}
    assert {name for name, does in decays.items() if not does} == {
        name for name in decays if name.endswith(".bias") or "norm" in name
    }
    for result, before, after in run_ranks(decay_only, made.world_size, made):
        assert (result.loss, result.num_tokens, result.grad_norm, result.skipped) == (0.0, 0, 0.0, False)
        for name, weight in before.items():
            expected = weight * (1 - 0.1 * 0.5) if decays[name] else weight
            np.testing.assert_allclose(after[name], expected, rtol=1e-15, err_msg=name)


def decay_on_schedule(rank: int, plan: Plan) -> list[list[float]]:
    """Weight decay of both parameter groups under megatron-core's scheduler, from 0.1 to 0.3 in four steps."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: PLC0415  (slow to import)

    optimizer = new_trainer(rank, plan, ADAM).torch_optimizer
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=4,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=4,
        wd_incr_style="linear",
    )
    seen = []
    for _ in range(5):
        seen.append([group["weight_decay"] for group in optimizer.param_groups])
        scheduler.step(increment=1)
    return seen


def test_a_schedule_of_weight_decay_spares_vectors() -> None:
    """The scheduler multiplies by each group's ``wd_mult``; on an idle rank it runs, too."""
    made = plan(MODEL, [replica(stage(layers=(0, 3), ranks=(0,)))], idle_ranks=(1,))
    for seen in run_ranks(decay_on_schedule, made.world_size, made):
        assert seen == [pytest.approx([decay, 0.0]) for decay in (0.1, 0.15, 0.2, 0.25, 0.3)]


def reads(rank: int, plan: Plan) -> bool:
    return reads_data(create_groups(plan, device=CPU))


def test_first_and_last_stages_read_data() -> None:
    stages = [stage(layers=(s, s + 1), ranks=(s,)) for s in range(3)]
    made = plan(MODEL, [replica(*stages)], idle_ranks=(3,))
    assert run_ranks(reads, made.world_size, made) == [True, False, True, False]


def static_bytes(rank: int, plan: Plan, data_parallel: DataParallelOptions) -> tuple[int, int, int]:
    context = create_groups(plan, device=CPU)
    trainer = Trainer(context, options=StageOptions(), adam=ADAM, seed=7, data_parallel=data_parallel)
    return trainer.static_bytes()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("holders", [1, 2, 4])
def test_optimizer_state_falls_as_one_over_the_holders(holders: int, precision: str) -> None:
    """Measured, and as the cost model predicts it."""
    model = gpt2_model(hidden_size=128, kv_channels=32, ffn_hidden_size=512)
    made = plan(model, [replica(stage(layers=(0, 6), ranks=range(holders), dp=holders))])
    made = dataclasses.replace(made, precision=precision, distributed_optimizer=True)
    one_bucket = DataParallelOptions(bucket_numel=10**9)
    predicted = plan_memory(made, memory_costs(made))[0, 0]
    numel = sum(parameter.numel for parameter in parameters(model))
    per_parameter = 8 if precision == "fp32" else 12
    for weights, gradients, optimizer in run_ranks(static_bytes, holders, made, one_bucket):
        assert optimizer == pytest.approx(per_parameter * numel / holders, rel=0.01)
        assert optimizer == pytest.approx(predicted.optimizer, rel=0.01)
        assert weights == pytest.approx(predicted.weights, rel=0.01)
        assert gradients == pytest.approx(predicted.gradients, rel=0.01)
