"""Chooses the device of a rank on its host, where several ranks may share one to try something out.

Ranks take one device each. With ``--hetero-share-devices`` of ``pretrain_gpt.py``, or ``--share-devices`` of
``hetero doctor`` and ``hetero profile run``, more ranks than devices are dealt out in turns: a plan of many ranks runs
on few devices. NCCL allows it from 2.30 on if it is asked to (``NCCL_MULTI_RANK_GPU_ENABLE``); earlier ones end with
"Duplicate GPU detected". Ranks on a device run in time slices, and each counts on all of its memory.
"""

from hetero.distributed.nccl_library import loaded_nccl_version
from hetero.errors import ConfigError

OLDEST_NCCL = (2, 30)
"""The first NCCL that lets ranks share a device."""


def index_of_device(local_rank: int, num_devices: int, *, shares_devices: bool) -> int | None:
    """Return the device of a rank among those of its host, ``None`` if there is none for it."""
    if shares_devices and num_devices > 0:
        return local_rank % num_devices
    return local_rank if local_rank < num_devices else None


def can_share_devices(nccl: str | None) -> bool:
    """Return whether that version of NCCL, such as ``2.29.7``, lets ranks share a device."""
    return nccl is not None and tuple(int(part) for part in nccl.split(".")[:2]) >= OLDEST_NCCL


def install_nccl(cuda: str | None) -> str:
    """Return the command that installs an NCCL that can, for a torch built with that ``cuda``."""
    major = cuda.split(".")[0] if cuda else "13"
    return f"pip install --no-deps 'nvidia-nccl-cu{major}>={'.'.join(map(str, OLDEST_NCCL))}'"


def check_nccl_of_shared_devices(*, flag: str, cuda: str | None) -> None:
    """Check that the loaded NCCL lets ranks share a device.

    Args:
        flag: what asks for it.
        cuda: the version that torch was built with.

    Raises:
        ConfigError: it does not.
    """
    found = loaded_nccl_version()
    if not can_share_devices(found):
        raise ConfigError(
            f"{flag} needs NCCL {'.'.join(map(str, OLDEST_NCCL))} or newer, {found or 'none'} is loaded; start one "
            f"process per device, or run: {install_nccl(cuda)}"
        )


def sharing_note(num_ranks: int, num_devices: int) -> str:
    """Return a line on a host whose ranks share devices; empty if each has its own."""
    if num_ranks <= num_devices:
        return ""
    return (
        f"{num_ranks} ranks share {num_devices} device{'s' * (num_devices > 1)}: times of this run mean nothing, and "
        "each rank counts on all of its device's memory"
    )
