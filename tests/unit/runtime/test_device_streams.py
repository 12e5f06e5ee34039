"""One CUDA stream per role, whoever asks first."""

import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from hetero.plan.stream_roles import StreamRole
from hetero.runtime.device_streams import stream_for
from tests.helpers.played_streams import PlayedCuda, PlayedStream, played_cuda

CPU = torch.device("cpu")


def test_threads_that_ask_at_the_same_time_get_one_stream() -> None:
    """Two would let a thread record in one stream that a copy in the other has arrived."""
    with played_cuda() as played, ThreadPoolExecutor(4) as threads:

        def make_slowly(device: torch.device) -> PlayedStream:
            time.sleep(0.05)
            return PlayedCuda.make_stream(played, device)

        with mock.patch.object(torch.cuda, "Stream", make_slowly):
            asked = [threads.submit(stream_for, CPU, StreamRole.FETCHES_IN) for _ in range(4)]
            found = {id(each.result()) for each in asked}
    assert len(found) == len(played.streams) == 1


def test_each_role_has_its_own() -> None:
    with played_cuda() as played:
        found = [stream_for(CPU, role) for role in (*StreamRole, *StreamRole)]
    assert len(set(map(id, found))) == len(played.streams) == len(StreamRole)
