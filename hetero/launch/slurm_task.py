"""Starts torchrun on one node of an allocation: the task that the ``srun`` line of ``hetero launch`` runs there.

The task finds its node of the plan by the name of its node, so that the order of tasks and of Slurm's lists is free.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.errors import ConfigError, HeteroError
from hetero.slurm.job import job_of
from hetero.standard_output import tell_error

NODE_IF_POSSIBLE = "node-if-possible"
"""Default binding on hosts with several NUMA nodes: a node without ``numactl`` prints a line and binds no ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskNode:
    """A node of the plan, in the form in which tasks get the list of all nodes.

    name: Slurm's name of the node.
    binding: torchrun's ``--numa-binding``, :data:`NODE_IF_POSSIBLE`, or empty for none.
    visible_gpus: indices into ``CUDA_VISIBLE_DEVICES`` of the task that ranks may use; empty for all.
    """

    name: str
    node_rank: int
    num_ranks: int
    binding: str = ""
    visible_gpus: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Return a text such as ``v1=0:4:node`` or ``m1=0:2::2,3``, which :func:`parse_task_node` reads."""
        visible = ",".join(map(str, self.visible_gpus))
        return f"{self.name}={self.node_rank}:{self.num_ranks}:{self.binding}:{visible}".rstrip(":")


def parse_task_node(text: str) -> TaskNode:
    """Return the node that ``NAME=NODE_RANK:RANKS[:BINDING[:GPUS]]`` describes."""
    name, _, numbers = text.partition("=")
    node_rank, num_ranks, binding, visible, *_ = [*numbers.split(":"), "", ""]
    return TaskNode(
        name=name,
        node_rank=int(node_rank),
        num_ranks=int(num_ranks),
        binding=binding,
        visible_gpus=tuple(map(int, filter(None, visible.split(",")))),
    )


def main(argv: Sequence[str]) -> NoReturn:
    """Become torchrun, or exit with code 2 if this node is none of the plan's."""
    parser = argparse.ArgumentParser(prog="python -m hetero.launch.slurm_task", description=__doc__)
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help="where the agents meet")
    parser.add_argument("--logs", required=True, metavar="FOLDER", help="gets JOB/NODE")
    parser.add_argument("--node", action="append", type=parse_task_node, required=True, dest="nodes")
    parser.add_argument("command", nargs="+", metavar="TORCHRUN PROGRAM FLAGS")
    args = parser.parse_args(argv)
    try:
        job_number, own = _own_node(args.nodes)
    except HeteroError as error:
        tell_error(error)
        sys.exit(2)
    words = _words(args, own, job_number)
    os.environ.update(_visible_gpus(own, os.environ))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        tell_error(
            ConfigError(f"{words[0]} cannot be started on this node: {error.strerror}; give its path: --torchrun")
        )
        sys.exit(2)


def _own_node(nodes: Sequence[TaskNode]) -> tuple[int, TaskNode]:
    """Return the number of the job, and the node of the plan that this task runs on."""
    job = job_of(os.environ)
    own = next((node for node in nodes if job is not None and node.name == job.node), None)
    if job is None or own is None:
        where = "is not in a job of Slurm" if job is None else f"is node {job.node}"
        raise ConfigError(
            f"a task of this launch {where}, which is none of its nodes ({', '.join(n.name for n in nodes)}); "
            "'hetero launch --run' starts it on these"
        )
    return job.number, own


def _visible_gpus(node: TaskNode, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which ranks see the GPUs of the plan alone, on a node with several cards."""
    given = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if not node.visible_gpus or node.visible_gpus[-1] >= len(given):
        return {}
    # Slurm's indices follow the bus; CUDA's default order begins with the fastest device.
    chosen = ",".join(given[place] for place in node.visible_gpus)
    return {"CUDA_VISIBLE_DEVICES": chosen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _words(args: argparse.Namespace, own: TaskNode, job_number: int) -> list[str]:
    """Return the line of torchrun on this node."""
    torchrun, *program = args.command
    binding = _binding(own)
    return [
        *(torchrun, "--nnodes", str(len(args.nodes)), "--nproc-per-node", str(own.num_ranks)),
        *(["--numa-binding", binding] if binding else []),
        *("--rdzv-backend", RENDEZVOUS, "--rdzv-endpoint", args.rendezvous),
        *("--rdzv-conf", f"{NODE_RANK}={own.node_rank}"),
        *("--log-dir", f"{args.logs}/{job_number}/{own.name}", "--tee", "3"),
        *program,
    ]


def _binding(node: TaskNode) -> str:
    if node.binding != NODE_IF_POSSIBLE:
        return node.binding
    if shutil.which("numactl") is not None:
        return "node"
    sys.stderr.write(f"hetero: {node.name}: ranks are not bound to the processors near their GPU: no numactl\n")
    return ""


if __name__ == "__main__":
    main(sys.argv[1:])
