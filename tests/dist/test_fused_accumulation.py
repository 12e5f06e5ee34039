"""Gradients that a product adds to ``main_grad`` by itself: the same training as without, in every layout.

Products that no CPU has are played: apex's kernel, and torch's of halves with a float32 sum. megatron-core's layers are
the real ones, and leave NaN in what they return to autograd. torch's product in fp64 and fp32 is what all other tests
train with.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers

from hetero.plan.ir import Precision
from hetero.runtime import layer_choice, main_grad, stage
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.spec.parameters import parameters
from tests.dist.test_layouts import LAYOUTS, TOLERANCE, layout, trainings_of
from tests.helpers.comparison import GRADIENT_BOUND, assembled, assert_same_training
from tests.helpers.fused_kernels import apex_kernel, mixed_product
from tests.helpers.layouts import STYLES, with_delays
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SMALL_BUCKETS, Trace, Training, one_process, train_each

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

ALWAYS = (("one-stage", "gpt2-tied"),)
"""An embedding that is also the head, in one backward."""


def _cases() -> Iterator[Any]:
    for name, style, plan in LAYOUTS:
        row = pytest.mark.rotates(f"fused accumulation in {style}", every=6, turn=list(STYLES).index(style))
        marks = [] if (name, style) in ALWAYS else [row]
        if marks or plan.world_size > 1:
            marks.append(pytest.mark.slow)
        yield pytest.param(trainings_of(name, style, plan, "as-zb-h1"), id=f"{name}-{style}", marks=marks)


def train_fused(
    rank: int, trainings: dict[str, Training], num_steps: int, dtype: torch.dtype
) -> tuple[dict[str, Trace | None], int]:
    """The trainings with the kernel, and how often that was called."""
    with apex_kernel(dtype) as kernel:
        return train_each(rank, trainings, num_steps), len(kernel.calls)


@pytest.mark.parametrize("trainings", list(_cases()))
def test_a_layout_trains_like_one_process_without_the_kernel(
    trainings: dict[str, Training], num_steps: int, subtests: pytest.Subtests
) -> None:
    (world_size,) = {training.plan.world_size for training in trainings.values()}
    seen = run_ranks(train_fused, world_size, trainings, num_steps, torch.float64, timeout_s=30 * (1 + len(trainings)))
    for name, training in trainings.items():
        with subtests.test(name):
            traces = [by_name[name] for by_name, _ in seen]
            expected = one_process(training.plan, num_steps)
            assert_same_training(training.plan, traces, expected, tolerance=TOLERANCE)
    idle = next(iter(trainings.values())).plan.idle_ranks
    assert all((calls > 0) == (rank not in idle) for rank, (_, calls) in enumerate(seen))


@pytest.mark.slow
@pytest.mark.rotates("bits", every=2, turn=0)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("delays", [(None,), (0, 1, 2, 3)], ids=["whole", "split"])
def test_bits_are_those_without_the_kernel(precision: Precision, delays: tuple[int | None, ...]) -> None:
    """In fp32 and where the stand-in, other than cuBLAS, rounds the product to the layers' precision before it adds."""
    plan = with_delays(dataclasses.replace(layout("everything", "llama-gqa"), precision=precision), delays)
    # One that adapts would skip the first steps.
    trainings = {"": Training(plan, loss_scale=LossScaleOptions(constant=2.0**7))}
    fused = run_ranks(train_fused, plan.world_size, trainings, 2, torch.float32)
    for (with_kernel, _), without in zip(
        fused, run_ranks(train_without_products, plan.world_size, trainings, 2), strict=True
    ):
        if without[""] is not None:
            assert with_kernel[""].grad_norms == without[""].grad_norms
            for name, weight in with_kernel[""].weights[-1].items():
                np.testing.assert_array_equal(weight, without[""].weights[-1][name])


def train_without_products(rank: int, trainings: dict[str, Training], num_steps: int) -> dict[str, Trace | None]:
    """The trainings where no product can add; embeddings do."""
    with (
        mock.patch.object(stage, "can_fuse_accumulation", return_value=False),
        mock.patch.object(layer_choice, "can_fuse_accumulation", return_value=False),
    ):
        return train_each(rank, trainings, num_steps)


def train_with_mixed_product(
    rank: int, trainings: dict[str, Training], num_steps: int
) -> tuple[dict[str, Trace | None], int]:
    """The trainings where torch multiplies halves into a float32 sum, and how often it did."""
    with mixed_product() as product:
        return train_each(rank, trainings, num_steps), len(product.calls)


@pytest.mark.slow
@pytest.mark.rotates("bits", every=2, turn=1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("delays", [(None,), (0, 1, 2, 3)], ids=["whole", "split"])
def test_halves_are_multiplied_into_sums_in_full_precision(
    precision: Precision, delays: tuple[int | None, ...]
) -> None:
    plan = with_delays(dataclasses.replace(layout("everything", "llama-gqa"), precision=precision), delays)
    trainings = {
        on: Training(
            plan,
            options=StageOptions(init_method_std=0.1, gradient_accumulation_fusion=on == "on"),
            loss_scale=LossScaleOptions(constant=2.0**7),
        )
        for on in ("on", "off")
    }
    seen = run_ranks(train_with_mixed_product, plan.world_size, trainings, 1)
    assert all((calls > 0) == (rank not in plan.idle_ranks) for rank, (_, calls) in enumerate(seen))
    by_name = {parameter.name: parameter for parameter in parameters(plan.model)}
    on, off = (
        assembled([box for traces, _ in seen if traces[way] for box in traces[way].gradients[0]], by_name)
        for way in ("on", "off")
    )
    difference = sum(float(((on[name] - off[name]) ** 2).sum()) for name in off) ** 0.5
    norm = sum(float((gradient**2).sum()) for gradient in off.values()) ** 0.5
    assert 0 < difference <= GRADIENT_BOUND[precision] * norm


def calls_of_a_step(rank: int, fusion: bool, precision: Precision) -> list[tuple[int, ...]]:
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=fusion)
    plan = dataclasses.replace(layout("one-stage", "llama-gqa"), precision=precision)
    trainings = {"one": Training(plan, SMALL_BUCKETS, options)}
    if precision in ("bf16", "fp16"):
        with mixed_product() as product:
            train_each(rank, trainings, 1)
        # One of them was to find out whether torch can.
        return [shape for shape in product.calls if shape != (1, 1)]
    with mock.patch.object(main_grad, "_add_product_to", wraps=main_grad._add_product_to) as add:
        train_each(rank, trainings, 1)
    return [tuple(call.args[0].shape) for call in add.call_args_list]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_every_linear_layer_of_every_microbatch_adds_by_its_product(precision: Precision) -> None:
    """Two microbatches, six layers of four linear ones, and the head; none if the flag says so."""
    ((called,), (spared,)) = (run_ranks(calls_of_a_step, 1, fusion, precision) for fusion in (True, False))
    assert len(called) == 2 * (6 * 4 + 1)
    assert spared == []


def calls_of_apex(rank: int, fusion: bool) -> list[tuple[int, ...]]:
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=fusion)
    plan = dataclasses.replace(layout("one-stage", "llama-gqa"), precision="bf16")
    with apex_kernel(torch.float32) as kernel:
        train_each(rank, {"one": Training(plan, SMALL_BUCKETS, options)}, 1)
        return kernel.calls


def test_apexs_kernel_is_preferred() -> None:
    """Two microbatches, six layers of four linear ones, and the head."""
    ((called,), (spared,)) = (run_ranks(calls_of_apex, 1, fusion) for fusion in (True, False))
    assert len(called) == 2 * (6 * 4 + 1)
    assert spared == []


def train_where_transformer_engine_is_installed(rank: int, training: Training) -> Trace | None:
    with mock.patch.object(layers, "HAVE_TE", True):
        return train_each(rank, {"": training}, 2)[""]


def test_local_layers_train_alike_where_transformer_engine_is_installed() -> None:
    """megatron-core then asks TransformerEngine, which is not there, for what it leaves to autograd."""
    plan = layout("one-stage", "gpt2-tied")
    traces = run_ranks(train_where_transformer_engine_is_installed, 1, Training(plan))
    assert_same_training(plan, traces, one_process(plan, 2), tolerance=TOLERANCE)
