"""Keeps a profile in its file while it is measured, so that a run that was ended can go on where it was."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hetero.errors import ConfigError
from hetero.profiling.points import ProfilePoint
from hetero.serialization import load, save
from hetero.spec.profile import (
    AttentionKernel,
    LayerMemory,
    LayerTime,
    Profile,
    RecomputedTime,
    SplitBackwardTime,
    UpdateTime,
)

Measured = LayerTime | RecomputedTime | SplitBackwardTime | UpdateTime

AnyMeasured = TypeVar("AnyMeasured", bound=Measured)

_THE_SAME = (
    *("device", "shape", "seq_length", "precision", "arithmetic", "layers", "implementation"),
    "tp_collectives_included",
)
"""What two parts of one profile have in common, beside the hardware and the versions."""


class ProfileFile:
    """A profile that grows point by point; its file is whole after each of them.

    Args:
        head: all that is the same for every point, with any times, which are not looked at.

    Raises:
        ConfigError: there is a file, and it is damaged, or of something else.
    """

    def __init__(self, path: Path, head: Profile) -> None:
        self.path = path
        self._head = head
        self.profile: Profile | None = None
        if path.exists():
            self.profile = load(Profile, path)
            if (difference := _difference(self.profile, head)) is not None:
                what, there, here = difference
                raise ConfigError(
                    f"{path}: this run cannot go on with it: its {what} is {there}, here it is {here}; give another "
                    "--out, or remove the file to measure again"
                )

    def left(self, points: Sequence[ProfilePoint]) -> list[ProfilePoint]:
        """Those that the file does not have."""
        if (profile := self.profile) is None:
            return list(points)
        return [each for each in points if not each.is_in(profile)]

    def add(self, measured: Measured, memory: LayerMemory | None, *, attention: AttentionKernel | None = None) -> None:
        """Write a measurement, in place of an earlier one of its point, and ``memory`` unless that layer's is known.

        The first one is a :class:`LayerTime`: a profile without any says nothing.

        Args:
            attention: the kernel that ran, if it is known. The profile names that of its first measurement, and has a
                note where another ran.
        """
        if self.profile is None:
            assert isinstance(measured, LayerTime), "the first point is a layer's"
            implementation = self._head.implementation
            runs = dataclasses.replace(implementation, attention=attention or implementation.attention)
            profile = dataclasses.replace(self._head, times=(measured,), implementation=runs)
        else:
            profile = _with(self.profile, measured)
        if attention is not None and attention != profile.implementation.attention:
            profile = _with_note(profile, f"attention ran by the kernel {attention} in {_place_of(measured)}")
        if memory is not None and profile.memory_of(memory.kind, tp=memory.tp) is None:
            profile = dataclasses.replace(profile, memory=(*profile.memory, memory))
        save(profile, self.path)
        self.profile = profile


def model_name(path: Path) -> str:
    """What a model is called; every file of Hugging Face's is called alike, its folder is not."""
    return path.absolute().parent.name if path.name == "config.json" else path.stem if path.suffix else path.name


def profile_file_name(model: str, *, device: str, precision: str, layers: str) -> str:
    """That of a profile in its folder, from what the model, the device and the layers are called."""
    return f"{_file_name(model)}.{_file_name(device)}.{precision}.{layers}.json"


def _file_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "unnamed"


def _with(profile: Profile, measured: Measured) -> Profile:
    match measured:
        case LayerTime():
            return dataclasses.replace(profile, times=_in_place(profile.times, measured))
        case RecomputedTime():
            return dataclasses.replace(profile, recomputed=_in_place(profile.recomputed, measured))
        case SplitBackwardTime():
            return dataclasses.replace(profile, split_backwards=_in_place(profile.split_backwards, measured))
        case UpdateTime():
            return dataclasses.replace(profile, updates=_in_place(profile.updates, measured))


def _in_place(series: tuple[AnyMeasured, ...], measured: AnyMeasured) -> tuple[AnyMeasured, ...]:
    """Return ``series`` with ``measured`` where the same point stands, else at the end."""
    places = [_place_of(each) for each in series]
    if _place_of(measured) not in places:
        return (*series, measured)
    number = places.index(_place_of(measured))
    return (*series[:number], measured, *series[number + 1 :])


def _place_of(measured: Measured) -> str:
    """Return which point of its series was measured."""
    names = ("kind", "recompute", "tp", "micro_batch_size")
    return ", ".join(f"{name} {getattr(measured, name)}" for name in names if hasattr(measured, name))


def _with_note(profile: Profile, note: str) -> Profile:
    provenance = profile.provenance
    if note in provenance.notes:
        return profile
    return dataclasses.replace(profile, provenance=dataclasses.replace(provenance, notes=(*provenance.notes, note)))


def _difference(there: Profile, here: Profile) -> tuple[str, Any, Any] | None:
    """What differs, with both values; ``None`` where one can go on with the other."""
    # The kernel of attention is known once something ran.
    runs = dataclasses.replace(here.implementation, attention=there.implementation.attention)
    here = dataclasses.replace(here, implementation=runs)
    for name in _THE_SAME:
        old_value, new_value = getattr(there, name), getattr(here, name)
        if old_value == new_value:
            continue
        if not dataclasses.is_dataclass(old_value):
            return name, old_value, new_value
        for field in dataclasses.fields(old_value):
            old_part, new_part = getattr(old_value, field.name), getattr(new_value, field.name)
            if old_part != new_part:
                return f"{name}'s {field.name}", old_part, new_part
    if there.provenance.hardware != here.provenance.hardware:
        return "hardware", there.provenance.hardware or "unknown", here.provenance.hardware
    old, new = there.provenance.versions, here.provenance.versions
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"version of {name}", old.get(name, "none"), new.get(name, "none")
    return None
