"""Asks Slurm's controller about a job, its nodes and its steps, and tells it what is to become of them."""

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hetero.errors import ConfigError
from hetero.slurm.job import SlurmJob, StepTask, hostnames

ANSWER_WITHIN_S = 60.0
"""For the controller, which a busy cluster keeps waiting; commands of Slurm give up by themselves later."""

_GPUS = re.compile(r"(?:^|,)gpu(?::([^:(),]+))?:(\d+)(?:\(IDX:([\d,-]+)\))?(?=[(,\s]|$)")
"""``gpu:a100:4(IDX:0-3)`` or ``gpu:4(S:0-1)``, in a list with commas."""

_OF_NODES = re.compile(r"\sNodes=(\S+)\s+CPU_IDs=\S*\s+Mem=\S*\s+GRES(?:_IDX)?=(\S*)")
"""Of ``scontrol --details show job``, for nodes of which the job has the same."""

_HAS_TASK_0 = re.compile(r"Node \d+ \((\S+)\), \d+ task\(s\): 0\b")
"""A line of ``sattach --layout``, which lists the tasks of each node in ascending order."""

_STARTED_BY = re.compile(
    r"StepId=(?P<job>[\d_]+)\.(?P<step>\d+)(?:\+\d+)?\s.*SrunHost:Pid=(?P<host>[^:\s]+):(?P<pid>\d+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmNode:
    """What Slurm says of a node.

    address: by which Slurm itself reaches it; its name unless the site says otherwise (``NodeAddr``).
    gpus: that it has, by Slurm's type of them; of no type, ``""``.
    marks: its active features and its partitions.
    partitions: these alone.
    """

    name: str
    address: str
    gpus: Mapping[str, int]
    marks: frozenset[str]
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatedNode:
    """A node of a job.

    component: of the job, from 0.
    gpus: that the job has on it, by Slurm's type of them; of no type, ``""``.
    gpu_indices: Slurm's numbers of these GPUs on the node, by type; none where Slurm does not know the devices.
    """

    node: SlurmNode
    component: int
    gpus: Mapping[str, int]
    gpu_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.node.name


def allocated_nodes(job: SlurmJob) -> tuple[AllocatedNode, ...]:
    """The nodes of a job, component by component, each in the order of Slurm's list.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    gpus: dict[str, Counter[str]] = {}
    indices: dict[str, dict[str, tuple[int, ...]]] = {}
    for nodes, said in _OF_NODES.findall(_scontrol("--details", "show", "job", job.name)):
        for node in hostnames(nodes):
            gpus.setdefault(node, Counter()).update(_gpus(said))
            indices.setdefault(node, {}).update(_gpu_indices(said))
    names = [hostnames(component.node_list) for component in job.components]
    facts = {each.name: each for each in nodes_called(node for of_component in names for node in of_component)}
    return tuple(
        AllocatedNode(
            node=facts[node],
            component=component,
            gpus=dict(gpus.get(node, {})),
            gpu_indices=indices.get(node, {}),
        )
        for component, of_component in enumerate(names)
        for node in of_component
    )


def nodes_called(names: Iterable[str]) -> list[SlurmNode]:
    """What Slurm says of some nodes; of one that it does not speak of, the name alone.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    wanted = list(names)
    said = _scontrol("--oneliner", "show", "node", ",".join(wanted)) if wanted else ""
    found = {facts.name: facts for facts in _node_facts(said)}
    return [found.get(name, SlurmNode(name=name, address=name, gpus={}, marks=frozenset())) for name in wanted]


def all_nodes() -> list[SlurmNode]:
    """All nodes of the cluster that this host belongs to.

    Raises:
        ConfigError: ``scontrol`` does not answer.
    """
    return list(_node_facts(_scontrol("--oneliner", "show", "node")))


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
    """The number of the step that a running ``srun`` of this host has started; ``None`` if there is none (yet).

    Args:
        host: what ``srun`` calls this host: its host name.
    """
    done = _ended(["scontrol", "--oneliner", "show", "step", job.name])
    if isinstance(done, str):
        return None
    for found in _STARTED_BY.finditer(done.stdout):
        if found["host"].partition(".")[0] == host.partition(".")[0] and int(found["pid"]) == pid:
            return found["step"]
    return None


def signal_step(job: SlurmJob, step: str, signal: str) -> None:
    """Sends a signal to all tasks of one step, and to nothing else of the job."""
    names = [component.number for component in job.components] if job.is_heterogeneous else [job.name]
    for name in names:
        # A component without a part in the step has none of this number.
        _ended(["scancel", f"--signal={signal}", f"{name}.{step}"])


def state_of(job: SlurmJob) -> Mapping[str, str]:
    """What ``scontrol show job`` says of a job, such as ``JobState`` and ``Requeue``; empty if it does not answer."""
    done = _ended(["scontrol", "--oneliner", "show", "job", job.name])
    if isinstance(done, str) or done.returncode:
        return {}
    first, _, _ = done.stdout.partition("\n")
    return dict(re.findall(r"(?:^|\s)([A-Za-z]\w*)=(\S*)", first))


def requeue(job: SlurmJob) -> None:
    """Puts a job, or one task of an array, into the queue again; Slurm ends it for that.

    Raises:
        ConfigError: Slurm does not do it.
    """
    _scontrol("requeue", job.name)


def _node_facts(said: str) -> Iterator[SlurmNode]:
    for line in said.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(NodeName|NodeAddr|Gres|ActiveFeatures|Partitions)=(\S*)", line))
        if not (name := fields.get("NodeName")):
            continue
        features, partitions = (_names(fields.get(key, "")) for key in ("ActiveFeatures", "Partitions"))
        yield SlurmNode(
            name=name,
            address=fields.get("NodeAddr") or name,
            gpus=_gpus(fields.get("Gres", "")),
            marks=features | partitions,
            partitions=partitions,
        )


def _names(said: str) -> frozenset[str]:
    """Names in a list with commas."""
    return frozenset(said.split(",")) - {"", "(null)"}


def _gpus(gres: str) -> dict[str, int]:
    """GPUs by type in a list of generic resources."""
    found: Counter[str] = Counter()
    for gpu_type, count, _ in _GPUS.findall(gres):
        found[gpu_type] += int(count)
    # A job that asked for no type has 0 of those that it was not given.
    return dict(+found)


def _gpu_indices(gres: str) -> dict[str, tuple[int, ...]]:
    """Slurm's numbers of GPUs by type: ``{"a100": (2, 3)}`` of ``gpu:a100:2(IDX:2-3)``."""
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
    """A command that has ended, or why it has not."""
    try:
        return subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=ANSWER_WITHIN_S
        )
    except OSError as error:
        return str(error.strerror)
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_WITHIN_S:g} s"
