"""What a plan leaves to hosts on a GPU, through pinned memory and streams of its own: the losses are those without.

On a CPU the same code runs without streams, so that the test itself is known to be right.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from hetero.plan.ir import Plan
from hetero.runtime.loss_scaler import LossScaleOptions
from hetero.runtime.options import DataParallelOptions, StageOptions
from hetero.runtime.pinned_memory import pinned_empty
from hetero.spec.model import ModelSpec
from tests.gpu.models import MODELS, SLOW_ADAM
from tests.helpers.gpu_ranks import GPU, device_type_here, on_devices, placed_on, run_on
from tests.helpers.host_training import activations_to_hosts, gradients_to_hosts, left_to_hosts, weights_to_hosts
from tests.helpers.plans import plan, replica, sharded, stage
from tests.helpers.training import Trace, train

pytestmark = pytest.mark.timeout(300)

NUM_STEPS = 4
BESIDE = DataParallelOptions(bucket_numel=3000, overlap_param_gather=True)
NEVER_CLIPPED = dataclasses.replace(SLOW_ADAM, clip_grad=1e9)


def _alone(model: ModelSpec) -> Plan:
    return plan(model, [replica(stage(layers=(0, 4), ranks=(0,)), num_samples=4)])


def _pp2_and_dp2(model: ModelSpec) -> Plan:
    first, last = stage(layers=(0, 2), ranks=(0, 1), dp=2), stage(layers=(2, 4), ranks=(2,), mbs=2)
    return plan(model, [replica(first, last, num_samples=8)])


LAYOUTS: dict[str, Callable[[ModelSpec], Plan]] = {"alone": _alone, "pp2-and-dp2": _pp2_and_dp2}
CASES = [(layout, speculate) for layout in LAYOUTS for speculate in (False, True)]


def seen(rank: int, device: str, wanted: Plan) -> tuple[list[float], dict[str, int], int]:
    """Losses of every step; what the host did, and bytes on the device."""
    trace = train(
        rank,
        placed_on(wanted, device_type_here(device)),
        NUM_STEPS,
        BESIDE,
        StageOptions(init_method_std=0.1),
        loss_scale=LossScaleOptions(constant=1.0),
        weights_at="the end",
        device=device,
        adam=NEVER_CLIPPED,
    )
    assert isinstance(trace, Trace), "no rank of these layouts is idle"
    return trace.losses, trace.host_counts, trace.optimizer_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("device", "case"), on_devices(CASES, on_cpu=[("pp2-and-dp2", True)]))
def test_hosts_update_what_the_device_would(device: str, case: tuple[str, bool]) -> None:
    """In fp32, to what the order of summation takes; AdamW's kernels of host and device may round otherwise."""
    layout, speculate = case
    on_device = sharded(LAYOUTS[layout](MODELS["llama-gqa"]()))
    on_host = left_to_hosts(on_device, speculate=speculate)
    expected = run_on(device, seen, on_device.world_size, device, on_device)
    found = run_on(device, seen, on_host.world_size, device, on_host)
    for (losses, counts, held), (expected_losses, none, whole) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        assert not none
        assert held < whole, "the state is not on the device"
        assert counts["updated" if not speculate else "right"] > 0


RESIDENCIES: dict[str, Callable[[Plan], Plan]] = {
    "gradients": lambda made: gradients_to_hosts(made, speculate=False),
    "weights": lambda made: weights_to_hosts(made, turn=0, speculate=False),
    "activations": activations_to_hosts,
    "everything": lambda made: activations_to_hosts(weights_to_hosts(made, turn=0, speculate=True)),
}
ON_HOSTS = [(layout, residency) for layout in LAYOUTS for residency in RESIDENCIES]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "case"), on_devices(ON_HOSTS, on_cpu=[("pp2-and-dp2", "everything")]))
def test_what_lives_on_hosts_trains_as_on_the_device(device: str, case: tuple[str, str]) -> None:
    """In fp32, to what the order of summation takes."""
    layout, residency = case
    on_device = sharded(LAYOUTS[layout](MODELS["llama-gqa"]()))
    on_host = RESIDENCIES[residency](on_device)
    expected = run_on(device, seen, on_device.world_size, device, on_device)
    found = run_on(device, seen, on_host.world_size, device, on_host)
    for (losses, _, _), (expected_losses, _, _) in zip(found, expected, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-4)


@pytest.mark.parametrize("device_type", [pytest.param("cuda", marks=GPU)])
def test_registered_memory_is_pinned(device_type: str) -> None:
    """As torch sees it, and as copies do: they are asynchronous both ways, and whole when the stream says so."""
    device = torch.device(device_type, 0)
    on_host = pinned_empty(3 * 2**20 + 1, torch.float32, device)
    assert on_host.is_pinned()
    assert on_host[2**20 :].is_pinned()
    on_device = torch.arange(on_host.numel(), dtype=torch.float32, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_host.copy_(on_device, non_blocking=True)
        on_device.zero_()
        on_device.copy_(on_host, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    assert torch.equal(on_host, torch.arange(on_host.numel(), dtype=torch.float32))
    assert torch.equal(on_device.cpu(), on_host)
    del on_host
    # The driver takes the same address again.
    assert pinned_empty(3 * 2**20 + 1, torch.float32, device).is_pinned()
