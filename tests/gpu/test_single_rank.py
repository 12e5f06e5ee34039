"""One rank in half precision is near one in fp32, whatever layers it has, recomputes and puts off."""

import dataclasses
import functools
import importlib.util

import pytest
import torch

from hetero.plan.ir import Plan, Precision, Recompute
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from tests.gpu.models import MODELS, NUM_LAYERS
from tests.helpers.comparison import GRADIENT_BOUND, LOSS_BOUND
from tests.helpers.gpu_ranks import device_type_here, on_devices, placed_on, run_on
from tests.helpers.plans import plan, replica, stage
from tests.helpers.training import SMALL_BUCKETS, Trace, train

pytestmark = pytest.mark.timeout(240)

NUM_STEPS = 3
SCALE = 2.0**10
"""Of the loss in fp16, so that no step is skipped."""

WAYS: dict[str, tuple[Recompute, int | None]] = {
    "plain": ("none", None),
    "selective": ("selective", None),
    "full": ("full", None),
    "delay": ("none", 1),
    "selective-delay": ("selective", 1),
}

ON_GPU = [
    (precision, impl, style)
    for precision in ("bf16", "fp16")
    for impl in ("local", "transformer_engine")
    for style in MODELS
]
ON_CPU = [("bf16", "local", "gpt2-tied"), ("fp16", "local", "llama-gqa")]


def one_rank(style: str, precision: Precision, recompute: Recompute, delay: int | None) -> Plan:
    alone = stage(layers=(0, NUM_LAYERS), ranks=(0,), mbs=2, recompute=recompute, delay=delay)
    return plan(MODELS[style](), [replica(alone, num_samples=8)], seq_length=32, precision=precision)


def train_ways(rank: int, device: str, style: str, precision: Precision, impl: str) -> dict[str, Trace]:
    """Every way of :data:`WAYS`, one after the other in one process."""
    options = StageOptions(init_method_std=0.1, transformer_impl=impl)  # type: ignore[arg-type]  # of a parameter
    traces = {}
    for way, (recompute, delay) in WAYS.items():
        wanted = placed_on(one_rank(style, precision, recompute, delay), device_type_here(device))
        scale = LossScaleOptions(constant=SCALE)
        trace = train(rank, wanted, NUM_STEPS, SMALL_BUCKETS, options, loss_scale=scale, device=device)
        assert trace is not None
        # What is compared; the rest would be megabytes to send.
        traces[way] = dataclasses.replace(trace, gradients=[], weights=[])
    return traces


def train_in_fp32(rank: int, device: str, style: str) -> Trace:
    torch.backends.cuda.matmul.allow_tf32 = False
    trace = train(
        rank,
        placed_on(one_rank(style, "fp32", "none", None), device_type_here(device)),
        NUM_STEPS,
        SMALL_BUCKETS,
        StageOptions(init_method_std=0.1, transformer_impl="local"),
        device=device,
    )
    assert trace is not None
    return dataclasses.replace(trace, gradients=[], weights=[])


@functools.cache
def in_fp32(device: str, style: str) -> Trace:
    (trace,) = run_on(device, train_in_fp32, 1, device, style)
    assert isinstance(trace, Trace)
    return trace


def skip_unless_possible(device: str, precision: str, impl: str) -> None:
    if device == "cpu":
        return
    found = device_type_here(device)
    if precision not in found.precisions:
        pytest.skip(f"{found.name} has no {precision}")
    if impl == "transformer_engine":
        if importlib.util.find_spec("transformer_engine") is None:
            pytest.skip("TransformerEngine is not installed")
        if not found.has_transformer_engine:
            pytest.skip(f"TransformerEngine does not run on {found.name}")


@pytest.mark.parametrize(("device", "case"), on_devices(ON_GPU, on_cpu=ON_CPU))
def test_half_precision_is_near_fp32(device: str, case: tuple[Precision, str, str], subtests: pytest.Subtests) -> None:
    """Losses of all steps, and the gradient's norm of the first.

    The bounds are those of the CPU (tests/helpers/comparison.py): inputs and results are rounded alike,
    and GPUs sum in fp32. Of experts only the first step is compared, as rounding sends tokens elsewhere later.
    """
    precision, impl, style = case
    skip_unless_possible(device, precision, impl)
    expected = in_fp32(device, style)
    (found,) = run_on(device, train_ways, 1, device, style, precision, impl)
    comparable = 1 if style == "moe" else NUM_STEPS
    for way, trace in found.items():
        with subtests.test(way):
            assert trace.losses[:comparable] == pytest.approx(expected.losses[:comparable], rel=LOSS_BOUND[precision])
            assert trace.grad_norms[0] == pytest.approx(expected.grad_norms[0], rel=GRADIENT_BOUND[precision])
            assert trace.losses != expected.losses, "this was not half precision"
