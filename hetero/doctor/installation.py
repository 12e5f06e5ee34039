"""Checks, before torch is imported, that what is installed can train: no old copies, no versions known to break."""

from collections.abc import Mapping, Sequence

from hetero.data.tried_versions import shipped_versions
from hetero.doctor.installed_files import old_copies
from hetero.errors import ConfigError
from hetero.installed_versions import InstalledVersions, installed_versions
from hetero.text import numbered


def check_installation(environment: Mapping[str, str]) -> None:
    """Check this host's packages.

    Raises:
        ConfigError: there is an old copy of megatron-hetero, or this combination of versions is known to break; names
            the command that helps.
    """
    if copies := old_copies(environment):
        raise ConfigError("; ".join(map(str, copies)))
    if (installed := installed_versions()) is not None:
        verdict = shipped_versions().judge(installed)
        if verdict.kind == "known to break":
            raise ConfigError(f"{installed}: known to break, {verdict.said}; {verdict.fix}")


def untried_note(by_rank: Sequence[InstalledVersions], *, on_gpu: bool) -> str:
    """Return a line that says which combinations of a launch were not tried; empty if all were.

    Args:
        by_rank: what each rank runs on.
        on_gpu: whether the launch is for GPUs.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, installed in enumerate(by_rank):
        verdict = shipped_versions().judge(installed, on_gpu=on_gpu)
        if verdict.kind == "not tried":
            ranks_of.setdefault(f"{installed}: {verdict.said}", []).append(rank)
    parts = [
        said if len(ranks) == len(by_rank) else f"{numbered('rank', ranks)}: {said}" for said, ranks in ranks_of.items()
    ]
    return f"versions not tried: {'; '.join(parts)} (docs/install.md)" if parts else ""
