"""A split backward gives the bits of a whole one, puts off what it may, and keeps what the memory model counts.

That it trains like one process is tested for every layout: tests/dist/test_layouts.py.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hetero.cost.layers.activation_memory import deferred_bytes
from hetero.distributed.process_groups import create_groups
from hetero.plan.gradient_groups import gradient_buckets
from hetero.plan.ir import Plan, Precision
from hetero.runtime import delayed_wgrad
from hetero.runtime.delayed_wgrad import DelayedWeightGradients, Product
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.stage import build_stages
from hetero.runtime.trainer import Trainer
from hetero.spec.profile import HALVES
from tests.helpers.comparison import assert_same_training
from tests.helpers.layouts import layout, with_delays
from tests.helpers.models import gpt2_model, llama_model, moe_model
from tests.helpers.plans import plan as plan_of
from tests.helpers.plans import replica, stage
from tests.helpers.ranks import run_ranks
from tests.helpers.synthetic_profiles import cost_model
from tests.helpers.training import ADAM, Trace, Training, microbatches, one_process, train, trained

pytestmark = pytest.mark.dist

NUM_STEPS = 3
TOLERANCE = 1e-9
TINY_BUCKETS = DataParallelOptions(bucket_numel=2000)

DELAYS = (0, 1, 2, 3)
"""Of the weights' gradients, by the index of a stage in its replica."""


def same_bits(ours: list[Trace | None], theirs: list[Trace | None]) -> bool:
    return all(
        np.array_equal(weight, there.weights[-1][name])
        for here, there in zip(ours, theirs, strict=True)
        if here is not None and there is not None
        for name, weight in here.weights[-1].items()
    )


@pytest.mark.slow
@pytest.mark.rotates("precisions")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_split_backward_gives_the_bits_of_a_whole_one(precision: Precision) -> None:
    """The same products, added up in the same order and precision. Biases, which this model has none of, may not."""
    whole = dataclasses.replace(layout("everything", "llama-gqa"), precision=precision)
    traces = trained({"split": Training(with_delays(whole, DELAYS)), "whole": Training(whole)}, NUM_STEPS)
    assert same_bits(traces["split"], traces["whole"])


@pytest.mark.slow
def test_experts_without_tokens() -> None:
    """The two tokens of a microbatch visit two experts each: at least four of eight experts get none."""
    model = moe_model(num_layers=2, num_experts=8)
    stages = (stage(layers=(0, 1), ranks=(0, 1), tp=2, sp=True, delay=0), stage(layers=(1, 2), ranks=(2,), delay=1))
    replicas = [replica(*stages, num_samples=2), replica(stage(layers=(0, 2), ranks=(3,), delay=2), num_samples=2)]
    made = dataclasses.replace(plan_of(model, replicas, seq_length=2), precision="fp64")
    traces = run_ranks(train, made.world_size, made, NUM_STEPS)
    assert_same_training(made, traces, one_process(made, NUM_STEPS), tolerance=TOLERANCE)


def events_of_a_step(rank: int, plan: Plan) -> list[str]:
    """``W`` per product with a weight's gradient, ``sum`` per reduction of a bucket, as they come."""
    events: list[str] = []
    add, all_reduce = Product.add, dist.all_reduce

    def adding(product: Product) -> None:
        add(product)
        events.append("W")

    def reducing(tensor: torch.Tensor, *, group: dist.ProcessGroup, **options: Any) -> Any:
        if tensor.numel() > 1 and group.size() > 1:
            events.append("sum")
        return all_reduce(tensor, group=group, **options)

    trainer = Trainer(
        create_groups(plan, device=torch.device("cpu")),
        options=StageOptions(init_method_std=0.1),
        adam=ADAM,
        seed=7,
        data_parallel=TINY_BUCKETS,
    )
    Product.add, dist.all_reduce = adding, reducing
    trainer.compute_gradients(microbatches(plan, rank, step=0))
    return events


@pytest.mark.slow
def test_gradients_are_summed_beside_the_last_weights_gradients() -> None:
    """Before those, only buckets without any; from then on each as soon as it is complete."""
    made = plan_of(
        llama_model(num_layers=3), [replica(stage(layers=(0, 3), ranks=(0, 1), dp=2, delay=1), num_samples=6)]
    )
    buckets = gradient_buckets(made, bucket_numel=TINY_BUCKETS.bucket_numel)
    put_off = [any("linear_" in segment.parameter.name for segment in bucket.segments) for bucket in buckets]
    num_early = put_off.index(True)
    products = 3 * 4
    for events in run_ranks(events_of_a_step, 2, made):
        at = [i for i, event in enumerate(events) if event == "W"]
        assert len(at) == 3 * products, "of every layer and microbatch"
        last = at[-products]
        assert events[:last].count("sum") == num_early > 0
        assert 0 < events[last : at[-1]].count("sum") < events.count("sum")
        assert events.count("sum") == len(buckets)


class Counting(DelayedWeightGradients):
    """Notes how many microbatches wait, at most and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = self.most = 0

    def end_of_backward(self, microbatch: int) -> None:
        super().end_of_backward(microbatch)
        self.waiting += 1
        self.most = max(self.most, self.waiting)

    def compute(self, microbatch: int, **arguments: Any) -> None:
        super().compute(microbatch, **arguments)
        self.waiting -= 1


def waiting_in_a_step(rank: int, plan: Plan) -> tuple[int, int]:
    counts: list[Counting] = []

    def counting() -> Counting:
        counts.append(Counting())
        return counts[-1]

    delayed_wgrad.DelayedWeightGradients = counting
    train(rank, plan, 1)
    (count,) = counts
    return count.most, count.waiting


@pytest.mark.slow
def test_no_more_microbatches_wait_than_the_delay_and_the_one_at_hand() -> None:
    stages = [stage(layers=(2 * s, 2 * s + 2), ranks=(s,), delay=delay) for s, delay in enumerate((0, 2, 9))]
    made = plan_of(gpt2_model(), [replica(*stages, num_samples=6)])
    assert run_ranks(waiting_in_a_step, 3, made) == [(1, 0), (3, 0), (6, 0)]


def bytes_put_off(rank: int, plan: Plan) -> int:
    """What a backward of one microbatch leaves behind on a rank."""
    context = create_groups(plan, device=torch.device("cpu"))
    (model,) = build_stages(context, options=StageOptions(), seed=7)
    kept: list[Product] = []
    assert model.delayed is not None
    model.delayed.delay = kept.append
    model.forward(None, microbatches(plan, rank, step=0)[0]).sum().backward()
    assert all(product.weight.grad is None for product in kept), "no gradient of these before its W"
    return sum(product.input.nbytes + product.output_gradient.nbytes for product in kept)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [gpt2_model(), llama_model(), llama_model(qkv_bias=True, proj_bias=True), moe_model()],
    ids=["gpt2", "llama", "llama-attention-biases", "moe"],
)
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_what_waits_is_what_the_memory_model_counts(model: Any, tp: int, sp: bool) -> None:
    if model.num_experts is not None and tp > 1 and not sp:
        pytest.skip("experts need sequence parallelism")
    one = stage(layers=(0, 6), ranks=range(tp), tp=tp, sp=sp, mbs=2, delay=0)
    costs = cost_model(model, [])
    microbatch = costs.microbatch(tp=tp, micro_batch_size=2, sequence_parallel=sp)
    block, *halves = (
        deferred_bytes(kind, costs.shape, microbatch, keeps_gathered_inputs=False) for kind in ("block", *HALVES)
    )
    assert block == sum(halves)
    counted = 6 * block
    assert run_ranks(bytes_put_off, tp, plan_of(model, [replica(one)])) == [counted] * tp
