"""Leaves the world: in order after a run that went well, and without waiting for anybody after one that did not.

NCCL has a watchdog of its own in torch, one thread per group (ProcessGroupNCCL.cpp of torch 2.13). What it sees, it
writes down at once (``Backend.get_error``); then it sleeps for a minute, in which others may dump what they know, and
ends the process by SIGABRT, without a word on who was lost. :func:`nccl_error` lets the failure detector read what was
written down within that minute, and end all ranks with one message.
"""

import contextlib
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed.distributed_c10d import _abort_process_group

_CUDA = torch.device("cuda")

_ANSWER_WITHIN_S = 1.0
"""Time for CUDA to say whether a stream has work left; much less than a roll call takes."""

SEEN_BY_WATCHDOG = {
    "TIMEOUT": "a collective or transfer over NCCL did not end within --distributed-timeout-minutes",
    "COMM_ERROR": "NCCL lost a connection to another rank, or failed; NCCL_DEBUG=WARN says more",
    "REMOTE_ERROR": "NCCL failed on another rank",
}


def nccl_error(groups: Iterable[dist.ProcessGroup]) -> str:
    """What torch's watchdogs have found wrong in the NCCL communicators of ``groups``; empty while nothing is."""
    for group in groups:
        if (backend := _nccl_of(group)) is not None:
            found = backend.get_error().name
            if found != "SUCCESS":
                return SEEN_BY_WATCHDOG.get(found, f"NCCL: {found}")
    return ""


def _nccl_of(group: dist.ProcessGroup) -> Backend | None:
    try:
        backend = group._get_backend(_CUDA)
    except RuntimeError:
        return None  # It has none for CUDA.
    return backend if backend.name() == "nccl" else None


def is_busy(device: torch.device) -> bool:
    """Return whether ``device`` has work left that was given to it; ``False`` for the CPU.

    NCCL's kernels wait on the device for other ranks, in the order of the stream that computes. The question waits for
    nothing itself, but CUDA may hold it up while a launch of another thread waits for room, which is an answer too.
    """
    if device.type != "cuda":
        return False
    is_idle = threading.Event()

    def ask() -> None:
        if torch.cuda.default_stream(device).query():
            is_idle.set()

    threading.Thread(target=ask, name="device-is-busy", daemon=True).start()
    return not is_idle.wait(_ANSWER_WITHIN_S)


def leave_world(*, failed: bool) -> None:
    """Destroy all groups. After a failure no rank may begin another collective, and this one waits for none.

    To destroy an NCCL communicator waits for all that was given to it, such as a receive whose sender is gone. To abort
    it ends its kernels (``ncclCommAbort``); all communicators of a rank are aborted in one NCCL group, as those that
    are aborted one by one may wait for one another. Gloo's connections close with their groups either way.
    """
    if not failed:
        dist.destroy_process_group()
        return
    # Why the rank fails is being said; that NCCL could not be ended either, nobody needs to hear.
    with contextlib.suppress(dist.DistError, RuntimeError):
        _abort_process_group()
