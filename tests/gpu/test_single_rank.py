"""One rank in half precision is near one in fp32, whatever layers it has, recomputes and puts off."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from hetero.plan.ir import Plan, Precision, Recompute
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.runtime.trainer import Trainer
from hetero.spec.parameters import parameters
from tests.gpu.models import MODELS, NUM_LAYERS, SLOW_ADAM
from tests.helpers.comparison import GRADIENT_BOUND, LOSS_BOUND, assembled
from tests.helpers.fixed_routing import FixedRouting
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
ON_CPU = [
    ("bf16", "local", "gpt2-tied"),
    ("fp16", "local", "llama-gqa"),
    ("bf16", "local", "moe"),
    ("fp16", "local", "moe"),
]


def one_rank(style: str, precision: Precision, recompute: Recompute, delay: int | None) -> Plan:
    alone = stage(layers=(0, NUM_LAYERS), ranks=(0,), mbs=2, recompute=recompute, delay=delay)
    return plan(MODELS[style](), [replica(alone, num_samples=8)], seq_length=32, precision=precision)


@dataclass(frozen=True, slots=True)
class Way:
    """What a training in half precision shows: the loss of every step, and by how much the first gradient is another
    than in fp32, as the 2-norm of the difference over the norm."""

    losses: list[float]
    gradient_difference: float


def train_ways(
    rank: int, device: str, style: str, precision: Precision, impl: str
) -> tuple[list[float], dict[str, Way]]:
    """Return the losses in fp32, and every way of :data:`WAYS` in ``precision``, with the same experts for each token.

    One after the other in one process.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    by_name = {parameter.name: parameter for parameter in parameters(MODELS[style]())}
    routing = FixedRouting()
    expected = _trained(one_rank(style, "fp32", "none", None), device, "local", routing.record)
    wanted = assembled(expected.gradients[0], by_name)
    factor = SCALE if precision == "fp16" else 1.0
    ways = {}
    for way, (recompute, delay) in WAYS.items():
        trace = _trained(one_rank(style, precision, recompute, delay), device, impl, routing.replay)
        found = assembled(trace.gradients[0], by_name)
        difference = sum(float(((found[name] / factor - wanted[name]) ** 2).sum()) for name in wanted) ** 0.5
        ways[way] = Way(trace.losses, difference / expected.grad_norms[0])
    return expected.losses, ways


def _trained(wanted: Plan, device: str, impl: str, prepare: Callable[[Trainer, int], None]) -> Trace:
    trace = train(
        0,
        placed_on(wanted, device_type_here(device)),
        NUM_STEPS,
        SMALL_BUCKETS,
        StageOptions(init_method_std=0.1, transformer_impl=impl),  # type: ignore[arg-type]  # of a parameter
        loss_scale=LossScaleOptions(constant=SCALE),
        weights_at="the end",
        device=device,
        adam=SLOW_ADAM,
        prepare=prepare,
    )
    assert trace is not None
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


@pytest.mark.slow
@pytest.mark.rotates(every=3, turn=2)
@pytest.mark.parametrize(("device", "case"), on_devices(ON_GPU, on_cpu=ON_CPU))
def test_half_precision_is_near_fp32(device: str, case: tuple[Precision, str, str], subtests: pytest.Subtests) -> None:
    """The losses of all steps, and the whole gradient of the first.

    The bounds are those of the CPU (tests/helpers/comparison.py): inputs and results are rounded alike, and GPUs sum in
    fp32. Tokens go to the experts that the fp32 training chose, else gradients would be those of other tokens.
    """
    precision, impl, style = case
    skip_unless_possible(device, precision, impl)
    ((expected, ways),) = run_on(device, train_ways, 1, device, style, precision, impl)
    for name, way in ways.items():
        with subtests.test(name):
            assert way.losses == pytest.approx(expected, rel=LOSS_BOUND[precision])
            assert 0 < way.gradient_difference <= GRADIENT_BOUND[precision], "0 is no half precision"
