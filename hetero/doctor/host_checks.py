"""Checks one host: what follows from its facts alone, line by line, with what to do."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator

from packaging.version import Version

from hetero.data.tried_versions import shipped_versions
from hetero.distributed.environment import CUDA_DEFAULTS
from hetero.distributed.kernel_architectures import has_kernels
from hetero.doctor.facts import GpuFacts, HostFacts, NetworkInterface
from hetero.doctor.findings import Finding, Severity
from hetero.doctor.installed_files import MEGATRON, OWN, reinstall_megatron_core
from hetero.doctor.listening_checks import check_listening
from hetero.extras import pip_install
from hetero.spec.devices import is_short_of_memory
from hetero.spec.shipped_devices import SHIPPED_DEVICES
from hetero.units import GIB, MIB

OLDEST_PYTHON = (3, 11, 1)

TURING = (7, 5)
"""The oldest compute capability that CUDA 13 has."""

TRANSFORMER_ENGINE = "transformer-engine"

TRANSFORMER_ENGINES = ">=2.9"
"""The versions of TransformerEngine that the extra of this package accepts (setup.py)."""

MAX_NAMED_FILES = 3
"""Changed files that a line names; the rest are counted."""

LEAST_SHARED_MEMORY_BYTES = GIB
"""Heuristic: NCCL shares buffers of some MiB per pair of ranks there, and workers that load data their batches."""

LEAST_LOCKED_MEMORY_BYTES = GIB
"""Heuristic: over InfiniBand, NCCL pins the buffers of every connection; clusters take the limit away."""

LEAST_OPEN_FILES = 4096
"""Heuristic: every connection is a file, and each rank has some with each other of its groups."""


def check_system(facts: HostFacts) -> Iterator[Finding]:
    """Operating system and Python."""
    on_linux = facts.os.startswith("Linux")
    yield _finding(
        "operating system",
        facts.os,
        problem=None if on_linux else "NCCL and gloo's failure detection are used on Linux only; train there",
    )
    yield _finding(
        "Python",
        facts.python,
        problem=None
        if Version(facts.python).release >= OLDEST_PYTHON
        else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer and make the environment with it",
    )


def check_torch(facts: HostFacts) -> Iterator[Finding]:
    """torch, megatron-core and what else the extra for training brings."""
    torch = facts.torch
    if torch is None:
        found = f"cannot be imported: {facts.torch_error}" if facts.torch_error else "not installed"
        yield Finding(severity="problem", subject="torch", found=found, todo=_install_torch(facts))
    elif torch.cuda is None and facts.has_nvidia:
        yield Finding(
            severity="problem",
            subject="torch",
            found=f"{torch.version}, built without CUDA, but this host has an NVIDIA driver",
            todo=_install_torch(facts),
        )
    else:
        built = f"CUDA {torch.cuda}" if torch.cuda else "without CUDA: it trains on the processor"
        yield Finding(severity="ok", subject="torch", found=f"{torch.version}, {built}")
    for name in (MEGATRON, "safetensors"):
        installed = facts.packages.get(name)
        yield _finding(
            name, installed or "not installed", problem=None if installed else f"run: {pip_install('train')}"
        )


def check_versions_together(facts: HostFacts) -> Iterator[Finding]:
    """Whether this combination of versions was tried, and whether packages accept one another."""
    subject = "versions together"
    if (installed := facts.installed) is not None:
        verdict = shipped_versions().judge(installed, on_gpu=bool(facts.gpus))
        said = f"{verdict.kind}: {installed}: {verdict.said}"
        if verdict.kind == "known to break":
            yield Finding(severity="problem", subject=subject, found=said, todo=verdict.fix)
        elif verdict.kind == "not tried":
            todo = f"if it fails, try the nearest: {verdict.fix}"
            yield Finding(severity="warning", subject=subject, found=said, todo=todo)
        else:
            yield Finding(severity="ok", subject=subject, found=said)
    for unmet in facts.unmet:
        if facts.old_copies and unmet.asked_by.startswith(OWN):
            # What the old copy asks for.
            continue
        yield Finding(
            severity="problem",
            subject=unmet.package,
            found=f"{unmet.installed}, but {unmet.asked_by} accepts {unmet.accepted}",
            todo=_install_transformer_engine(facts)
            if unmet.package == TRANSFORMER_ENGINE
            else f"run: pip install '{unmet.package}{unmet.accepted}'",
        )


def check_files(facts: HostFacts) -> Iterator[Finding]:
    """No old copy of this package is found, and the files of megatron-core are those of its wheel."""
    for copy in facts.old_copies:
        yield Finding(severity="problem", subject=OWN, found=copy.said, todo=copy.fix)
    if facts.changed_files:
        named = ", ".join(facts.changed_files[:MAX_NAMED_FILES])
        more = len(facts.changed_files) - MAX_NAMED_FILES
        # The harness imports megatron/core; megatron/training is for Megatron-LM's own scripts.
        in_core = any(name.startswith("megatron/core/") for name in facts.changed_files)
        yield Finding(
            severity="problem" if in_core else "warning",
            subject="files of megatron-core",
            found=f"missing or changed since they were installed: {named}{f' and {more} more' if more > 0 else ''}",
            todo=f"run: {reinstall_megatron_core(facts.packages[MEGATRON])}",
        )


def check_driver(facts: HostFacts) -> Iterator[Finding]:
    """The NVIDIA driver is there, and new enough for the CUDA that torch is built for."""
    torch = facts.torch
    if facts.driver is None and not facts.gpus:
        if torch is not None and torch.cuda is not None:
            yield Finding(
                severity="problem",
                subject="driver",
                found="no NVIDIA driver, but torch is built for CUDA",
                todo="install the driver, or start the container with its GPUs (docker run --gpus all)",
            )
        else:
            yield Finding(severity="ok", subject="driver", found="no NVIDIA driver: a host without GPUs")
        return
    said = f"{facts.driver or 'unknown version'}, runs CUDA up to {facts.driver_cuda or 'unknown'}"
    problem = None
    if torch is not None and torch.cuda is not None and facts.driver_cuda is not None:
        needed = int(torch.cuda.split(".")[0])
        if int(facts.driver_cuda.split(".")[0]) < needed:
            least = {12: "525", 13: "580"}.get(needed, "a newer one")
            problem = f"torch is built for CUDA {torch.cuda}: install driver {least} or newer, or a wheel of older CUDA"
    yield _finding("driver", said, problem=problem)
    if torch is not None and torch.cuda is not None and not torch.gpus:
        yield Finding(
            severity="problem",
            subject="GPUs",
            found="torch sees none",
            todo="look at CUDA_VISIBLE_DEVICES, at nvidia-smi, and whether the container was given them",
        )


def check_gpus(facts: HostFacts) -> Iterator[Finding]:
    """Every device is in the catalogue, is what that says of it, and has kernels in this torch."""
    torch = facts.torch
    # Where each of them sits is no difference here.
    alike = Counter(dataclasses.replace(gpu, numa_node=None, pci_address=None) for gpu in facts.gpus)
    for gpu, count in alike.items():
        yield _gpu_finding(gpu, count)
        assert torch is not None, "only torch sees devices"
        if not has_kernels(torch.architectures, gpu.compute_capability):
            yield Finding(
                severity="problem",
                subject=f"kernels for {gpu.name}",
                found=f"torch {torch.version} is built for {' '.join(torch.architectures)}, not for {_sm(gpu)}",
                todo=_wheel_for(gpu.compute_capability),
            )


def check_nccl(facts: HostFacts) -> Iterator[Finding]:
    """The version that is loaded; that all hosts have the same one is checked where they meet."""
    torch = facts.torch
    if torch is None or torch.cuda is None:
        return
    yield _finding(
        "NCCL",
        torch.nccl or "none was loaded",
        problem=None if torch.nccl else "install a torch wheel for CUDA, which brings it",
    )


def check_cudnn(facts: HostFacts) -> Iterator[Finding]:
    """The version that torch's calls reach is one that torch runs on."""
    torch = facts.torch
    if torch is None or torch.cuda is None or torch.cudnn is None:
        return
    where = ", ".join(torch.cudnn.folders)
    yield _finding(
        "cuDNN",
        f"{torch.cudnn}, from {where}" if where else str(torch.cudnn),
        problem=None if torch.cudnn.fit else torch.cudnn.fix(torch.cuda),
    )


def check_transformer_engine(facts: HostFacts) -> Iterator[Finding]:
    """TransformerEngine is there where the devices have it, with libraries for torch's CUDA."""
    installed = facts.packages.get(TRANSFORMER_ENGINE)
    can = any(gpu.compute_capability >= (8, 0) for gpu in facts.gpus)
    if installed is None:
        if can:
            yield Finding(
                severity="warning",
                subject="TransformerEngine",
                found="not installed: its layers, its fused attention and fp8 are not used",
                todo=f"run: {_install_transformer_engine(facts)} (docs/install.md says what it needs to build)",
            )
        elif facts.gpus:
            yield Finding(
                severity="ok",
                subject="TransformerEngine",
                found="not installed, and these devices do not run it: local layers are used",
            )
        return
    yield _finding("TransformerEngine", installed, problem=_other_cuda_of_transformer_engine(facts))


def _other_cuda_of_transformer_engine(facts: HostFacts) -> str | None:
    """What to do if its libraries are those of another CUDA than torch's."""
    if facts.torch is None or facts.torch.cuda is None:
        return None
    major = facts.torch.cuda.split(".")[0]
    others = [name for name in facts.packages if re.fullmatch(r"transformer-engine-cu\d+", name)]
    if not others or f"transformer-engine-cu{major}" in others:
        return None
    return (
        f"{', '.join(others)} is for another CUDA than torch's {facts.torch.cuda}; run: pip uninstall -y "
        f"{' '.join(others)}; {_install_transformer_engine(facts)}"
    )


def check_extensions(facts: HostFacts) -> Iterator[Finding]:
    """Say whether apex and flash-attn are installed, of which neither has to be there."""
    if not facts.gpus:
        return
    if "apex" in facts.modules:
        fused = "fused_weight_gradient_mlp_cuda" in facts.modules
        found = "installed, with" if fused else "installed, without"
        yield Finding(severity="ok", subject="apex", found=f"{found} fused_weight_gradient_mlp_cuda")
    else:
        yield Finding(
            severity="ok",
            subject="apex",
            found="not installed; torch's products add weight gradients without it",
        )
    if "flash-attn" in facts.packages:
        yield Finding(severity="ok", subject="flash-attn", found=facts.packages["flash-attn"])
    else:
        yield Finding(
            severity="ok",
            subject="flash-attn",
            found="not installed; cuDNN's fused attention and torch's serve without it",
        )


def check_variables(facts: HostFacts) -> Iterator[Finding]:
    """What CUDA, torch, NCCL and gloo are told, and what they should be."""
    environment = facts.environment
    if facts.gpus:
        for default in CUDA_DEFAULTS:
            name = default.given(environment)
            if name is None or environment[name] == default.value:
                yield Finding(severity="ok", subject=default.name, found=f"{default.value}, by default")
            else:
                yield Finding(
                    severity="warning",
                    subject=name,
                    found=f"{environment[name]}, where the default is {default.value}",
                    todo=f"unset it unless you know better: {default.why}",
                )
    if "OMP_NUM_THREADS" not in environment and int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
        yield Finding(
            severity="warning",
            subject="OMP_NUM_THREADS",
            found=f"not set, so each rank starts {facts.cpus} threads",
            todo="set it to the cores of a rank, or to 1; torchrun sets 1",
        )
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
        if environment.get(name, "0") not in ("", "0"):
            yield Finding(
                severity="warning",
                subject=name,
                found=f"{environment[name]}: a transport is switched off",
                todo="unset it, unless that transport is broken here; it is for finding faults",
            )


def check_limits(facts: HostFacts) -> Iterator[Finding]:
    """What the system lets a process pin, share and open."""
    locked = facts.locked_memory_bytes
    uses_rdma = bool(facts.infiniband) and bool(facts.gpus)
    too_little = locked is not None and locked < LEAST_LOCKED_MEMORY_BYTES
    yield _finding(
        "ulimit -l (pinned memory)",
        _bytes(locked),
        problem="make it unlimited (/etc/security/limits.conf, docker run --ulimit memlock=-1, slurmd's LimitMEMLOCK)"
        if too_little and uses_rdma
        else None,
    )
    shared = facts.shared_memory_bytes
    yield _finding(
        "/dev/shm",
        _bytes(shared) if shared is not None else "not there",
        warning="make it larger (docker run --shm-size=16g or --ipc=host): NCCL and data workers share memory there"
        if shared is None or shared < LEAST_SHARED_MEMORY_BYTES
        else None,
    )
    files = facts.open_files
    yield _finding(
        "ulimit -n (open files)",
        "unlimited" if files is None else str(files),
        warning="raise it (ulimit -n 65536): every connection to another rank is a file"
        if files is not None and files < LEAST_OPEN_FILES
        else None,
    )


def check_numa(facts: HostFacts) -> Iterator[Finding]:
    """Whether a rank stays on the processors that are near its device."""
    found = f"{facts.numa_nodes} node{'s' if facts.numa_nodes > 1 else ''}, {facts.cpus} of {facts.all_cpus} processors"
    is_bound = facts.cpus < facts.all_cpus
    is_rank = "LOCAL_RANK" in facts.environment
    yield _finding(
        "NUMA",
        found,
        warning="bind each rank to its device's node: torchrun --numa-binding node (with numactl installed)"
        if facts.numa_nodes > 1 and facts.gpus and is_rank and not is_bound
        else None,
    )


def check_network(facts: HostFacts) -> Iterator[Finding]:
    """Over which network ranks of several hosts would talk, and whether anybody said so."""
    environment = facts.environment
    if facts.infiniband:
        ports = ", ".join(f"{each.device}:{each.port} {each.state} {each.rate}" for each in facts.infiniband)
        down = [each for each in facts.infiniband if "ACTIVE" not in each.state]
        todo = "bring the port up, or leave it out of NCCL_IB_HCA"
        yield _finding("InfiniBand and RoCE", ports, warning=todo if down else None)
    elif facts.gpus:
        yield Finding(severity="ok", subject="InfiniBand and RoCE", found="none: NCCL takes sockets between hosts")
    physical = [each for each in facts.interfaces if each.is_physical and each.address]
    said = ", ".join(_interface(each) for each in facts.interfaces) or "none but the loopback"
    several = facts.num_hosts > 1
    if facts.gpus and "NCCL_SOCKET_IFNAME" not in environment and len(physical) > 1 and several:
        names = " or ".join(each.name for each in physical)
        yield Finding(
            severity="warning",
            subject="network",
            found=f"{said}; NCCL_SOCKET_IFNAME is not set",
            todo=f"set it on each host to the interface that the others reach ({names}), and GLOO_SOCKET_IFNAME too",
        )
    else:
        yield Finding(severity="ok", subject="network", found=said)
    if several and "GLOO_SOCKET_IFNAME" not in environment and (facts.address or "127.").startswith("127."):
        yield Finding(
            severity="problem",
            subject="host name",
            found=f"{facts.host} resolves to {facts.address or 'nothing'}, so gloo would listen where no other host is",
            todo="set GLOO_SOCKET_IFNAME to the interface that the others reach, or mend /etc/hosts",
        )


HOST_CHECKS: tuple[Callable[[HostFacts], Iterator[Finding]], ...] = (
    check_system,
    check_driver,
    check_torch,
    check_files,
    check_versions_together,
    check_gpus,
    check_nccl,
    check_cudnn,
    check_transformer_engine,
    check_extensions,
    check_variables,
    check_limits,
    check_numa,
    check_network,
    check_listening,
)


def check_host(facts: HostFacts) -> tuple[Finding, ...]:
    """The whole checklist of a host, in order."""
    return tuple(finding for check in HOST_CHECKS for finding in check(facts))


def _finding(subject: str, found: str, *, problem: str | None = None, warning: str | None = None) -> Finding:
    """A problem or a warning if it is said what to do about one."""
    severity: Severity = "problem" if problem else "warning" if warning else "ok"
    return Finding(severity=severity, subject=subject, found=found, todo=problem or warning or "")


def _gpu_finding(gpu: GpuFacts, count: int) -> Finding:
    """Hold a device against the catalogue."""
    said = f"{count} x {gpu.name}, {_sm(gpu)}, {gpu.memory_bytes / GIB:.1f} GiB"
    known = SHIPPED_DEVICES.called(gpu.name)
    if known is None:
        todo = "describe it in the cluster file by its data sheet; plans cannot name it as it is"
        return Finding(severity="warning", subject="GPUs", found=f"{said}: not in the catalogue", todo=todo)
    if known.compute_capability != gpu.compute_capability:
        todo = f"plan for another device than {known.name}: that has another architecture"
        return Finding(severity="problem", subject="GPUs", found=f"{said}: taken for {known.name}", todo=todo)
    if known.memory_gib is not None and is_short_of_memory(gpu.memory_bytes, known.memory_gib):
        todo = f"plans count on {known.memory_gib} GiB of a {known.name}: is it a part of one (MIG), or a smaller card?"
        return Finding(severity="warning", subject="GPUs", found=said, todo=todo)
    return Finding(severity="ok", subject="GPUs", found=f"{said}: {known.name}")


def _install_torch(facts: HostFacts) -> str:
    if not facts.has_nvidia:
        return f"run: {pip_install('train')}"
    capabilities = [gpu.compute_capability for gpu in facts.gpus]
    return _wheel_for(min(capabilities, default=TURING))


def _wheel_for(capability: tuple[int, int]) -> str:
    """How to install a torch that has kernels for a device (``docs/install.md`` has the table)."""
    if capability < TURING:
        return "install the wheel of CUDA 12.6, before torch 2.15: pip install torch --index-url https://download.pytorch.org/whl/cu126"
    return "install the wheel of CUDA 13: pip install torch --index-url https://download.pytorch.org/whl/cu130"


def _install_transformer_engine(facts: HostFacts) -> str:
    """For the CUDA of the installed torch, in a version that this package accepts."""
    cuda = facts.torch.cuda if facts.torch is not None else None
    major = cuda.split(".")[0] if cuda else "13"
    return f"pip install --no-build-isolation 'transformer_engine[pytorch,core_cu{major}]{TRANSFORMER_ENGINES}'"


def _sm(gpu: GpuFacts) -> str:
    major, minor = gpu.compute_capability
    return f"sm_{major}{minor}"


def _interface(each: NetworkInterface) -> str:
    speed = f" {each.speed_mbit_per_s / 1000:g} Gbit/s" if each.speed_mbit_per_s else ""
    return f"{each.name} {each.address or 'without an address'}{speed}"


def _bytes(amount: int | None) -> str:
    if amount is None:
        return "unlimited"
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount / MIB:g} MiB"
