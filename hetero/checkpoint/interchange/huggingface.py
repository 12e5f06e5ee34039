"""Reads and writes Hugging Face folders: ``config.json`` and safetensors, in one file or many.

Which tensors a folder has, and whether its head is tied, is decided as transformers 5 decides it: by what is in the
files, and not by what the index or ``tie_word_embeddings`` says of them.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hetero.checkpoint.interchange.families import config_of, join, model_types, rows, split
from hetero.checkpoint.interchange.formats import ModelType
from hetero.checkpoint.interchange.weights import WeightSource, in_groups, new_folder
from hetero.errors import CheckpointError, ConfigError
from hetero.file_systems import let_readers_of_folder_read
from hetero.serialization import parse_json, read_text
from hetero.spec.hugging_face.generation import GENERATION_CONFIG, GenerationConfig, read_generation_config
from hetero.spec.model import ModelSpec, padded_vocab_size
from hetero.spec.model_import import from_hugging_face
from hetero.spec.parameters import EMBEDDING, Parameter, parameters

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_FAMILIES = ", ".join(get_args(ModelType))
_LEAST_ITEM_BYTES = min(dtype.itemsize for dtype in _FLOAT_TYPES.values())

_HEAD = "lm_head.weight"

_COMPARED_ROWS = 4096
"""Rows of the vocabulary that are in memory at a time while a head is compared with the embedding."""

_NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)")
"""Constants that older versions saved with the weights."""


class HuggingFaceSource:
    """The weights of a Hugging Face folder. Tensors are read when they are asked for.

    Args:
        divisible_by: what the vocabulary is padded to a multiple of.

    Attributes:
        generation_config: how text is generated, as the folder says.
        notes: what the user should know of how the folder was read, one sentence each.

    Raises:
        CheckpointError: no safetensors there, or tensors are missing, superfluous or of a wrong shape.
        ConfigError: a model that cannot be expressed.
    """

    def __init__(self, folder: Path, *, divisible_by: int) -> None:
        self._folder = folder
        self.step = 0
        config = _read_config(folder)
        self.generation_config = read_generation_config(folder, config)
        self.notes: tuple[str, ...] = ()
        model = _model(folder, config, divisible_by)
        self._files = _files(folder)
        self._take(model)
        if self.model.tied_embeddings and _HEAD in self._files and not self._head_repeats_embedding():
            self._take(dataclasses.replace(self.model, tied_embeddings=False))
            self.notes = (
                f"{folder}: tie_word_embeddings is true, but {_HEAD} is not the embedding: both are kept, untied, as "
                "transformers 5 does",
            )

    def _take(self, model: ModelSpec) -> None:
        """Read the tensors as those of ``model``, and check that they are."""
        self.model = model
        self._rows = {row.ours: row for row in rows(model)}
        self._check_names()
        self._check_shapes()

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """The smallest type that holds all weights exactly."""
        found = {self._slice_info(name)[1] for row in self._rows.values() for name in row.theirs}
        return functools.reduce(torch.promote_types, found)

    def tensor(self, parameter: Parameter, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor of a parameter in ``dtype``."""
        row = self._rows[parameter.name]
        theirs = []
        for name in row.theirs:
            path = self._files[name]
            with _open(path) as file:
                # Copied, so that no mapping of the file outlives this.
                theirs.append(file.get_tensor(_stored_name(file, name)).to(dtype, copy=True))
        return join(self.model, row.layout, theirs).contiguous()

    def _check_names(self) -> None:
        wanted = {name for row in self._rows.values() for name in row.theirs}
        if missing := sorted(wanted - self._files.keys()):
            if missing == [_HEAD]:
                raise CheckpointError(
                    f"{self._folder}: no {_HEAD}, and tie_word_embeddings is false (what config.json leaves out is the "
                    "default of its family): transformers would draw the head at random; set tie_word_embeddings to "
                    "true if the head is the embedding, or add the tensor"
                )
            raise CheckpointError(f"{self._folder}: tensor {missing[0]} is missing ({len(missing)} in all)")
        # A tied head may repeat the embedding.
        ignored = {_HEAD} if self.model.tied_embeddings else set()
        extra = [name for name in self._files.keys() - wanted - ignored if not _NOT_WEIGHTS.fullmatch(name)]
        if extra:
            raise CheckpointError(
                f"{self._folder}: tensor {sorted(extra)[0]} is no part of the model that config.json describes "
                f"({len(extra)} in all); GPTModel here would compute something else without it"
            )

    def _check_shapes(self) -> None:
        # Before a tensor of such a shape exists, if only on paper: torch counts its bytes in 64 bits.
        num_bytes = sum(path.stat().st_size for path in set(self._files.values()))
        unpadded = dataclasses.replace(self.model, padded_vocab_size=self.model.vocab_size)
        for parameter in parameters(unpadded):
            if parameter.numel * _LEAST_ITEM_BYTES > num_bytes:
                raise CheckpointError(
                    f"{self._folder / 'config.json'}: it makes {parameter.name} {list(parameter.shape)}, and all "
                    f"tensors of the folder have {num_bytes:,} bytes; is it the file of this model?"
                )
        for parameter in parameters(self.model):
            row = self._rows[parameter.name]
            ours = torch.empty(parameter.shape, device="meta")
            for name, theirs in zip(row.theirs, split(self.model, row.layout, ours), strict=True):
                shape = tuple(theirs.shape)
                found, _ = self._slice_info(name)
                if found != shape:
                    raise CheckpointError(
                        f"{self._files[name]}: {name} has shape {list(found)}, config.json makes it {list(shape)}"
                    )

    def _head_repeats_embedding(self) -> bool:
        """Compare the two tensors, a part of their rows at a time."""
        embedding = self._rows[EMBEDDING].theirs[0]
        (shape, dtype), (head_shape, head_dtype) = self._slice_info(embedding), self._slice_info(_HEAD)
        if shape != head_shape:
            return False
        wider = torch.promote_types(dtype, head_dtype)
        with _open(self._files[embedding]) as file, _open(self._files[_HEAD]) as head_file:
            rows, head_rows = file.get_slice(_stored_name(file, embedding)), head_file.get_slice(_HEAD)
            return all(
                torch.equal(rows[i : i + _COMPARED_ROWS].to(wider), head_rows[i : i + _COMPARED_ROWS].to(wider))
                for i in range(0, shape[0], _COMPARED_ROWS)
            )

    def _slice_info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        with _open(self._files[name]) as file:
            info = file.get_slice(_stored_name(file, name))
            kind = info.get_dtype()
            if kind not in _FLOAT_TYPES:
                raise CheckpointError(f"{self._files[name]}: {name} is {kind}; only {', '.join(_FLOAT_TYPES)} are read")
            return tuple(info.get_shape()), _FLOAT_TYPES[kind]


def write_hugging_face(
    source: WeightSource,
    output: Path,
    *,
    dtype: torch.dtype,
    model_type: ModelType | None,
    max_shard_bytes: int,
    generation_config: GenerationConfig = MappingProxyType({}),
    other_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a folder that ``transformers`` loads: ``config.json``, safetensors of at most ``max_shard_bytes``,
    ``generation_config.json`` if something is known of it, and ``other_files`` by name.

    Holds one file's tensors in memory at a time.

    Raises:
        CheckpointError: no family fits the model, or ``output`` exists.
    """
    model = source.model
    fitting = model_types(model)
    if model_type is not None and model_type not in fitting:
        raise CheckpointError(f"the model is no {model_type}; it can be written as {' or '.join(fitting)}")
    by_name = {parameter.name: parameter for parameter in parameters(model)}
    groups = in_groups(
        rows(model), size_bytes=lambda row: by_name[row.ours].numel * dtype.itemsize, limit_bytes=max_shard_bytes
    )
    with new_folder(output) as folder:
        weight_map: dict[str, str] = {}
        num_bytes = 0
        for number, group in enumerate(groups, start=1):
            file = _ONE_FILE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for row in group:
                theirs = split(model, row.layout, source.tensor(by_name[row.ours], dtype))
                tensors |= {name: tensor.contiguous() for name, tensor in zip(row.theirs, theirs, strict=True)}
            save_file(tensors, folder / file, metadata={"format": "pt"})
            let_readers_of_folder_read(folder / file)
            weight_map |= dict.fromkeys(tensors, file)
            num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            del tensors
        if len(groups) > 1:
            _write_json(folder / _INDEX, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map})
        config = config_of(model, model_type or fitting[0], dtype, generation_config)
        _write_json(folder / "config.json", config)
        if generation_config:
            _write_json(folder / GENERATION_CONFIG, dict(generation_config))
        for name, content in other_files.items():
            (folder / name).write_bytes(content)


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    config = _read_json(path)
    if "model_type" not in config:
        raise ConfigError(f"{path}: missing key 'model_type'; is this a Hugging Face folder?")
    return config


def _model(folder: Path, config: Mapping[str, object], divisible_by: int) -> ModelSpec:
    path = folder / "config.json"
    model = from_hugging_face(config, source=str(path))
    if config["model_type"] == "opt":
        raise ConfigError(f"{path}: model_type opt is known for plans alone; weights of {_FAMILIES} are converted")
    return dataclasses.replace(model, padded_vocab_size=padded_vocab_size(model.vocab_size, divisible_by=divisible_by))


def _files(folder: Path) -> dict[str, Path]:
    """Find the file of every tensor, by full name: models saved without their head lack its first part."""
    indexed = _indexed_files(folder) if (folder / _INDEX).exists() else {}
    files: dict[str, Path] = {}
    for path in sorted(set(indexed.values())) or [folder / _ONE_FILE]:
        names = _names_in(path)
        if missing := {name for name, file in indexed.items() if file == path} - set(names):
            raise CheckpointError(f"{path}: tensor {min(missing)} is missing; {_INDEX} says that it is here")
        for name in names:
            if name in files:
                raise CheckpointError(f"{path}: tensor {name} is here and in {files[name].name}; keep one of the two")
            files[name] = path
    full = {_full_name(name): path for name, path in files.items()}
    if len(full) < len(files):
        twice = next(name for name in files if _full_name(name) != name and _full_name(name) in files)
        raise CheckpointError(f"{files[twice]}: tensor {twice} is here beside {_full_name(twice)}, which is the same")
    return full


def _indexed_files(folder: Path) -> dict[str, Path]:
    path = folder / _INDEX
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: it has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{path}: {file!r} is not a file of this folder")
    if (folder / _ONE_FILE).exists() and _ONE_FILE not in weight_map.values():
        raise CheckpointError(
            f"{folder}: it has {_ONE_FILE}, which transformers reads, and {_INDEX} of other files; move away those "
            "that are not meant"
        )
    return {name: folder / file for name, file in weight_map.items()}


def _names_in(path: Path) -> list[str]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; only safetensors are read, convert pickled weights first")
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from None


def _full_name(name: str) -> str:
    if name.startswith(("h.", "wte.", "wpe.", "ln_f.")):
        return f"transformer.{name}"
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return f"model.{name}"
    return name


def _stored_name(file: safe_open, name: str) -> str:
    return name if name in file.keys() else name.split(".", 1)[1]  # noqa: SIM118  (not a mapping)


def _read_json(path: Path) -> dict[str, object]:
    value = parse_json(read_text(path), source=str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return value


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
