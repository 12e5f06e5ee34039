"""Ranks that share a GPU over NCCL train what one rank trains. The pipeline comes first: it is what would hang."""

import dataclasses
from collections.abc import Callable

import pytest

from hetero.plan.ir import Plan
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import StageOptions
from hetero.spec.model import ModelSpec
from tests.gpu.models import MODELS, SLOW_ADAM
from tests.helpers.comparison import LOSS_BOUND
from tests.helpers.gpu_ranks import device_type_here, on_devices, placed_on, run_on
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.training import SMALL_BUCKETS, Trace, one_process_plan, train

pytestmark = pytest.mark.timeout(300)

NUM_STEPS = 3
OVERLAPPED = dataclasses.replace(SMALL_BUCKETS, overlap_param_gather=True)


def _pp2(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 3), ranks=(0,)), stage(layers=(3, 4), ranks=(1,)), num_samples=8)])


def _pp2_delayed(model: ModelSpec) -> Plan:
    first, last = stage(layers=(0, 2), ranks=(0,), delay=1), stage(layers=(2, 4), ranks=(1,), delay=1)
    return plan(model, [replica(first, last, num_samples=8)])


def _pp2_interleaved(model: ModelSpec) -> Plan:
    return plan(model, [replica(*(stage(layers=(n, n + 1), ranks=(n % 2,)) for n in range(4)), num_samples=8)])


def _tp2(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 4), ranks=(0, 1), tp=2, sp=True), num_samples=8)])


def _dp2(model: ModelSpec) -> Plan:
    return sharded(plan(model, [replica(stage(layers=(0, 4), ranks=(0, 1), dp=2), num_samples=8)]))


def _unlike_replicas(model: ModelSpec) -> Plan:
    """tp 2 before one rank, beside a rank with the whole model, with other microbatches."""
    first = replica(stage(layers=(0, 3), ranks=(0, 1), tp=2, mbs=2), stage(layers=(3, 4), ranks=(2,)), num_samples=6)
    return plan(model, [first, replica(stage(layers=(0, 4), ranks=(3,)), num_samples=2)])


LAYOUTS: dict[str, Callable[[ModelSpec], Plan]] = {
    "pp2": _pp2,
    "pp2-delayed": _pp2_delayed,
    "pp2-interleaved": _pp2_interleaved,
    "tp2": _tp2,
    "dp2": _dp2,
    "unlike-replicas": _unlike_replicas,
}
CASES = [(layout, precision) for layout in LAYOUTS for precision in ("fp32", "bf16")]


def losses(rank: int, device: str, wanted: Plan) -> list[float]:
    """Of every step, as this rank was told it; the loss is the world's."""
    options = StageOptions(init_method_std=0.1)
    placed = placed_on(wanted, device_type_here(device))
    data_parallel = OVERLAPPED if wanted.distributed_optimizer else SMALL_BUCKETS
    scale = LossScaleOptions(constant=1.0)
    trace = train(
        rank,
        placed,
        NUM_STEPS,
        data_parallel,
        options,
        loss_scale=scale,
        weights_at="the end",
        device=device,
        adam=SLOW_ADAM,
    )
    assert isinstance(trace, Trace), "no rank of these layouts is idle"
    return trace.losses


@pytest.mark.slow
@pytest.mark.parametrize(("device", "case"), on_devices(CASES, on_cpu=[("pp2", "fp32"), ("unlike-replicas", "bf16")]))
def test_ranks_train_what_one_rank_trains(device: str, case: tuple[str, str]) -> None:
    """In fp32 to 1e-4, which other orders of summation and three updates take; in bf16 to what rounding takes."""
    layout, precision = case
    if device == "cuda" and precision not in device_type_here(device).precisions:
        pytest.skip(f"{device_type_here(device).name} has no {precision}")
    wanted = dataclasses.replace(LAYOUTS[layout](MODELS["llama-gqa"]()), precision=precision)
    found = run_on(device, losses, wanted.world_size, device, wanted)
    (expected,) = run_on(device, losses, 1, device, one_process_plan(wanted))
    bound = LOSS_BOUND["bf16"] if precision == "bf16" else 1e-4
    for rank, each in enumerate(found):
        assert each == pytest.approx(expected, rel=bound), f"rank {rank}"
