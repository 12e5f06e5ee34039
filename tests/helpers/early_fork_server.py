"""A fork server in the time of a fork, taken from a process that has imported what it needs and has begun nothing.

So it has one thread and nothing open. It becomes multiprocessing's fork server as soon as its parent asks for one.
"""

import contextlib
import multiprocessing.util
import os
import signal
import socket
from collections.abc import Sequence
from multiprocessing.reduction import recvfds, sendfds

from hetero.distributed.helper_processes import end_with_parent

_MOST_BYTES = 1 << 20
_OUTPUTS = (1, 2)


def fork_server_early() -> None:
    """Fork what is going to be this process's fork server, when it asks for the process of one."""
    parent, (ours, theirs) = os.getpid(), socket.socketpair(type=socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        end_with_parent(parent)
        code = 1
        with contextlib.suppress(SystemExit):
            _become_fork_server(theirs)
            code = 0
        os._exit(code)
    theirs.close()
    start = multiprocessing.util.spawnv_passfds

    def start_or_hand_over(path: bytes, args: list[str], descriptors: Sequence[int]) -> int:
        if "forkserver" not in args[-1]:
            return int(start(path, args, descriptors))
        # One that is asked for after the end of this one is started as ever.
        multiprocessing.util.spawnv_passfds = start
        # The numbers of the descriptors are others over there.
        program = args[-1].replace(f"main({descriptors[0]}, {descriptors[1]},", "main(LISTENER, ALIVE,", 1)
        assert "LISTENER" in program, program
        ours.sendall(program.encode())
        sendfds(ours, [*descriptors, *_OUTPUTS])
        ours.close()
        return pid

    # By its stub the words of a command are numbers.
    multiprocessing.util.spawnv_passfds = start_or_hand_over  # type: ignore[assignment]


def _become_fork_server(asked_by: socket.socket) -> None:
    # Until then Ctrl-C, which reaches all of a terminal, is its parent's.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = asked_by.recv(_MOST_BYTES).decode()
    if not program:
        return  # its parent has ended without one
    signal.signal(signal.SIGINT, handler)
    listener, alive, *outputs = recvfds(asked_by, 2 + len(_OUTPUTS))
    asked_by.close()
    # Where its parent prints by now.
    for given, output in zip(outputs, _OUTPUTS, strict=True):
        os.dup2(given, output)
        os.close(given)
    exec(program, {"LISTENER": listener, "ALIVE": alive})
