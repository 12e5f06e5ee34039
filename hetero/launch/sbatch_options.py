"""Reads the options of ``sbatch`` that a user adds to a batch script, and refuses those that contradict the plan."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero.errors import ConfigError
from hetero.serialization import near_match
from hetero.spec.cluster import NodeType

_OPTION = re.compile(r"[a-z][a-z-]*(=[^\n]+)?")

_KEEPS_A_BROKEN_JOB = (
    "keeps a job in which every srun fails after the loss of a node (training that survives one: "
    "scripts/slurm/elastic.sbatch)"
)
_OF_SRUN = "is an option of srun, and hetero launch chooses those of its step"
_FROM_THE_PLAN = "follows from the plan"
_REFUSED = {
    "nodes": _FROM_THE_PLAN,
    "ntasks": _FROM_THE_PLAN,
    "ntasks-per-node": _FROM_THE_PLAN,
    "ntasks-per-gpu": "contradicts the one task per node that starts the node's ranks",
    "no-kill": _KEEPS_A_BROKEN_JOB,
    "cpu-bind": _OF_SRUN,
    "exact": _OF_SRUN,
    "het-group": _OF_SRUN,
    "kill-on-bad-exit": _OF_SRUN,
    "overlap": _OF_SRUN,
}
"""Options that no plan's job can have, and why."""

_ALLOWED_VALUES = {
    "gpu-bind": (re.compile("none"), "none, as the one task of a node hands all of its GPUs to the ranks"),
    "signal": (
        re.compile(r"(R?B|BR):((SIG)?TERM|15)(@\d+)?"),
        "B:TERM@SECONDS, as the batch script waits for that signal",
    ),
}
"""Options that may have some values only: these, and how a message says them."""

_PER_NODE = ("gpus-per-node", "gpus-per-task", "gres", "tres-per-node", "tres-per-task")
_PER_SOCKET = ("gpus-per-socket", "tres-per-socket")
_PER_JOB = ("gpus", "tres-per-job")
"""Options that may ask for GPUs, by what a number counts for; each node has one task."""

_CHOOSE_NODES = ("partition", "constraint", "nodelist", "nodefile", "exclude", "reservation", "clusters")

_SAME_SETTING = {"oversubscribe": "exclusive", "no-requeue": "requeue"}
"""Options of which the last one counts, as of a single option that is given twice."""

_OF_THE_SCRIPT = ("signal", "requeue", "output", "error", "open-mode")
"""Settings of the batch script, which runs on the first component, whichever node type that is."""

_READ_HERE = (
    *_REFUSED,
    *_ALLOWED_VALUES,
    *_PER_NODE,
    *_PER_SOCKET,
    *_PER_JOB,
    *_CHOOSE_NODES,
    *_SAME_SETTING,
    *_SAME_SETTING.values(),
    *("array", "sockets-per-node"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SbatchOption:
    """An option as a user gave it.

    given: the whole word, for messages.
    node_type: whose component it is for; empty for all.
    value: ``None`` for an option without one.
    """

    given: str
    node_type: str
    name: str
    value: str | None

    @property
    def setting(self) -> str:
        """What it sets, the same for options that overrule each other."""
        return _SAME_SETTING.get(self.name, self.name)

    @property
    def words(self) -> str:
        """The option as ``sbatch`` takes it, without its dashes."""
        return self.name if self.value is None else f"{self.name}={self.value}"


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRequest:
    """GPUs that an option asks for on each node.

    gpu_type: Slurm's name for them; empty if any will do.
    says_each_node: ``False`` of an option for the whole job, whose GPUs Slurm spreads unevenly.
    """

    gpu_type: str
    per_node: int
    says_each_node: bool = True

    @property
    def words(self) -> str:
        """The option that asks for the same on each node."""
        return f"gpus-per-node={self.gpu_type}{':' * bool(self.gpu_type)}{self.per_node}"


def read_options(given: Iterable[str], node_types: Sequence[NodeType]) -> tuple[SbatchOption, ...]:
    """Return the options, checked as far as each goes by itself.

    Args:
        given: ``account=me`` for all components, ``fast:constraint=a100`` for that of a node type.

    Raises:
        ConfigError: an option for a node type that the cluster does not have, what is no long option, or an option that
            contradicts the plan.
    """
    options, known = tuple(map(_read_option, given)), [node_type.name for node_type in node_types]
    for option in options:
        _check_node_type(option, known)
        if option.name == "array" and len(node_types) > 1:
            raise ConfigError(
                f"--sbatch-option {option.given}: Slurm has no arrays of heterogeneous jobs, and the plan has "
                f"{len(node_types)} node types; submit the script several times (--dependency=singleton)"
            )
        if option.node_type and option.setting in _OF_THE_SCRIPT and len(node_types) > 1:
            raise ConfigError(
                f"--sbatch-option {option.given}: {option.name} is of the batch script, which all node types share; "
                f"give it as {option.words}"
            )
    return options


def node_type_of(given: str) -> str:
    """Return the node type that an option is for, empty for all of them."""
    return given.partition("=")[0].rpartition(":")[0]


def options_of(node_type: NodeType, options: Sequence[SbatchOption]) -> dict[str, SbatchOption]:
    """Return the options of a node type by what they set: its own overrule those for all, later ones earlier ones.

    GPUs may be asked for by several options; one of the node type's own overrules the GPUs of all of those for all
    types, and leaves what else these ask for.
    """
    own = [option for option in options if option.node_type == node_type.name]
    for_all = [option for option in options if not option.node_type]
    if any(map(_gpu_counts, own)):
        for_all = [rest for option in for_all if (rest := _without_gpus(option)) is not None]
    return {option.setting: option for option in [*for_all, *own]}


def gpu_requests(node_type: NodeType, options: Mapping[str, SbatchOption], *, needed: int) -> list[GpuRequest]:
    """Return what the options of a node type ask for in GPUs.

    Args:
        options: those of the node type.
        needed: GPUs that the plan uses on each node.

    Raises:
        ConfigError: fewer than ``needed``, or a number that does not say how many a node gets.
    """
    requests = []
    for option in options.values():
        if not (counts := _gpu_counts(option)):
            continue
        request = _request(node_type, option, counts, options.get("sockets-per-node"))
        if request.per_node < needed:
            raise ConfigError(
                f"--sbatch-option {option.given}: GPUs per node are {request.per_node}, the plan uses {needed} on "
                f"each node of {node_type.name!r}; ask for at least {needed}, or leave it out"
            )
        requests.append(request)
    return requests


def _read_option(given: str) -> SbatchOption:
    before, equals, value = given.partition("=")
    node_type, _, name = before.rpartition(":")
    if not _OPTION.fullmatch(name + equals + value):
        raise ConfigError(
            f"--sbatch-option {given}: must be a long option of sbatch without its dashes, such as TYPE:partition=NAME"
        )
    if name not in _READ_HERE and (full := [known for known in _READ_HERE if known.startswith(name)]):
        # sbatch takes abbreviations; what they mean depends on its version.
        raise ConfigError(f"--sbatch-option {given}: {name} is short for {' or '.join(sorted(full))}; write it in full")
    if name in _REFUSED:
        raise ConfigError(f"--sbatch-option {given}: {name} {_REFUSED[name]}; leave it out")
    if name in _ALLOWED_VALUES and not (allowed := _ALLOWED_VALUES[name])[0].fullmatch(value):
        raise ConfigError(f"--sbatch-option {given}: {name} must be {allowed[1]}")
    return SbatchOption(given=given, node_type=node_type, name=name, value=value if equals else None)


def _check_node_type(option: SbatchOption, known: list[str]) -> None:
    if option.node_type and option.node_type not in known:
        hint = near_match(option.node_type, known) or f" (known: {', '.join(known)})"
        raise ConfigError(f"--sbatch-option {option.given}: unknown node type {option.node_type!r}{hint}")


def _gpu_counts(option: SbatchOption) -> list[tuple[str, int]]:
    """Return pairs of a GPU type, empty for any, and a number; none if the option is not about GPUs.

    Raises:
        ConfigError: a number is none.
    """
    counts = []
    for entry in (option.value or "").split(","):
        if (words := _gpu_words(option, entry)) is None:
            continue
        # Slurm takes a type without a number for one of it.
        number = words.pop() if words and (words[-1].isdecimal() or len(words) > 1) else "1"
        if not number.isdecimal():
            raise ConfigError(
                f"--sbatch-option {option.given}: {number!r} is not a number of GPUs; write [TYPE:]NUMBER, such as "
                "a100:8"
            )
        counts.append((":".join(words), int(number)))
    return counts


def _gpu_words(option: SbatchOption, entry: str) -> list[str] | None:
    """Return what an entry of an option says of GPUs, a type and a number; ``None`` if it is about something else."""
    if option.name not in (*_PER_NODE, *_PER_SOCKET, *_PER_JOB):
        return None
    words = re.split("[:=]", re.sub("^gres[:/]", "", entry))
    if option.name.startswith("gpus"):
        return words
    return words[1:] if words[0] == "gpu" else None


def _without_gpus(option: SbatchOption) -> SbatchOption | None:
    """Return an option with what it asks for but GPUs; ``None`` if that is nothing."""
    if not _gpu_counts(option):
        return option
    rest = [entry for entry in (option.value or "").split(",") if _gpu_words(option, entry) is None]
    return replace(option, value=",".join(rest)) if rest else None


def _request(
    node_type: NodeType, option: SbatchOption, counts: list[tuple[str, int]], sockets: SbatchOption | None
) -> GpuRequest:
    gpu_type, total = counts[0][0] if len(counts) == 1 else "", sum(number for _, number in counts)
    if option.name in _PER_NODE:
        return GpuRequest(gpu_type=gpu_type, per_node=total)
    if option.name in _PER_SOCKET:
        if sockets is None or not (sockets.value or "").isdecimal():
            raise ConfigError(
                f"--sbatch-option {option.given}: a number of GPUs per socket needs sockets-per-node=NUMBER as well; "
                "gpus-per-node needs no other option"
            )
        return GpuRequest(gpu_type=gpu_type, per_node=total * int(sockets.value or 0))
    if len(counts) > 1 or total % node_type.count:
        raise ConfigError(
            f"--sbatch-option {option.given}: asks for {total} GPUs on {node_type.count} nodes of "
            f"{node_type.name!r} together, which does not say what each node gets; use gpus-per-node"
        )
    return GpuRequest(gpu_type=gpu_type, per_node=total // node_type.count, says_each_node=False)
