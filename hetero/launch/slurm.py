"""Writes a launch for Slurm: a batch script, and the srun step that is the same inside an allocation.

Each node type is a component of a heterogeneous job (``#SBATCH hetjob``), so that each may ask for other nodes; a
single one is a plain job. One step runs over all components with a task per node. It numbers its tasks over the
components in their order (``SLURM_PROCID``), which is that of the cluster file, and so the plan's ranks land on their
node types. A user's own placement of tasks (``SLURM_HOSTFILE``, ``--distribution=arbitrary``) would break that order:
the step does without it, and says so.
"""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero.distributed.rendezvous_names import NODE_RANK, RENDEZVOUS
from hetero.errors import ConfigError
from hetero.launch.hosts import NodeHost, assigned_hosts
from hetero.launch.torchrun import FIRST_PORT, LOOPBACK, PORTS, TorchrunOptions, shell_assignments, shell_text
from hetero.spec.cluster import ClusterSpec, NodeType

_ADDRESS = """# The address by which Slurm itself reaches the first node of the plan.
node="$(scontrol show hostnames "{nodes}" | head -n 1)"
export RENDEZVOUS_HOST="$(scontrol --oneliner show node "$node" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)"
"""


_SET_FIRST = "set it before sbatch, which hands its environment on unless --export says otherwise"

_ON_A_NODE = """# Task n of the step is node n of the plan. It is told how many devices it has, whether ranks
# are to stay on the processors near theirs, torchrun, and the program.
launch='
    devices="$1" binding="$2" torchrun="$3"
    shift 3
    if [ "$binding" = node-if-possible ]; then
        binding=node
        if ! command -v numactl > /dev/null; then
            echo "hetero: $SLURMD_NODENAME: ranks are not bound to the processors near their GPU: no numactl" >&2
            binding=
        fi
    fi
    exec "$torchrun" --nnodes {num_nodes} --nproc-per-node "$devices" ${{binding:+--numa-binding "$binding"}} \\
        --rdzv-backend {rendezvous} --rdzv-endpoint "$RENDEZVOUS_HOST:$RENDEZVOUS_PORT" \\
        --rdzv-conf "{node_rank}=$SLURM_PROCID" \\
        --log-dir "$LAUNCH_LOGS/$SLURM_JOB_ID/$SLURMD_NODENAME" --tee 3 "$@"
'

"""

_IN_THE_ORDER_OF_THE_LIST = """# Task n has to be on node n of Slurm's list, whose first node is the address above.
if [ -n "${SLURM_HOSTFILE:-}" ]; then
    echo "hetero: SLURM_HOSTFILE is set aside: the plan's nodes are in the order of $SLURM_JOB_NODELIST" >&2
fi
unset SLURM_HOSTFILE SLURM_DISTRIBUTION SLURM_ARBITRARY_NODELIST

"""

_BEFORE_THE_STEP = """# Every rank that is told finishes its step, saves (with --save) and leaves. At the end of its
# time the job is RUNNING and this shell alone is told; cancelled or preempted it is not, and Slurm has told the ranks
# itself. A signal to srun would end them at once.
job() { scontrol --oneliner show job "$SLURM_JOB_ID" | head -n 1; }
told=''
hand_on() {
    told=yes
    if job | grep -q ' JobState=RUNNING '; then scancel --signal=TERM "$SLURM_JOB_ID" || true; fi
}
trap hand_on TERM INT

"""

_AFTER_THE_STEP = """step=$!
code=0
wait "$step" || code=$?
# A signal ends a wait, not the step.
while kill -0 "$step" 2> /dev/null; do
    code=0
    wait "$step" || code=$?
done
"""

_QUEUED_AGAIN = """# Out of time: the same job goes on from what it has saved, unless it may not (--no-requeue), or
# is no batch job.
if [ -n "$told" ] && [ "$code" != 0 ] && job | grep -q ' JobState=RUNNING .* Requeue=1 .* BatchFlag=1 '; then
    echo "hetero: out of time: job $SLURM_JOB_ID queues itself again"
    scontrol requeue "$SLURM_JOB_ID"
    # The end of this shell would be taken for that of the job.
    sleep 60
fi
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """What an allocation of Slurm says of itself in the environment.

    num_nodes, node_lists: of each component; a list is as Slurm shortens it, such as ``gpu[0-3]``.
    """

    num_nodes: tuple[int, ...]
    node_lists: tuple[str, ...]


def allocation_in(environment: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process runs in, ``None`` outside of one.

    Raises:
        ConfigError: a variable of Slurm's is no number.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    size = _number(environment, "SLURM_HET_SIZE", "1")
    components = [""] if size == 1 else [f"_HET_GROUP_{i}" for i in range(size)]
    return Allocation(
        num_nodes=tuple(_number(environment, f"SLURM_JOB_NUM_NODES{each}", "1") for each in components),
        node_lists=tuple(environment.get(f"SLURM_JOB_NODELIST{each}", "") for each in components),
    )


def check_allocation(allocation: Allocation, cluster: ClusterSpec) -> None:
    """Checks that a component of the allocation has the nodes of each node type, in the order of the cluster file.

    Raises:
        ConfigError: it has not.
    """
    wanted = tuple(each.count for each in cluster.node_types)
    if allocation.num_nodes != wanted:
        said = ", ".join(f"{each.count} of {each.name!r}" for each in cluster.node_types)
        raise ConfigError(
            f"this allocation of Slurm has {_counted(allocation.num_nodes)}, the plan needs {_counted(wanted)} "
            f"({said}); submit what 'hetero launch ... --sbatch' writes"
        )


def allocated_hosts(allocation: Allocation, cluster: ClusterSpec) -> tuple[NodeHost, ...]:
    """The nodes of the allocation, which fits ``cluster``, as Slurm names them.

    Raises:
        ConfigError: ``scontrol`` does not tell their names.
    """
    words = []
    for node_type, nodes in zip(cluster.node_types, allocation.node_lists, strict=True):
        asked = ["scontrol", "show", "hostnames", nodes]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"{shlex.join(asked)}: {error}; is Slurm's scontrol on the PATH?") from None
        words.append(f"{node_type.name}={','.join(done.stdout.split())}")
    return assigned_hosts(cluster, words)


def step_script(cluster: ClusterSpec, options: TorchrunOptions) -> str:
    """The lines of bash that start one task per node inside an allocation, and end with the last of them.

    A batch job that is told that its time is over queues itself again if the program both saves and loads.
    """
    types = cluster.node_types
    is_heterogeneous = len(types) > 1
    num_nodes, torchrun = sum(each.count for each in types), shlex.quote(options.torchrun)
    address = _ADDRESS.format(nodes="$SLURM_JOB_NODELIST_HET_GROUP_0" if is_heterogeneous else "$SLURM_JOB_NODELIST")
    if options.address or num_nodes == 1:
        address = f"export RENDEZVOUS_HOST={shlex.quote(options.address or LOOPBACK)}\n"
    port = str(options.port) if options.port else f"$(({FIRST_PORT} + RANDOM % {PORTS}))"
    flags = "\n".join(f"    {line}" for line in _flag_lines(options.flags))
    steps = [
        [
            *([f"--het-group={index}"] if is_heterogeneous else []),
            *(f"--ntasks={each.count}", "--ntasks-per-node=1", "--cpu-bind=none"),
        ]
        for index, each in enumerate(types)
    ]
    srun = " : \\\n    ".join(
        f'{" ".join(step)} \\\n        bash -c "$launch" node '
        f'{each.gpus_per_node} {_binding(each, options)} {torchrun} "${{program[@]}}"'
        for step, each in zip(steps, types, strict=True)
    )
    variables = "".join(f"export {each}\n" for each in shell_assignments(options.environment, fix=_SET_FIRST))
    return "".join(
        [
            f"{address}export RENDEZVOUS_PORT={port} LAUNCH_LOGS={shlex.quote(options.logs)}\n{variables}\n",
            f"program=(\n    {shlex.quote(options.program)}\n{flags}\n)\n\n",
            _ON_A_NODE.format(num_nodes=num_nodes, rendezvous=RENDEZVOUS, node_rank=NODE_RANK),
            _IN_THE_ORDER_OF_THE_LIST,
            _BEFORE_THE_STEP,
            f"srun --kill-on-bad-exit=1 \\\n    {srun} &\n",
            _AFTER_THE_STEP,
            _QUEUED_AGAIN if goes_on(options.flags) else "",
            'exit "$code"\n',
        ]
    )


def _binding(node_type: NodeType, options: TorchrunOptions) -> str:
    """What a launch asks for, else the nodes of processors that the cluster file knows beside GPUs."""
    if options.numa_binding is not None:
        return options.numa_binding
    knows = node_type.host is not None and node_type.host.numa_nodes > 1
    return "node-if-possible" if knows and node_type.device != "cpu" else "''"


def goes_on(flags: Sequence[str]) -> bool:
    """Whether a program that is started again with the same flags goes on from where it was."""
    names = {word.partition("=")[0] for word in flags}
    return {"--save", "--load"} <= names


def _flag_lines(flags: Sequence[str]) -> list[str]:
    return shell_text(flags, indent="").replace(" \\\n", "\n").splitlines()


def _number(environment: Mapping[str, str], name: str, default: str) -> int:
    text = environment.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"environment: {name} is {text!r}, must be a whole number; is this an allocation of Slurm?")
    return int(text)


def _counted(num_nodes: Sequence[int]) -> str:
    if len(num_nodes) == 1:
        return f"{num_nodes[0]} node{'s' * (num_nodes[0] != 1)} in one component"
    return f"{' + '.join(map(str, num_nodes))} nodes in {len(num_nodes)} components"
