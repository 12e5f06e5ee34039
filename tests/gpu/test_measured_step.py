"""A step is measured beside its prediction; how near they are is for the report, not for a test."""

import dataclasses
import math

import pytest

from hetero.spec.shipped_devices import SHIPPED_DEVICES
from tests.gpu.measured_step import Workload, measured_step, plan_of, predicted_step_s
from tests.helpers.gpu_ranks import GPU, run_on

TINY = Workload(
    precision="fp32", num_layers=2, hidden_size=64, seq_length=16, micro_batch_size=1, num_microbatches=2, num_steps=2
)


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
def test_a_step_is_measured(device: str) -> None:
    (found,) = run_on(device, measured_step, 1, device, TINY)
    assert found.step_s > 0
    assert found.predicted_bytes > 0
    if device == "cuda":
        assert found.peak_bytes > 0
        assert found.predicted_s is not None
        # Whatever the device, a prediction and a measurement of the same thing share its unit.
        assert abs(math.log10(found.step_s / found.predicted_s)) < 3


def test_a_step_is_predicted_for_a_device_of_the_catalogue() -> None:
    half = dataclasses.replace(TINY, precision="bf16")
    seconds = predicted_step_s(plan_of(half, SHIPPED_DEVICES.of("A100-40")), SHIPPED_DEVICES.of("A100-40"))
    assert seconds is not None
    assert 0 < seconds < 1
    assert predicted_step_s(plan_of(TINY, SHIPPED_DEVICES.of("cpu")), SHIPPED_DEVICES.of("cpu")) is None
