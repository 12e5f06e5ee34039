"""Starts helper processes that live exactly as long as the process that started them needs them."""

import ctypes
import os
import signal
import sys
from multiprocessing import context, popen_fork, process

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2})
"""Signals by which users, launchers and schedulers ask a run to save and end."""

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


class HelperContext(context.ForkContext):
    """Multiprocessing context of forks that stop signals do not end.

    A supervisor (systemd, a container's stop, ``pkill -f``, Slurm) signals every process of a run. The parent needs its
    helpers until it has saved, and alone decides when they end: it terminates them, or ends itself.

    Attributes:
        started: processes of this context, in the order of their start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started: list[process.BaseProcess] = []

    def Process(self, *args: object, **options: object) -> "_Helper":  # type: ignore[override]  # a class there
        """Make a process of this context; it runs once it is started."""
        helper = _Helper(*args, **options)  # type: ignore[arg-type]  # multiprocessing's own arguments
        self.started.append(helper)
        return helper


class _Helper(context.ForkProcess):
    @staticmethod
    def _Popen(process_obj: process.BaseProcess) -> "_Fork":
        return _Fork(process_obj)

    def run(self) -> None:
        end_with_parent(self._parent_pid)  # type: ignore[attr-defined]  # not in typeshed
        super().run()


class _Fork(popen_fork.Popen):
    def _launch(self, process_obj: process.BaseProcess) -> None:
        # Blocked before the fork, and for good in the child: no signal can come before a handler is there.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            super()._launch(process_obj)  # type: ignore[misc]  # not in typeshed
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def terminate(self) -> None:
        # multiprocessing terminates daemons when the interpreter ends, and then waits for them.
        self.kill()
