"""Ends helper processes with the one that started them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl(2)``."""


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process as soon as ``parent``, the process that started it, has ended in any way.

    A parent that is killed cannot tell its children, and children who wait for it on a pipe of which each of them
    holds both ends would wait for ever; until then they keep its connections to other ranks open, too. The kernel
    watches the thread that started this process. On other systems than Linux nothing happens.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        # It ended before the kernel was asked.
        os.kill(os.getpid(), signal.SIGKILL)


def leave_ctrl_c_to_parent(parent: int) -> None:
    """:func:`end_with_parent`, also on Ctrl-C: that reaches the whole process group, and the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
