"""Control groups with a quota of processor time, of either version: processes with unequal shares of a core.

Needs root and a writable ``cpu`` controller. The groups go with the context manager, whatever happens.
"""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero.units import US_PER_S

PERIOD_S = 0.01
"""In each the quota is spent anew. A tenth of the kernel's default: what a process computes right after it has waited,
before it is held up for the first time, should be little beside the pass of a layer."""

_SHARES = 8192
"""Weight against other processes of the machine, eight times the default: the quota is to be the only limit."""

_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")

_EMPTIES_WITHIN_S = 10.0

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Quota:
    """A group whose processes together have ``cores`` of processor time."""

    folder: Path
    cores: float

    @property
    def members(self) -> Path:
        """The file that takes the id of a process, with all its threads."""
        return self.folder / "cgroup.procs"


def mechanism() -> str | None:
    """What limits a process here, in words; ``None`` if nothing does that this user may use."""
    try:
        with quotas([0.5]) as (one,):
            return "cpu.max of control groups" if _is_v2(one.folder) else "CFS quotas of control groups"
    except OSError:
        return None


@contextmanager
def quotas(cores: Sequence[float]) -> Iterator[list[Quota]]:
    """A group for each of ``cores``, without processes.

    Raises:
        OSError: this user may not, or the kernel has no such controller.
    """
    mounted = _V1 if (_V1 / "cpu.cfs_quota_us").exists() or (_V1 / "cpu.cfs_period_us").exists() else _V2
    if not mounted.is_dir() or not (mounted / "cgroup.procs").exists():
        raise FileNotFoundError(f"{mounted}: no controller of processor time is mounted")
    with ExitStack() as made:
        found = []
        for each in cores:
            folder = mounted / f"megatron-hetero-{os.getpid()}-{next(_numbers)}"
            folder.mkdir()
            made.callback(_remove, folder)
            _limit(folder, each)
            found.append(Quota(folder, each))
        yield found


def _is_v2(folder: Path) -> bool:
    return folder.parent == _V2


def _limit(folder: Path, cores: float) -> None:
    period_us = round(PERIOD_S * US_PER_S)
    quota_us = round(cores * period_us)
    if _is_v2(folder):
        written = {"cpu.max": f"{quota_us} {period_us}", "cpu.weight": str(100 * _SHARES // 1024)}
    else:
        written = {"cpu.cfs_period_us": f"{period_us}", "cpu.cfs_quota_us": f"{quota_us}", "cpu.shares": f"{_SHARES}"}
    for name, value in written.items():
        # Without the controller the file is not there, and none can be made.
        with (folder / name).open("r+") as file:
            file.write(value)


def _remove(folder: Path) -> None:
    """Its processes have ended, or are about to."""
    deadline = time.monotonic() + _EMPTIES_WITHIN_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
