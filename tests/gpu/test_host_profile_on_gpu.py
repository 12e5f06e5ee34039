"""Copies between the host's pinned memory and a GPU, as ``hetero profile host`` times them."""

import pytest
import torch

from hetero.profiling.host_rates import LINK_BYTES, NUM_COPIES_OF_A_DEVICE, measure_device_copies
from hetero.profiling.repetitions import TimeBudget
from hetero.units import GB
from tests.helpers.gpu_ranks import GPU


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=GPU)])
def test_copies_are_timed_in_both_directions(device: str) -> None:
    """On a GPU until the bytes are there: no link to one carries a terabyte per second."""
    links = measure_device_copies(torch.device(device), TimeBudget(1.0, num_calls=NUM_COPIES_OF_A_DEVICE))
    for link in links:
        assert 0 < link.latency_us < 1e6
        assert 0 < link.bytes_per_s(max(LINK_BYTES)) < 1000 * GB
