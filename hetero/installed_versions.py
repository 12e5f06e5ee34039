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
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
