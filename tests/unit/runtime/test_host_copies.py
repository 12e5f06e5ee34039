"""Memory of the host for copies from a device."""

from unittest import mock

import torch

from hetero.runtime import host_copies
from hetero.runtime.host_copies import memory_for_state
from tests.helpers.played_streams import played_cuda


def test_state_that_is_on_the_host_needs_no_pinned_memory() -> None:
    """``meta`` stands for the device: with an optimizer on the host, twelve bytes of a parameter are not on it."""
    device = torch.device("meta")
    state = [
        torch.empty(40, 50, dtype=torch.bfloat16, device=device),
        torch.zeros(3000),
        torch.empty((), dtype=torch.int64, device=device),
        torch.zeros(2, 3),
    ]
    with (
        played_cuda() as played,
        mock.patch.object(host_copies, "has_streams", side_effect=lambda device: device.type == "meta"),
    ):
        memory = memory_for_state(state)
        assert [(each.shape, each.dtype, each.device.type) for each in memory] == [
            (each.shape, each.dtype, "cpu") for each in state
        ]
        assert [played.is_pinned(each) for each in memory] == [True, False, True, False]
        # 4,000 bytes and 8, on two pages at most.
        assert sum(played.registered.values()) <= 8192
        assert [each.shape for each in memory_for_state(state[1::2])] == [(3000,), (2, 3)]
        del memory
