"""Compares installed versions with what the installed packages ask for: pip does so only for what it installs then."""

import importlib.metadata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import ConfigDict

from hetero.installed_versions import installed_version
from hetero.serialization import STRICT

EXTRAS_IN_USE: Mapping[str, tuple[str, ...]] = {
    "megatron-hetero": ("train", "transformer-engine"),
    "megatron-core": (),
    "transformer-engine": ("core-cu12", "core-cu13", "core_cu12", "core_cu13", "pytorch"),
    "transformer-engine-torch": (),
}
"""By distribution, the extras whose requirements count if the package that they name is installed.

Those of megatron-core do not: its extra ``dev`` pins what its developers test with.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnmetRequirement:
    """A version that another package does not accept.

    asked_by: that package, with its version.
    accepted: a specifier, such as ``>=0.16.1,<0.20``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    asked_by: str
    package: str
    accepted: str
    installed: str


def unmet_requirements() -> tuple[UnmetRequirement, ...]:
    """Return the requirements of the packages of training that an installed package does not meet, each once."""
    return tuple(dict.fromkeys(unmet for name in EXTRAS_IN_USE for unmet in _unmet_of(name)))


def _unmet_of(name: str) -> Iterator[UnmetRequirement]:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    for text in distribution.requires or []:
        requirement = Requirement(text)
        markers = [{"extra": extra} for extra in ("", *EXTRAS_IN_USE[name])]
        if requirement.marker is not None and not any(map(requirement.marker.evaluate, markers)):
            continue
        installed = installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield UnmetRequirement(
                asked_by=f"{name} {distribution.version}",
                package=canonicalize_name(requirement.name),
                accepted=str(requirement.specifier),
                installed=installed,
            )
