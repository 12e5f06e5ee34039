"""Reads the rotary positions of a configuration from the three places where versions of ``transformers`` put them."""

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetero.errors import ConfigError
from hetero.spec.hugging_face.keys import COUNT, POSITIVE, ConfigValues, ValueKind
from hetero.spec.model import RotaryScaling

_BASE: Mapping[str, float] = MappingProxyType({"mixtral": 1_000_000.0})
"""By family, the base of a file that says none, where it is not 10,000."""

_SCALING: Mapping[str, Mapping[str, ValueKind]] = MappingProxyType(
    {
        "default": {},
        "linear": {"factor": POSITIVE},
        "llama3": {
            "factor": POSITIVE,
            "low_freq_factor": POSITIVE,
            "high_freq_factor": POSITIVE,
            "original_max_position_embeddings": COUNT,
        },
    }
)
"""By type of scaling, the keys that it needs."""

_HEADS_ROTATE_WHOLE = (None, 1.0)


def rotary_positions(values: ConfigValues) -> tuple[float, RotaryScaling | None]:
    """The base and the scaling, from ``rope_scaling``, else ``rope_parameters`` (transformers 5), and ``rope_theta``.

    Raises:
        ConfigError: another kind of scaling, or the places contradict each other.
    """
    places = [key for key in ("rope_scaling", "rope_parameters") if values[key]]
    bases = {key: values[key].get("rope_theta") for key in places} | {"rope_theta": values["rope_theta"]}
    scalings = {key: _scaling(values, key) for key in places}
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        raise ConfigError("rope_scaling and rope_parameters say different things, take one of them out")
    given = {key: base for key, base in bases.items() if base is not None}
    for key, base in given.items():
        _check(f"{key}.rope_theta" if key in places else key, base, POSITIVE)
    if len(set(given.values())) > 1:
        said = " and ".join(f"{base} in {key}" for key, base in given.items())
        raise ConfigError(f"rope_theta is {said}: they must be equal")
    # What one place alone says, another version would not read there: with ``rope_scaling``, version 5 forgets these.
    if "rope_scaling" in places and given.keys() == {"rope_parameters"}:
        raise ConfigError("rope_theta is in rope_parameters alone, which rope_scaling replaces: put it beside them")
    base = next(iter(given.values()), _BASE.get(values.family, 10_000.0))
    return float(base), next(iter(scalings.values()), None)


def _scaling(values: ConfigValues, key: str) -> RotaryScaling | None:
    stated: dict[str, Any] = values[key]
    kind = _type(key, stated)
    needs = _SCALING[kind]
    for name, value in stated.items():
        if name in ("rope_type", "type", "rope_theta") or name in needs:
            continue
        if name != "partial_rotary_factor":
            raise ConfigError(
                f"{key}.{name} (its value is {reprlib.repr(value)}) is no key of type {kind}; take it out, or state "
                f"the type that has it (supported are {', '.join(_SCALING)})"
            )
        if value not in _HEADS_ROTATE_WHOLE:
            raise ConfigError(f"{key}.{name} is {value!r}: heads rotate whole in {values.family} models, take it out")
    # Version 5 fills this one in from the model.
    filled = {"original_max_position_embeddings": values["max_position_embeddings"], **stated}
    for name, limit in needs.items():
        if name not in filled:
            raise ConfigError(f"missing key {name!r} of {key}, which type {kind} needs")
        _check(f"{key}.{name}", filled[name], limit)
    match kind:
        case "linear":
            return RotaryScaling(kind="linear", factor=float(filled["factor"]))
        case "llama3":
            return RotaryScaling(
                kind="llama3",
                factor=float(filled["factor"]),
                low_freq_factor=float(filled["low_freq_factor"]),
                high_freq_factor=float(filled["high_freq_factor"]),
                original_max_position_embeddings=filled["original_max_position_embeddings"],
            )
    return None


def _type(key: str, stated: Mapping[str, Any]) -> str:
    """The type of scaling; ``type`` is the old name of ``rope_type``."""
    said = [stated[name] for name in ("rope_type", "type") if name in stated] or ["default"]
    if said[0] != said[-1]:
        raise ConfigError(f"{key} has the rope_type {said[0]!r} and the type {said[-1]!r}: keep one")
    kind = said[0]
    if not isinstance(kind, str) or kind not in _SCALING:
        raise ConfigError(
            f"{key} is of type {kind!r}, supported are {', '.join(_SCALING)}; a plan costs the same without it, so "
            "plan with a file that has none, but do not train its weights so: they would compute something else"
        )
    return kind


def _check(name: str, value: object, kind: ValueKind) -> None:
    if not kind.accepts(value):
        raise ConfigError(f"{name} is {reprlib.repr(value)}, must be {kind.limit}")
