"""Says how CUDA and torch are to start on a rank, and sets what its user has not: the defaults of some variables.

They are read once, while libraries are loaded or the driver starts, so an entry point calls
:func:`set_cuda_environment` before anybody imports torch. ``docs/install.md`` has the sources.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

from hetero.listening import is_loopback
from hetero.plan.communicators import HARDWARE_QUEUES


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentDefault:
    """A variable that is set unless its user has set it, or one of ``aliases`` that says the same."""

    name: str
    value: str
    why: str
    aliases: tuple[str, ...] = ()

    def given(self, environment: Mapping[str, str]) -> str | None:
        """The name under which ``environment`` has it, ``None`` if it has not."""
        return next((name for name in (self.name, *self.aliases) if name in environment), None)


CUDA_DEFAULTS = (
    EnvironmentDefault(
        name="CUDA_DEVICE_MAX_CONNECTIONS",
        value=str(HARDWARE_QUEUES),
        why=(
            "streams that share a work queue wait for one another: behind a receive that has not been matched, compute "
            "would stand still"
        ),
    ),
    EnvironmentDefault(
        name="PYTORCH_ALLOC_CONF",
        value="expandable_segments:True",
        why="stages hold activations of unlike sizes, and fixed segments of memory are left with holes",
        aliases=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    EnvironmentDefault(
        name="TORCHINDUCTOR_COMPILE_THREADS",
        value="1",
        why=(
            "torch's compiler would start a process for each core on every rank, up to 32, and the few fused functions "
            "of megatron-core are compiled one after the other"
        ),
    ),
)
"""Only what is right on every host; which network a host is to use it has to be told (``docs/install.md``)."""

_LEAVES_ROOM = "kernels of several ranks wait for one another on one device, so each has to leave room for the others"

SHARED_DEVICE_DEFAULTS = (
    EnvironmentDefault(
        name="NCCL_MULTI_RANK_GPU_ENABLE", value="1", why="NCCL refuses several ranks on one device without it"
    ),
    EnvironmentDefault(name="NCCL_MIN_CTAS", value="1", why=_LEAVES_ROOM),
    EnvironmentDefault(name="NCCL_MAX_CTAS", value="2", why=_LEAVES_ROOM),
    EnvironmentDefault(name="NCCL_NVLS_ENABLE", value="0", why="multicast through NVSwitch is between devices"),
)
"""What else is set where ranks share devices (:mod:`hetero.distributed.shared_devices`)."""


ONE_HOST_DEFAULTS = (
    EnvironmentDefault(
        name="GLOO_SOCKET_IFNAME",
        value="lo",
        why=(
            "gloo would listen on the address of the host's name, for other machines as well; where /etc/hosts gives "
            "that name to 127.0.1.1, as on Debian, gloo takes it for an address that others reach"
        ),
    ),
    EnvironmentDefault(
        name="NCCL_SOCKET_IFNAME",
        value="lo",
        why="NCCL would listen on the first other interface",
        aliases=("NCCL_COMM_ID",),
    ),
)
"""What else is set where all ranks are on one host: their sockets are not for other machines."""


def set_one_host_environment(environment: MutableMapping[str, str]) -> None:
    """Set :data:`ONE_HOST_DEFAULTS` if all ranks of the launch are on this host; what a user has set stays.

    gloo and NCCL read them at their first group.
    """
    if is_on_one_host(environment) or is_loopback(environment.get("MASTER_ADDR", "")):
        _set_defaults(environment, ONE_HOST_DEFAULTS)


def set_cuda_environment(environment: MutableMapping[str, str], *, shares_devices: bool = False) -> None:
    """Set those of :data:`CUDA_DEFAULTS` that ``environment`` does not have; what a user has set stays.

    Without CUDA nobody reads them.

    Args:
        shares_devices: set those of :data:`SHARED_DEVICE_DEFAULTS` too. NCCL reads them at its first group.
    """
    _set_defaults(environment, CUDA_DEFAULTS + SHARED_DEVICE_DEFAULTS * shares_devices)


def _set_defaults(environment: MutableMapping[str, str], defaults: Iterable[EnvironmentDefault]) -> None:
    for default in defaults:
        if default.given(environment) is None:
            environment[default.name] = default.value


def local_place(environment: Mapping[str, str]) -> tuple[int, int]:
    """Which of how many ranks of its host this process is, as torchrun says; the only one if nobody does."""
    count = environment.get("LOCAL_WORLD_SIZE", "")
    return int(environment.get("LOCAL_RANK", "0")), int(count) if count.isdecimal() and int(count) > 0 else 1


def is_on_one_host(environment: Mapping[str, str]) -> bool:
    """Return whether all ranks of the launch are on this host; so is a process without a launcher."""
    return environment.get("WORLD_SIZE", "1") == environment.get("LOCAL_WORLD_SIZE", "1")


def describe_cuda_environment(environment: Mapping[str, str]) -> str:
    """What CUDA, torch and NCCL are told, for the log: the values that this project chose, then those of the user."""
    chosen: list[str] = []
    users: list[str] = []
    for default in CUDA_DEFAULTS + SHARED_DEVICE_DEFAULTS:
        name = default.given(environment)
        if name is not None:
            (chosen if environment[name] == default.value else users).append(name)
    names = {name for default in CUDA_DEFAULTS + SHARED_DEVICE_DEFAULTS for name in (default.name, *default.aliases)}
    users += sorted(name for name in environment if name.startswith(("NCCL_", "TORCH_NCCL_")) and name not in names)
    users += [name for name in ("CUDA_MODULE_LOADING", "GLOO_SOCKET_IFNAME") if name in environment]
    parts = ((chosen, "default"), (users, "yours"))
    return "; ".join(
        f"{whose}: {', '.join(f'{name}={environment[name]}' for name in each)}" for each, whose in parts if each
    )
