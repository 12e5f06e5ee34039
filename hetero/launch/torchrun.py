"""Writes the torchrun line of each host.

The agents meet by torchrun's static rendezvous: the ranks of an agent follow those of the agents with a lower node
rank, however many processes each of them has (``_assign_worker_ranks`` in torch's
``distributed/elastic/agent/server/api.py``), so that node n of the cluster file has the ranks that the plan counts
there.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.launch.hosts import NodeHost

WIDTH = 110
"""Columns of a written line before it goes on in the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunOptions:
    """What the lines of all hosts have in common.

    torchrun: the command, a path if a shell does not find it.
    program: what ranks run, from the folder in which torchrun starts.
    flags: of the program.
    address, port: where node 0 lets the others meet; no address for a single node, which then finds a port itself.
    environment: variables of the ranks, as ``NAME=VALUE``.
    numa_binding: torchrun's, ``None`` for none.
    logs: under Slurm, the folder of what every rank says.
    """

    torchrun: str = "torchrun"
    program: str = "pretrain_gpt.py"
    flags: tuple[str, ...] = ()
    address: str
    port: int
    environment: tuple[str, ...] = ()
    numa_binding: str | None = None
    logs: str = "launch-logs"

    def words(self, host: NodeHost, *, num_nodes: int) -> list[str]:
        """The line of ``host``, word by word."""
        where = ["--standalone"]
        if num_nodes > 1 or self.address:
            where = ["--nnodes", str(num_nodes), "--node-rank", str(host.node)]
            where += ["--master-addr", self.address, "--master-port", str(self.port)]
        return [
            *(["env", *self.environment] if self.environment else []),
            *(self.torchrun, *where, "--nproc-per-node", str(len(host.ranks))),
            *([] if self.numa_binding is None else ["--numa-binding", self.numa_binding]),
            *(self.program, *self.flags),
        ]


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
