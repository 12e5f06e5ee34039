"""Writes the commands that start, watch and end a host's torchrun from here: over ssh, or in a shell where it is local.

The text of a host is POSIX sh, and the same for both. It holds on to its standard input: when that ends, because
whoever launched closes it or is gone, torchrun is told to end, and tells its ranks.
"""

import ipaddress
import os
import shlex
import socket
from collections.abc import Mapping, Sequence

DEFAULT_SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"),
    *("-o", "ControlMaster=no"),
)
"""Asks for no password, takes a silent host for lost after three intervals (ssh's own default), and leaves no
connection behind that would hold its output open."""


def variables_line(environment: Mapping[str, str]) -> bytes:
    """Return the line by which :func:`watched` is given variables: assignments as a shell reads them."""
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    # In single quotes a newline is itself, and would end the line.
    return os.fsencode(assignments.replace("\n", "'\"$hetero_newline\"'") + "\n")


def watched(words: Sequence[str], *, folder: str, reads_variables: bool = False) -> str:
    """Shell text that runs ``words`` in ``folder`` until they or its standard input end; exits as they do.

    Args:
        reads_variables: standard input begins with a :func:`variables_line`. Values do not stand in the text, which the
            list of processes shows.
    """
    before: list[str] = []
    program = shlex.join(words)
    if reads_variables:
        before = ["hetero_newline='\n'", "IFS= read -r hetero_variables || exit 1"]
        # For the program alone: with another PATH this shell might not find what it needs itself.
        program = f'(eval "export $hetero_variables"; exec {program})'
    return "\n".join(
        [
            f"cd {shlex.quote(folder)} || exit 1",
            *before,
            # What runs in the background has no standard input of its own.
            "exec 3<&0",
            f"{program} 3<&- &",
            "child=$!",
            "(cat <&3 >/dev/null; kill -TERM $child) 2>/dev/null >&2 &",
            "watch=$!",
            "wait $child",
            "code=$?",
            "kill $watch 2>/dev/null",
            "exit $code",
        ]
    )


def probe(*, folder: str, torchrun: str, program: str, plan: str) -> str:
    """Shell text that tells what a launch needs of a host, a ``key value`` per line, for :mod:`.probing`."""
    return "\n".join(
        [
            f"cd {shlex.quote(folder)} 2>/dev/null || exit 0",
            "echo folder yes",
            f"command -v {shlex.quote(torchrun)} >/dev/null && echo torchrun yes",
            f"test -f {shlex.quote(program)} && echo program yes",
            f"echo plan $(sha256sum < {shlex.quote(plan)} 2>/dev/null)",
            "if command -v nvidia-smi >/dev/null; then echo gpus $(nvidia-smi --list-gpus | grep -c .); fi",
        ]
    )


def command_on(host: str, text: str, *, ssh: Sequence[str] = DEFAULT_SSH) -> list[str]:
    """The words that run shell ``text`` on ``host``: in a shell of this machine if it is that, else over ssh.

    A user's own shell over there may be any: it is asked for no more than to start ``sh``.
    """
    if is_this_machine(host):
        return ["sh", "-c", text]
    return [*ssh, "--", host, shlex.join(["exec", "sh", "-c", text])]


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a name or an address of this machine; one with a user in front is asked over ssh."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if address.is_loopback:
        return True
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as listener:
        try:
            # Only an address of one's own can be bound.
            listener.bind((host, 0))
        except OSError:
            return False
    return True
