"""Loads a model from our own fields as YAML or JSON, or from a Hugging Face ``config.json``.

Only what megatron-core's GPTModel computes the same way is imported; the rest is refused by the key that differs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import load, near_match, parse_json, read_text
from hetero.spec.hugging_face.families import TABLES
from hetero.spec.hugging_face.keys import ConfigValues
from hetero.spec.hugging_face.models import BUILDERS
from hetero.spec.model import ModelSpec


def load_model(path: Path) -> ModelSpec:
    """Loads the model that a file describes.

    Raises:
        ConfigError: the file is missing or malformed, or a Hugging Face model that cannot be expressed.
    """
    if path.suffix == ".json":
        config = parse_json(read_text(path), source=str(path))
        if isinstance(config, dict) and "model_type" in config:
            return from_hugging_face(config, source=str(path))
    return load(ModelSpec, path)


def from_hugging_face(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """Converts a Hugging Face configuration, of one of the types in :data:`BUILDERS`, to a model.

    Raises:
        ConfigError: another type, a missing key, one that is not accounted for, or something that GPTModel computes
            differently.
    """
    family = str(config["model_type"])
    if family not in BUILDERS:
        hint = near_match(family, list(BUILDERS)) or f" (known: {', '.join(BUILDERS)})"
        raise ConfigError(f"{source}: unknown model_type {family!r}{hint}")
    values = ConfigValues(family=family, table=TABLES[family], given=config)
    try:
        values.check()
        return BUILDERS[family](values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
