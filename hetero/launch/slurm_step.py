"""Writes the ``srun`` line that starts one torchrun on each node of an allocation of any form.

The line has one part for each component of the job. Slurm chooses the order of tasks within a part, and each task finds
its place in the plan by the name of its node (:mod:`hetero.launch.slurm_task`). The step relies on three defaults of
Slurm: without ``--exact`` and ``--cpus-per-task`` it gets all processors that the job has on a node, ``--mem=0`` means
all memory of the job there, and ``--gpus`` with the sum over the nodes of a part gives each node the job's GPUs there.
"""

import sys
from collections.abc import Sequence

from hetero.launch.slurm_nodes import PlacedNode
from hetero.launch.slurm_task import NODE_IF_POSSIBLE, TaskNode
from hetero.launch.torchrun import LOOPBACK, TorchrunOptions, drawn_port
from hetero.slurm.job import SlurmJob
from hetero.spec.cluster import ClusterSpec, NodeType


def step_words(
    job: SlurmJob, nodes: Sequence[PlacedNode], options: TorchrunOptions, *, cluster: ClusterSpec
) -> list[str]:
    """Return the words of the ``srun`` line.

    Args:
        nodes: all nodes of the plan, in its order.
        options: without an address ranks meet on the plan's first node, without a port on a random one.
    """
    address = options.address or (LOOPBACK if len(nodes) == 1 else nodes[0].allocated.node.address)
    endpoint = f"{f'[{address}]' if ':' in address else address}:{options.port or drawn_port()}"
    task = [sys.executable, "-m", "hetero.launch.slurm_task", "--rendezvous", endpoint, "--logs", options.logs]
    for node in nodes:
        task_node = TaskNode(
            name=node.host.name,
            node_rank=node.host.node,
            num_ranks=len(node.host.ranks),
            binding=_binding(node.host.node_type, cluster, options),
            visible_gpus=node.visible_gpus,
        )
        task += ["--node", str(task_node)]
    task += ["--", options.torchrun, options.program, *options.flags]
    # A job that was submitted with --export=NONE would give its step an empty environment.
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1"]
    if job.task is not None:
        # The step that this process belongs to holds the processors and GPUs of its node.
        words.append("--overlap")
    for index in range(len(job.components)):
        part = [node for node in nodes if node.allocated.component == index]
        words += [":"] if index else []
        words += [f"--het-group={index}"] if job.is_heterogeneous else []
        words += [f"--nodes={len(part)}", f"--ntasks={len(part)}", "--ntasks-per-node=1", "--cpu-bind=none", "--mem=0"]
        words += _gpus(part, cluster)
        words += task
    return words


def _gpus(part: Sequence[PlacedNode], cluster: ClusterSpec) -> list[str]:
    """Return the option that asks for all GPUs of the job on these nodes; none where the plan uses no GPUs.

    It names no type, because Slurm refuses a type that a node of the part lacks, and any type in a job that asked for
    none. On a node with cards of several types the task chooses among them.
    """
    if all(cluster.device_types.of(node.host.node_type.device).is_host for node in part):
        return []
    num_gpus = sum(sum(node.allocated.gpus.values()) for node in part)
    return [f"--gpus={num_gpus}"] if num_gpus else []


def _binding(node_type: NodeType, cluster: ClusterSpec, options: TorchrunOptions) -> str:
    """Return ``--numa-binding`` of the launch; by default ranks are bound where a host has several NUMA nodes."""
    if options.numa_binding is not None:
        return options.numa_binding
    knows = node_type.host is not None and node_type.host.numa_nodes > 1
    return NODE_IF_POSSIBLE if knows and not cluster.device_types.of(node_type.device).is_host else ""
