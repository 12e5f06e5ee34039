"""Converts what an earlier version of this program wrote to the format of today, before it is checked.

A dataclass whose format has changed says how, version by version:

    format_version: Literal[2] = 2
    __format_upgrades__: ClassVar[FormatUpgrades] = {1: _from_version_1}

It may also be a part of another file, as the plan is of a checkpoint's state.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

from hetero.errors import ConfigError

VERSION = "format_version"

FormatUpgrades = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]
"""By version: makes plain data of the next version from data of this one, without change to its argument."""


def upgraded(cls: Any, data: Any, *, source: str) -> Any:
    """``data``, plain data that is meant to be a ``cls``, in today's format; ``data`` itself if it already is.

    Data without a version is taken for the oldest one. What is no ``cls`` at all is left for the check of types.

    Raises:
        ConfigError: it was written by a later version of this program. ``source`` names it.
    """
    if not _has_upgrades(cls):
        return data
    if not (dataclasses.is_dataclass(cls) and isinstance(cls, type)):
        # ``Plan | None`` or ``tuple[Plan, ...]``.
        part = next(part for part in get_args(cls) if _has_upgrades(part))
        return (
            [upgraded(part, each, source=source) for each in data]
            if isinstance(data, list)
            else upgraded(part, data, source=source)
        )
    if not isinstance(data, dict):
        return data
    if hasattr(cls, "__format_upgrades__"):
        data = _in_todays_format(cls.__format_upgrades__, data, source)
    types = get_type_hints(cls)
    return {key: upgraded(types.get(key), value, source=source) for key, value in data.items()}


def _in_todays_format(upgrades: FormatUpgrades, data: dict[str, Any], source: str) -> dict[str, Any]:
    newest = max(upgrades) + 1
    version = data.get(VERSION, min(upgrades))
    if isinstance(version, bool) or not isinstance(version, int) or version < min(upgrades):
        return data  # For the check of types to refuse.
    if version > newest:
        raise ConfigError(
            f"{source}: {VERSION} is {version}, this program reads up to {newest}; a later version of megatron-hetero "
            "wrote it: update to that"
        )
    for each in range(version, newest):
        data = {**upgrades[each](data), VERSION: each + 1}
    return data


def renamed_key(data: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """``data`` whose key ``old`` is called ``new``, unless it has that as well."""
    return {new if key == old and new not in data else key: value for key, value in data.items()}


@cache
def _has_upgrades(cls: Any) -> bool:
    """Whether ``cls``, or what is inside of it, has had other formats."""
    if not dataclasses.is_dataclass(cls):
        return any(_has_upgrades(part) for part in get_args(cls))
    return hasattr(cls, "__format_upgrades__") or any(map(_has_upgrades, get_type_hints(cls).values()))
