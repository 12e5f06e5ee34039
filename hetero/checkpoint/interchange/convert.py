"""Converts weights from any supported format to any other."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hetero.checkpoint.interchange.families import ModelType
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource, write_hugging_face
from hetero.checkpoint.interchange.native import NativeSource, write_native
from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.checkpoint.interchange.weights import WeightSource
from hetero.errors import CheckpointError
from hetero.spec.model import VOCABULARY_DIVISOR, padded_vocab_size
from hetero.spec.model_import import load_model

WeightFormat = Literal["hf", "hetero", "megatron"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What to convert.

    step: of ours, ``None`` for the newest.
    model: file that describes the model, for a megatron checkpoint.
    divisible_by: pad the vocabulary to a multiple of it, where the format does not say; ``None`` for what the model
        file says, or Megatron-LM's default.
    dtype: of the weights written, ``None`` for as they are.
    model_type: Hugging Face family to write, ``None`` for the likeliest.
    max_shard_bytes: of one file, and about what is in memory at a time.
    """

    source_format: WeightFormat
    target_format: WeightFormat
    source: Path
    target: Path
    step: int | None = None
    model: Path | None = None
    divisible_by: int | None = None
    dtype: torch.dtype | None = None
    model_type: ModelType | None = None
    max_shard_bytes: int = 5_000_000_000


def convert(conversion: Conversion) -> WeightSource:
    """Convert the weights, and return the source that they came from.

    Raises:
        HeteroError: something is missing, damaged, unsafe, or cannot be expressed in the other format.
    """
    source = open_source(conversion)
    dtype = conversion.dtype or source.dtype
    match conversion.target_format:
        case "hf":
            write_hugging_face(
                source,
                conversion.target,
                dtype=dtype,
                model_type=conversion.model_type,
                max_shard_bytes=conversion.max_shard_bytes,
            )
        case "hetero":
            write_native(source, conversion.target, dtype=dtype, max_shard_bytes=conversion.max_shard_bytes)
        case "megatron":
            write_torch_dist(source, conversion.target, dtype=dtype)
    return source


def open_source(conversion: Conversion) -> WeightSource:
    """The weights to convert."""
    match conversion.source_format:
        case "hf":
            return HuggingFaceSource(conversion.source, divisible_by=conversion.divisible_by or VOCABULARY_DIVISOR)
        case "hetero":
            return NativeSource(conversion.source, step=conversion.step)
        case "megatron":
            if conversion.model is None:
                raise CheckpointError(
                    f"{conversion.source}: a megatron checkpoint does not describe its model; give --model, a "
                    "model.yaml or a Hugging Face config.json"
                )
            model = load_model(conversion.model)
            if conversion.divisible_by is not None:
                rows = padded_vocab_size(model.vocab_size, divisible_by=conversion.divisible_by)
                model = dataclasses.replace(model, padded_vocab_size=rows)
            return TorchDistSource(conversion.source, model=model)
