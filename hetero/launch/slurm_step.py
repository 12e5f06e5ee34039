"""Writes the step of ``srun`` that starts one torchrun on each node of an allocation, whatever form that has.

A plain job has one part, a heterogeneous job one for each of its components; within a part Slurm chooses the order of
tasks, which look up by the name of their node who they are (:mod:`hetero.launch.slurm_task`). The step relies on this:
without ``--exact`` and ``--cpus-per-task`` it gets all processors that the job has on a node, ``--mem=0`` is all of the
job's memory there, and ``--gpus`` with the sum of what the job has on the nodes of a part gives each node its own.
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
    """Return the line of ``srun``, word by word.

    Args:
        nodes: of the plan, in its order.
        options: an address and a port that are not given follow from the nodes and are drawn.
    """
    address = options.address or (LOOPBACK if len(nodes) == 1 else nodes[0].allocated.node.address)
    endpoint = f"{f'[{address}]' if ':' in address else address}:{options.port or drawn_port()}"
    task = [sys.executable, "-m", "hetero.launch.slurm_task", "--rendezvous", endpoint, "--logs", options.logs]
    for each in nodes:
        host = each.host
        node = TaskNode(
            name=host.name,
            node_rank=host.node,
            num_ranks=len(host.ranks),
            binding=_binding(host.node_type, cluster, options),
            visible_gpus=each.visible_gpus,
        )
        task += ["--node", str(node)]
    task += ["--", options.torchrun, options.program, *options.flags]
    # What this environment has, also where the job was submitted with --export=NONE.
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1"]
    if job.task is not None:
        # This process is a task of a step itself, which holds the processors and GPUs of its node.
        words.append("--overlap")
    for index in range(len(job.components)):
        part = [each for each in nodes if each.allocated.component == index]
        words += [":"] if index else []
        words += [f"--het-group={index}"] if job.is_heterogeneous else []
        words += [f"--nodes={len(part)}", f"--ntasks={len(part)}", "--ntasks-per-node=1", "--cpu-bind=none", "--mem=0"]
        words += _gpus(part, cluster)
        words += task
    return words


def _gpus(part: Sequence[PlacedNode], cluster: ClusterSpec) -> list[str]:
    """Return the request for all GPUs that the job has on some nodes; none where the plan uses no GPUs.

    It has no type: Slurm refuses a type that some nodes of the part lack, and any type in a job that asked for none.
    On a node with several cards its task chooses among them.
    """
    if all(cluster.device_types.of(each.host.node_type.device).is_host for each in part):
        return []
    num_gpus = sum(sum(each.allocated.gpus.values()) for each in part)
    return [f"--gpus={num_gpus}"] if num_gpus else []


def _binding(node_type: NodeType, cluster: ClusterSpec, options: TorchrunOptions) -> str:
    """What a launch asks for, else the nodes of processors that the cluster file knows beside GPUs."""
    if options.numa_binding is not None:
        return options.numa_binding
    knows = node_type.host is not None and node_type.host.numa_nodes > 1
    return NODE_IF_POSSIBLE if knows and not cluster.device_types.of(node_type.device).is_host else ""
