"""Checks, as soon as the ranks can talk, that their software fits together and has kernels for their devices.

Hosts with devices of several generations have several builds of torch: CUDA 13 has no kernels for Volta, so a V100
needs a build with CUDA 12.6, which is made up to torch 2.14 (pytorch/pytorch issues 172352 and 190385). Builds of one
version for several versions of CUDA work together as long as they bring one version of NCCL: NCCL refuses to connect
two versions (``ncclInvalidUsage``, "Mismatched NCCL version" in its ``init.cc``), when the first group is made.
"""

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hetero.distributed.cudnn_library import CudnnVersions, loaded_libraries
from hetero.distributed.kernel_architectures import has_kernels
from hetero.distributed.nccl_library import loaded_nccl_version
from hetero.distributed.rank_consensus import ConsensusError
from hetero.errors import ConfigError
from hetero.installed_versions import DISTRIBUTIONS, InstalledVersions, combination_of, versions_of
from hetero.text import number_ranges
from hetero.version import VERSION

try:
    from torch._C import _cudnn
except ImportError:
    # torch is built without it.
    _cudnn = None  # type: ignore[assignment]  # as torch/backends/cudnn has it

MUST_AGREE = {
    "hetero": ("megatron-hetero", "install one version of it on all hosts"),
    "torch": ("torch", "install one version of it on all hosts; builds for several versions of CUDA may differ"),
    "megatron_core": ("megatron-core", "install one version of it on all hosts"),
    "nccl": (
        "NCCL",
        "it does not connect two versions: install one on all hosts, by pip install --no-deps nvidia-nccl-cu12==V "
        "beside a torch with CUDA 12 and nvidia-nccl-cu13==V beside one with CUDA 13",
    ),
}
"""By field of :class:`RuntimeVersions`, its name and what to do where ranks differ."""

VOLTA = (7, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeVersions(InstalledVersions):
    """What a rank runs on.

    torch_build: what follows the version of torch: ``cu126`` of ``2.13.0+cu126``.
    nccl: of the library that torch loaded; ``none`` on the host CPU.
    cudnn_note: what is wrong with cuDNN there, and what to do; empty if nothing is.
    """

    hetero: str
    torch_build: str
    nccl: str
    cudnn_note: str = ""


def runtime_versions(device: torch.device) -> RuntimeVersions:
    """What this rank runs on."""
    _, _, build = torch.__version__.partition("+")
    nccl = "none"
    if device.type == "cuda":
        # A torch that has NCCL built in, as that of ROCm has RCCL, loads none.
        built_in = torch.cuda.nccl.version()  # noqa: TID251
        nccl = loaded_nccl_version() or ("RCCL " if torch.version.hip else "") + ".".join(map(str, built_in))
    packages = versions_of(DISTRIBUTIONS.values())
    installed = combination_of(platform.python_version(), packages | {"torch": torch.__version__})
    assert installed is not None, "both are imported by now"
    return RuntimeVersions(
        **dataclasses.asdict(installed),
        hetero=VERSION,
        torch_build=build or "no build named",
        nccl=nccl,
        cudnn_note=cudnn_note(cudnn_versions()) if device.type == "cuda" else "",
    )


def cudnn_versions() -> CudnnVersions | None:
    """Return the versions of cuDNN that this process has, ``None`` where torch is built without it.

    ``torch.backends.cudnn.version()`` raises where they do not fit together.
    """
    if _cudnn is None or not _cudnn.is_cuda:
        return None
    # Asked first: it loads what is not loaded yet.
    loaded, built = (".".join(map(str, ask())) for ask in (_cudnn.getRuntimeVersion, _cudnn.getCompileVersion))
    folders = tuple(dict.fromkeys(str(path.parent) for path in loaded_libraries()))
    return CudnnVersions(loaded=loaded, built=built, folders=folders)


def cudnn_note(versions: CudnnVersions | None) -> str:
    """Return a line on a cuDNN that does not fit this process's torch; empty if it does."""
    if versions is None or versions.fit or torch.version.cuda is None:
        return ""
    return f"cuDNN {versions}: {', '.join(versions.folders)}; {versions.fix(torch.version.cuda)}"


def check_kernels(device: torch.device) -> None:
    """Checks that this rank's torch has kernels for its GPU. Launches nothing on it.

    Raises:
        ConfigError: it has none.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return
    built_for = torch.cuda.get_arch_list()
    capability = torch.cuda.get_device_capability(device)
    if has_kernels(built_for, capability):
        return
    name, said = torch.cuda.get_device_name(device), "{}.{}".format(*capability)
    fix = "install a build that has them, see https://pytorch.org/get-started/locally"
    if capability <= VOLTA:
        fix = (
            "CUDA 13 and torch's builds with CUDA 12.8 have none for Volta and older: on this host install torch 2.14 "
            "or older with CUDA 12.6 (pip install torch --index-url https://download.pytorch.org/whl/cu126), and the "
            "same version of torch and of NCCL on all others"
        )
    raise ConfigError(
        f"{name} has compute capability {said}, and torch {torch.__version__} has kernels for {' '.join(built_for)} "
        f"only; {fix}"
    )


def check_versions(device: torch.device) -> tuple[RuntimeVersions, ...]:
    """Checks that all ranks run one version of everything that has to be the same everywhere; returns those of all.

    Collective over the world (all-gather of short objects, by gloo). Comes before any other group is made.

    Raises:
        ConsensusError: some ranks have another version than rank 0; the same message on every rank.
    """
    own = runtime_versions(device)
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if said := difference_of(every):
        raise ConsensusError(said)
    return tuple(every)


def cudnn_warnings(by_rank: Sequence[RuntimeVersions]) -> list[str]:
    """Return a line for each cuDNN of a launch that does not fit its torch, with the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(by_rank):
        if each.cudnn_note:
            ranks_of.setdefault(each.cudnn_note, []).append(rank)
    return [f"ranks {number_ranges(ranks)}: {note}" for note, ranks in ranks_of.items()]


def difference_of(every: Sequence[RuntimeVersions]) -> str:
    """What differs among the ranks that may not, with the ranks and the fix; empty if nothing does."""
    for field, (what, fix) in MUST_AGREE.items():
        if len({getattr(each, field) for each in every}) == 1:
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank, each in enumerate(every):
            brought_by = f" (torch {each.torch}, {each.torch_build})" if field == "nccl" else ""
            ranks_of.setdefault(getattr(each, field) + brought_by, []).append(rank)
        listed = ", ".join(f"{version} on ranks {number_ranges(ranks)}" for version, ranks in ranks_of.items())
        return f"the ranks run different versions of {what}: {listed}; {fix}"
    return ""
