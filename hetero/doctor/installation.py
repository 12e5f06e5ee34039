"""Checks, before torch is imported, that what is installed can train, and names old copies of this package."""

from collections.abc import Mapping, Sequence

from hetero.data.tried_versions import shipped_versions
from hetero.doctor.installed_files import install_this, old_copies
from hetero.errors import ConfigError
from hetero.installed_versions import DISTRIBUTIONS, InstalledVersions, installed_version, installed_versions
from hetero.text import numbered


def check_installation() -> None:
    """Check this host's packages.

    Raises:
        ConfigError: pip does not know a package that training needs, or this combination of versions is known to break;
            names the command that helps.
    """
    needed = (DISTRIBUTIONS["torch"], DISTRIBUTIONS["megatron_core"])
    if unknown := [name for name in needed if installed_version(name) is None]:
        raise ConfigError(
            f"{', '.join(unknown)}: can be imported, but has no metadata that names its version (a folder on "
            f"PYTHONPATH, or an installation that was interrupted); run: {install_this()}"
        )
    installed = installed_versions()
    assert installed is not None, "torch and megatron-core have versions"
    verdict = shipped_versions().judge(installed)
    if verdict.kind == "known to break":
        raise ConfigError(f"{installed}: known to break, {verdict.said}; {verdict.fix}")


def old_copies_note(environment: Mapping[str, str]) -> str:
    """Return a line that names the old copies of megatron-hetero on this host; empty if there are none.

    A program of a checkout runs the code of that checkout, so they do it no harm. The command ``hetero`` and Pythons
    that are started elsewhere may be theirs.
    """
    return "; ".join(map(str, old_copies(environment)))


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
