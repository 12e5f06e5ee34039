"""Owns the CUDA streams of a rank besides those of its communicators: one per device and role.

torch hands out streams from a pool of 32 per device and priority, in turns (CUDAStream.cpp): the 33rd is the first one
again. Communicators take theirs from the same pool, and a copy in the stream of a communicator waits for the receives
that are pending there. So nothing else in the runtime makes a stream. :mod:`hetero.plan.stream_roles` says which roles
there are, and why users of one stream do not wait for one another in a circle.
"""

from functools import cache
from threading import Lock

import torch

from hetero.plan.stream_roles import StreamRole


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is issued to streams, and the host goes on meanwhile."""
    return device.type == "cuda"


_FIRST_CALL = Lock()
"""Threads that share a role may ask for its stream at the same time, and a cache alone would let each make one."""


def stream_for(device: torch.device, role: StreamRole) -> torch.cuda.Stream:
    """Return the stream for ``role`` on a device that :func:`has_streams`, the same at every call in every thread.

    Args:
        device: with its index, as the device of a tensor has it.
    """
    with _FIRST_CALL:
        return _make_stream(device, role)


@cache
def _make_stream(device: torch.device, role: StreamRole) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
