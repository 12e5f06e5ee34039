"""Queries Slurm's controller for jobs, nodes and steps; signals steps and requeues jobs."""

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hetero.errors import ConfigError
from hetero.slurm.job import SlurmJob, StepTask, hostnames

ANSWER_WITHIN_S = 60.0
"""Limit for one command of Slurm; the controller of a busy cluster may take long."""

_GPUS = re.compile(r"(?:^|,)gpu(?::([^:(),]+))?:(\d+)(?:\(IDX:([\d,-]+)\))?(?=[(,\s]|$)")
"""``gpu:a100:4(IDX:0-3)`` or ``gpu:4(S:0-1)``, in a list with commas."""

_NODES_AND_GRES = re.compile(r"\sNodes=(\S+)\s+CPU_IDs=\S*\s+Mem=\S*\s+GRES(?:_IDX)?=(\S*)")
"""Nodes on which the job has the same resources, and these, in ``scontrol --details show job``."""

_HAS_TASK_0 = re.compile(r"Node \d+ \((\S+)\), \d+ task\(s\): 0\b")
"""A line of ``sattach --layout``, which lists the tasks of each node in ascending order."""

_STARTED_BY = re.compile(
    r"StepId=(?P<job>[\d_]+)\.(?P<step>\d+)(?:\+\d+)?\s.*SrunHost:Pid=(?P<host>[^:\s]+):(?P<pid>\d+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """A node as Slurm describes it.

    address: where Slurm reaches it (``NodeAddr``); the node's name by default.
    gpus: number of GPUs by Slurm's GPU type; the type is ``""`` where the site names none.
    features: the active ones.
    """

    name: str
    address: str
    gpus: Mapping[str, int]
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedNode:
    """A node of a job.

    component: index of the job's component, from 0.
    gpus: number of the job's GPUs on the node by Slurm's GPU type; the type is ``""`` where the site names none.
    gpu_indices: Slurm's indices of these GPUs on the node by type; empty where Slurm does not know the devices.
    """

    node: SlurmNode
    component: int
    gpus: Mapping[str, int]
    gpu_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name


def allocated_nodes(job: SlurmJob) -> tuple[AllocatedNode, ...]:
    """Return the nodes of a job, component by component, each in the order of Slurm's list.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    gpus: dict[str, Counter[str]] = {}
    indices: dict[str, dict[str, tuple[int, ...]]] = {}
    for node_list, gres in _NODES_AND_GRES.findall(_scontrol("--details", "show", "job", job.name)):
        for name in hostnames(node_list):
            gpus.setdefault(name, Counter()).update(_gpus(gres))
            indices.setdefault(name, {}).update(_gpu_indices(gres))
    components = [
        (index, name) for index, component in enumerate(job.components) for name in hostnames(component.node_list)
    ]
    nodes = nodes_called(name for _, name in components)
    return tuple(
        AllocatedNode(node=node, component=index, gpus=dict(gpus.get(name, {})), gpu_indices=indices.get(name, {}))
        for (index, name), node in zip(components, nodes, strict=True)
    )


def nodes_called(names: Iterable[str]) -> list[SlurmNode]:
    """Return the nodes with these names; a node that Slurm does not list has its name as address.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    names = list(names)
    output = _scontrol("--oneliner", "show", "node", ",".join(names)) if names else ""
    listed = {node.name: node for node in _listed_nodes(output)}
    return [listed.get(name, SlurmNode(name=name, address=name, gpus={})) for name in names]


def all_nodes() -> list[SlurmNode]:
    """Return all nodes of the cluster that this host belongs to.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    return list(_listed_nodes(_scontrol("--oneliner", "show", "node")))


def default_partition() -> str | None:
    """Return the partition of jobs that name none; ``None`` if there is no such partition.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    said = _scontrol("--oneliner", "show", "partition")
    found = re.search(r"^PartitionName=(\S+)(?=\s).*\sDefault=YES\b", said, re.MULTILINE)
    return found[1] if found else None


def address_of_task_0(job: SlurmJob, task: StepTask) -> str:
    """Return the address of the node of a step's task 0; its name where Slurm does not say the address.

    The layout of the step says in all its forms which node that is: a user may have placed tasks, lists of nodes are
    sorted, and ``srun A : B`` counts tasks over its parts in their order. Where Slurm's commands are missing, as in a
    container, it is taken to be the first node of the first component that takes part.

    Returns:
        Empty if no variable names the nodes of the step.

    Raises:
        ConfigError: a user has placed the tasks, and Slurm does not say where.
    """
    of_step = set(hostnames(task.node_list))
    parts = ((each, [node for node in hostnames(each.node_list) if node in of_step]) for each in job.components)
    component, nodes = next(((each, nodes) for each, nodes in parts if nodes), (job.components[0], []))
    # Task 0 is in the first part; layouts of the others count their tasks from 0, too.
    node, problem = _first_task_in_layout(f"{component.number}.{task.step}")
    if not node and task.is_placed_by_user:
        raise ConfigError(
            "tasks of this step are where a user has placed them (SLURM_HOSTFILE or --distribution=arbitrary), and "
            f"Slurm does not say where task 0 is ({problem}); set MASTER_ADDR to its host"
        )
    node = node or next(iter(nodes), "")
    try:
        return nodes_called([node])[0].address if node else ""
    except ConfigError:
        return node


def _first_task_in_layout(step: str) -> tuple[str, str]:
    """Return the node of task 0 in the layout of a step; else empty, and why."""
    asked = ["sattach", "--layout", step]
    done = _ended(asked)
    if isinstance(done, str):
        return "", f"{shlex.join(asked)}: {done}"
    if found := _HAS_TASK_0.search(done.stdout):
        return found[1], ""
    return "", f"{shlex.join(asked)}: {(done.stderr.strip() or 'no answer').splitlines()[-1]}"


def step_started_by(job: SlurmJob, *, pid: int, host: str) -> str | None:
    """Return the number of the step that a running ``srun`` has created; ``None`` if there is none yet.

    Args:
        pid, host: of ``srun``.
    """
    done = _ended(["scontrol", "--oneliner", "show", "step", job.name])
    if isinstance(done, str):
        return None
    for match in _STARTED_BY.finditer(done.stdout):
        if match["host"].partition(".")[0] == host.partition(".")[0] and int(match["pid"]) == pid:
            return match["step"]
    return None


def signal_step(job: SlurmJob, step: str, signal: str) -> None:
    """Send a signal to all tasks of one step, and to nothing else in the job.

    Slurm knows the step by the number of each component, and ``scancel`` reaches only the tasks of the one that it is
    given. A step of ``srun A : B`` in a plain job would be reached in its first part alone.
    """
    names = [component.number for component in job.components] if job.is_heterogeneous else [job.name]
    for name in names:
        # A component without a part in the step has none of this number.
        _ended(["scancel", f"--signal={signal}", f"{name}.{step}"])


def job_fields(job: SlurmJob) -> Mapping[str, str]:
    """Return the fields of ``scontrol show job``, such as ``JobState`` and ``Requeue``; empty if it does not answer."""
    done = _ended(["scontrol", "--oneliner", "show", "job", job.name])
    if isinstance(done, str) or done.returncode:
        return {}
    first, _, _ = done.stdout.partition("\n")
    return dict(re.findall(r"(?:^|\s)([A-Za-z]\w*)=(\S*)", first))


def is_running(fields: Mapping[str, str]) -> bool:
    """Whether a job with these fields runs on: it is not completing, cancelled, preempted or in the queue.

    Slurm shows ``SIGNALING`` while it sends a signal, so that a job which asks at once sees that state of itself
    (``job_state_string`` in ``src/common/slurm_protocol_defs.c``; seen with 22.05.8 on a busy machine).
    """
    return fields.get("JobState") in ("RUNNING", "SIGNALING")


def requeue(job: SlurmJob) -> None:
    """Requeue a job, or one task of an array, which Slurm ends for that.

    Raises:
        ConfigError: Slurm does not do it.
    """
    _scontrol("requeue", job.name)


def _listed_nodes(output: str) -> Iterator[SlurmNode]:
    for line in output.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(NodeName|NodeAddr|Gres|ActiveFeatures|Partitions)=(\S*)", line))
        if not (name := fields.get("NodeName")):
            continue
        features, partitions = (_names(fields.get(key, "")) for key in ("ActiveFeatures", "Partitions"))
        yield SlurmNode(
            name=name,
            address=fields.get("NodeAddr") or name,
            gpus=_gpus(fields.get("Gres", "")),
            features=features,
            partitions=partitions,
        )


def _names(comma_list: str) -> frozenset[str]:
    return frozenset(comma_list.split(",")) - {"", "(null)"}


def _gpus(gres: str) -> dict[str, int]:
    """Return numbers of GPUs by type: ``{"a100": 2}`` of ``gpu:a100:2(IDX:2-3),scratch:1``."""
    counts: Counter[str] = Counter()
    for gpu_type, count, _ in _GPUS.findall(gres):
        counts[gpu_type] += int(count)
    # A job that asked for no type has 0 of the types that it was not given.
    return dict(+counts)


def _gpu_indices(gres: str) -> dict[str, tuple[int, ...]]:
    """Return Slurm's indices of GPUs by type: ``{"a100": (2, 3)}`` of ``gpu:a100:2(IDX:2-3)``."""
    return {
        gpu_type: tuple(map(int, hostnames(f"[{numbers}]"))) for gpu_type, _, numbers in _GPUS.findall(gres) if numbers
    }


def _scontrol(*words: str) -> str:
    command = ["scontrol", *words]
    done = _ended(command)
    if isinstance(done, str):
        raise ConfigError(f"{shlex.join(command)}: {done}; is Slurm's scontrol on the PATH?")
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise ConfigError(f"{shlex.join(command)}: {said}")
    return done.stdout


def _ended(words: list[str]) -> "subprocess.CompletedProcess[str] | str":
    """Run a command; return it once it has ended, or the reason why it did not run to its end."""
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=ANSWER_WITHIN_S
        )
    except OSError as error:
        return str(error.strerror)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_WITHIN_S:g} s"
