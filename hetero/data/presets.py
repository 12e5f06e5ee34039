"""Finds the clusters, models and sweeps that ship with the package by their names, and says where they are from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from hetero.errors import ConfigError
from hetero.printable_fields import AnyText
from hetero.serialization import STRICT, load, near_match

PresetKind = Literal["cluster", "model", "sweep"]

_HERE = Path(__file__).parent

_FOLDERS: Mapping[PresetKind, Path] = {
    "cluster": _HERE / "clusters",
    "model": _HERE / "models",
    "sweep": _HERE / "sweeps",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetOrigin:
    """Where a shipped cluster is from.

    about: what it is, in a line.
    published: what of it ``source`` has published; where that is nothing, it is an example.
    source: who published it, or what the example follows.
    date: of the source.
    prices: where its prices are from and of which day; empty where it has none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    about: AnyText
    published: Literal["nodes and links", "nodes", "device types and links", "device types", "nothing"]
    source: AnyText
    date: str
    prices: AnyText = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetOrigins:
    """The origins of all shipped clusters, by name."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    clusters: dict[str, PresetOrigin]


@cache
def cluster_origins() -> Mapping[str, PresetOrigin]:
    """Where each shipped cluster is from."""
    return load(PresetOrigins, _HERE / "cluster_origins.yaml").clusters


@cache
def preset_names(kind: PresetKind) -> tuple[str, ...]:
    """The names of what ships, in alphabetical order."""
    return tuple(sorted(path.stem for path in _FOLDERS[kind].glob("*.yaml")))


def is_name(text: str) -> bool:
    """Whether ``text`` can only be the name of a preset: it has no slash, and no suffix of a file."""
    return "/" not in text and Path(text).suffix not in (".yaml", ".yml", ".json")


def preset_path(kind: PresetKind, name: str) -> Path:
    """The file of what ships under ``name``.

    Raises:
        ConfigError: nothing does.
    """
    known = list(preset_names(kind))
    if name not in known:
        hint = near_match(name, known) or f" (known: {', '.join(known)})"
        raise ConfigError(f"no {kind} {name!r} ships{hint}; for a file of yours write a path, such as ./{name}.yaml")
    return _FOLDERS[kind] / f"{name}.yaml"
