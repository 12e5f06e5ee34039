"""Gradients that a fused kernel adds to ``main_grad`` by itself: the same training as without, in every layout.

The kernel is a stand-in, and leaves NaN in what it returns to autograd; megatron-core's layers are the real ones.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hetero.plan.ir import Precision
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from tests.dist.test_layouts import LAYOUTS, TOLERANCE, layout, trainings_of
from tests.helpers.comparison import assert_same_training
from tests.helpers.fused_kernels import apex_kernel
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
    options = {
        on: Training(
            plan,
            options=StageOptions(init_method_std=0.1, gradient_accumulation_fusion=on == "on"),
            # One that adapts would skip the first steps.
            loss_scale=LossScaleOptions(constant=2.0**7),
        )
        for on in ("on", "off")
    }
    for traces, _ in run_ranks(train_fused, plan.world_size, options, 2, torch.float32):
        if traces["on"] is not None:
            assert traces["on"].grad_norms == traces["off"].grad_norms
            for name, weight in traces["on"].weights[-1].items():
                np.testing.assert_array_equal(weight, traces["off"].weights[-1][name])


def calls_of_a_step(rank: int, fusion: bool) -> list[tuple[int, ...]]:
    options = StageOptions(init_method_std=0.1, gradient_accumulation_fusion=fusion)
    plan = dataclasses.replace(layout("one-stage", "llama-gqa"), precision="bf16")
    with apex_kernel(torch.float32) as kernel:
        train_each(rank, {"one": Training(plan, SMALL_BUCKETS, options)}, 1)
        return kernel.calls


def test_the_kernel_adds_every_linear_layer_of_every_microbatch_unless_told_not_to() -> None:
    """Two microbatches, six layers of four linear ones, and the head."""
    ((called,), (spared,)) = (run_ranks(calls_of_a_step, 1, fusion) for fusion in (True, False))
    assert len(called) == 2 * (6 * 4 + 1)
    assert spared == []
