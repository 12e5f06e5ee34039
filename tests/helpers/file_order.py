"""Orders test files so that those that wait run beside those that compute."""

from collections.abc import Sequence
from pathlib import PurePath

WAITING = (
    *("faults", "e2e/test_slurm_jobs.py", "elastic", "e2e/test_emulation.py", "dist/test_emulation.py"),
    "dist/test_failure_detector.py",
)
"""Folders and files below ``tests`` that are mostly asleep: until leases and heartbeats run out, until Slurm looks, at
the pace of a cluster that is not there. The longest come first."""

SHORT = ("unit", "gpu", "gpu_stages", "fuzz")
"""Folders of files that take seconds each: they come last, so that no worker is left alone with a long one."""


def in_order(files: Sequence[PurePath]) -> list[PurePath]:
    """``files``, relative to ``tests``: those that wait spread evenly among those that compute, then the short ones.

    Workers take a file each, from the front. With one worker more than cores, one of them waits and the others compute,
    about; in the order of the alphabet all would wait at a time and all compute at another.
    """
    waits = sorted((file for file in files if _place(file) is not None), key=lambda file: (_place(file), file))
    others = [file for file in files if _place(file) is None]
    short = [file for file in others if file.parts[0] in SHORT or len(file.parts) == 1]
    computes = [file for file in others if file not in short]
    spread = [(i / len(waits), file) for i, file in enumerate(waits)]
    spread += [((i + 0.5) / len(computes), file) for i, file in enumerate(computes)]
    return [file for _, file in sorted(spread)] + short


def _place(file: PurePath) -> int | None:
    """In ``WAITING``."""
    return next((i for i, each in enumerate(WAITING) if file.is_relative_to(each)), None)
