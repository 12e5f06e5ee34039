"""Loads a model from our own fields as YAML or JSON, or from a Hugging Face ``config.json`` or the folder that has it.

Only what megatron-core's GPTModel computes the same way is imported; the rest is refused by the key that differs.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import load, parse_json, read_text
from hetero.spec.hugging_face.families import TABLES
from hetero.spec.hugging_face.folder import hugging_face_folder
from hetero.spec.hugging_face.generation import read_generation_config
from hetero.spec.hugging_face.keys import ConfigValues, UnreadableError
from hetero.spec.hugging_face.models import BUILDERS
from hetero.spec.model import ModelSpec


def load_model(path: Path) -> ModelSpec:
    """Loads the model that a file describes.

    Args:
        path: a file, or what :func:`hugging_face_folder` finds.

    Raises:
        ConfigError: the file is missing or malformed, or a Hugging Face model that cannot be expressed.
    """
    path = _file(path)
    config = _hugging_face_config(path)
    return load(ModelSpec, path) if config is None else from_hugging_face(config, source=str(path))


def load_generation_config(path: Path) -> dict[str, Any]:
    """Load how text is generated, from a Hugging Face configuration; empty for a file with our own fields.

    Args:
        path: as :func:`load_model` takes it. A ``generation_config.json`` counts if it is in the same folder.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    path = _file(path)
    config = _hugging_face_config(path)
    return {} if config is None else read_generation_config(path.parent, config)


def precision_of(path: Path) -> str | None:
    """Reads the type of the weights from a Hugging Face configuration: bf16, fp16, fp32 or fp64.

    ``None`` where it says none, or for a file with our own fields.

    Args:
        path: as :func:`load_model` takes it.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    config = _hugging_face_config(_file(path))
    if config is None:
        return None
    # transformers 5 says dtype; "auto" and nothing mean that the tensors say it.
    given = config.get("dtype") or config.get("torch_dtype")
    return _PRECISIONS.get(str(given).removeprefix("torch."))


_PRECISIONS: Mapping[str, str] = MappingProxyType(
    {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
)


def _file(path: Path) -> Path:
    folder = hugging_face_folder(path)
    return path if folder is None else folder / "config.json"


def _hugging_face_config(path: Path) -> dict[str, Any] | None:
    """Read a Hugging Face configuration, early ones have no ``model_type``; ``None`` if the file has our own fields."""
    config = parse_json(read_text(path), source=str(path)) if path.suffix == ".json" else None
    is_theirs = isinstance(config, dict) and not config.keys().isdisjoint(("model_type", "architectures"))
    return config if is_theirs else None


def from_hugging_face(config: Mapping[str, Any], *, source: str) -> ModelSpec:
    """Converts a Hugging Face configuration, of one of the types in :data:`BUILDERS`, to a model.

    Raises:
        ConfigError: another type, a missing key, one that is not accounted for, or something that GPTModel computes
            differently.
    """
    if "model_type" not in config:
        raise ConfigError(f"{source}: missing key 'model_type'; add the one of the model: {', '.join(BUILDERS)}")
    family = str(config["model_type"])
    if family not in BUILDERS:
        # The nearest name would be another model: a program wrote the file, so that it is not misspelt.
        raise ConfigError(
            f"{source}: model_type {family!r} is not supported, those that are: {', '.join(BUILDERS)}; to plan for "
            "its shape, write a model file as in scripts/presets/models/"
        )
    values = ConfigValues(family=family, table=TABLES[family], given=config)
    problems = values.problems()
    try:
        model = BUILDERS[family](values)
    except UnreadableError:
        assert problems, "they say which key"
    except ConfigError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    return model
