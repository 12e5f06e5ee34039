"""Versions of the packages that have to fit together on a host, asked of their metadata: nothing is imported."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Component = Literal["python", "megatron_core", "torch", "transformer_engine", "apex"]
COMPONENTS: tuple[Component, ...] = get_args(Component)

NAMES: Mapping[Component, str] = {
    "python": "Python",
    "megatron_core": "megatron-core",
    "torch": "torch",
    "transformer_engine": "TransformerEngine",
    "apex": "apex",
}
"""What each component is called in messages and tables."""

DISTRIBUTIONS: Mapping[Component, str] = {
    "megatron_core": "megatron-core",
    "torch": "torch",
    "transformer_engine": "transformer-engine",
    "apex": "apex",
}
"""What pip calls each component."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledVersions:
    """The combination of versions that a process runs on.

    python: major and minor, ``3.12``.
    torch: without the build, ``2.15.0`` of ``2.15.0+cu130``; the others likewise.
    transformer_engine, apex: ``None`` where it is not installed.
    """

    python: str
    megatron_core: str
    torch: str
    transformer_engine: str | None = None
    apex: str | None = None

    def __str__(self) -> str:
        present = {component: version for component in COMPONENTS if (version := self.version_of(component))}
        return ", ".join(f"{NAMES[component]} {version}" for component, version in present.items())

    def version_of(self, component: Component) -> str | None:
        """Return the version of ``component``, ``None`` where it is not installed."""
        version: str | None = getattr(self, component)
        return version

    @property
    def combination(self) -> tuple[str | None, ...]:
        """The versions in the order of :data:`COMPONENTS`."""
        return tuple(self.version_of(component) for component in COMPONENTS)


def combination_of(python: str, packages: Mapping[str, str]) -> InstalledVersions | None:
    """Return the combination that ``packages`` are, ``None`` without torch or megatron-core.

    Args:
        python: its full version.
        packages: versions by distribution.
    """
    found = {
        component: packages[name].partition("+")[0] for component, name in DISTRIBUTIONS.items() if name in packages
    }
    if not {"torch", "megatron_core"} <= found.keys():
        return None
    return InstalledVersions(
        python=".".join(python.split(".")[:2]),
        megatron_core=found["megatron_core"],
        torch=found["torch"],
        transformer_engine=found.get("transformer_engine"),
        apex=found.get("apex"),
    )


def installed_versions() -> InstalledVersions | None:
    """Return what is installed for this interpreter, ``None`` without torch or megatron-core."""
    return combination_of(platform.python_version(), versions_of(DISTRIBUTIONS.values()))


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed."""
    return {name: version for name in distributions if (version := installed_version(name)) is not None}


def installed_version(distribution: str) -> str | None:
    """Return the installed version, ``None`` if it is not installed, or its metadata was lost.

    An installation that was interrupted leaves a folder of metadata without the file that names the version.
    """
    found = importlib.metadata.distributions(name=distribution)
    return next((each.version for each in found if "Version" in each.metadata), None)
