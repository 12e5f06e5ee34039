"""Writes the torchrun line of each host.

The agents meet by a static rendezvous (:mod:`hetero.distributed.torchrun_rendezvous`): the ranks of an agent follow
those of the agents with a lower node rank, however many processes each of them has (``_assign_worker_ranks`` in torch's
``distributed/elastic/agent/server/api.py``), so that node n of the cluster file has the ranks that the plan counts
there.
"""

import hashlib
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.launch.hosts import NodeHost
from hetero.plan.ir import Plan
from hetero.serialization import to_json

LOOPBACK = "127.0.0.1"
"""Where the ranks of a single host meet."""

FIRST_PORT, PORTS = 15_000, 15_000
"""Where agents meet: below the ports that Linux gives away by itself (32768 on). A choice."""

WIDTH = 110
"""Columns of a written line before it goes on in the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunOptions:
    """What the lines of all hosts have in common.

    torchrun: the command, a path if a shell does not find it.
    program: what ranks run, from the folder in which torchrun starts.
    flags: of the program.
    address, port: where node 0 lets the others meet; port 0 for a single node, which then finds one itself.
    environment: variables of the ranks by name; ``None`` stands for the value that the environment has where the line
        is run. Values may be secrets: no word of a line has one.
    numa_binding: torchrun's, ``None`` for none.
    logs: under Slurm, the folder of what every rank says.
    """

    torchrun: str = "torchrun"
    program: str = "pretrain_gpt.py"
    flags: tuple[str, ...] = ()
    address: str
    port: int
    environment: Mapping[str, str | None] = field(default_factory=dict)
    numa_binding: str | None = None
    logs: str = "launch-logs"

    def words(self, host: NodeHost, *, num_nodes: int) -> list[str]:
        """The line of ``host``, word by word, without the variables."""
        address = f"[{self.address}]" if ":" in self.address else self.address
        where = ["--rdzv-backend", RENDEZVOUS, "--rdzv-endpoint", f"{address}:{self.port}"]
        if num_nodes > 1:
            where = ["--nnodes", str(num_nodes), *where, "--rdzv-conf", f"{NODE_RANK}={host.node}"]
        return [
            *(self.torchrun, *where, "--nproc-per-node", str(len(host.ranks))),
            *([] if self.numa_binding is None else ["--numa-binding", self.numa_binding]),
            *(self.program, *self.flags),
        ]

    def shell_line(self, host: NodeHost, *, num_nodes: int) -> str:
        """The line of ``host`` with the variables, as a shell reads it."""
        line = shell_text(self.words(host, num_nodes=num_nodes))
        assignments = shell_assignments(self.environment, fix="set it in this shell first")
        return f"{' '.join(assignments)} \\\n    {line}" if assignments else line


def shell_assignments(environment: Mapping[str, str | None], *, fix: str) -> list[str]:
    """Write variables as a shell assigns them, which no list of processes shows.

    Args:
        fix: what to do about a value that is to come from the environment and is not there; the shell ends with that.
    """
    return [
        f'{name}="${{{name}:?is not set: {fix}}}"' if value is None else f"{name}={shlex.quote(value)}"
        for name, value in environment.items()
    ]


def drawn_port() -> int:
    """Return a port that strangers cannot foresee, for agents on several hosts."""
    return FIRST_PORT + secrets.randbelow(PORTS)


def port_of_plan(plan: Plan) -> int:
    """Return a port that strangers cannot foresee and that is the same whenever it is asked for, as pages need it."""
    digest = hashlib.sha256(to_json(plan).encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:8], "big") % PORTS


def shell_text(words: Sequence[str], *, width: int = WIDTH, indent: str = "    ") -> str:
    """``words`` as a shell reads them, in lines of about ``width`` columns; no flag is parted from its first value."""
    parts: list[str] = []
    for word in map(shlex.quote, words):
        if parts and parts[-1].startswith("--") and " " not in parts[-1] and not word.startswith("--"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = [""]
    for part in parts:
        if lines[-1].strip() and len(lines[-1]) + 1 + len(part) > width - 2:
            lines.append(indent + part)
        else:
            lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)
