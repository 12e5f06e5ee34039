"""Converts weights from any supported format to any other."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hetero.checkpoint.interchange.formats import ModelType, WeightFormat
from hetero.checkpoint.interchange.huggingface import HuggingFaceSource, write_hugging_face
from hetero.checkpoint.interchange.native import NativeSource, write_native
from hetero.checkpoint.interchange.torch_dist import TorchDistSource, write_torch_dist
from hetero.checkpoint.interchange.weights import WeightSource
from hetero.errors import CheckpointError
from hetero.spec.hugging_face.generation import GenerationConfig
from hetero.spec.model import VOCABULARY_DIVISOR, padded_vocab_size
from hetero.spec.model_import import load_generation_config, load_model


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
    other_files: what a Hugging Face folder has besides the weights, by name, such as the tokenizer's files.
    least_vocab_size: ids of that tokenizer, which the model has to have.
    generation_config: what that tokenizer says of generation, which counts before what the source says.
    generation_defaults: what counts where neither of them says anything.
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
    other_files: Mapping[str, bytes] = field(default_factory=dict)
    least_vocab_size: int = 0
    generation_config: GenerationConfig = field(default_factory=dict)
    generation_defaults: GenerationConfig = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpenSource:
    """The weights to convert, and what else is known of them.

    generation_config: how text is generated from the model; empty if neither the format nor the model file says it.
    notes: what the user should know of how the source was read, one sentence each.
    """

    weights: WeightSource
    generation_config: GenerationConfig = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def convert(conversion: Conversion) -> OpenSource:
    """Convert the weights, and return what they came from, with the generation config that was written.

    Raises:
        HeteroError: something is missing, damaged, unsafe, or cannot be expressed in the other format.
    """
    opened = open_source(conversion)
    source = opened.weights
    generation_config = {
        **conversion.generation_defaults,
        **opened.generation_config,
        **conversion.generation_config,
    }
    if source.model.vocab_size < conversion.least_vocab_size:
        raise CheckpointError(
            f"{conversion.source}: the model has {source.model.vocab_size} tokens, the tokenizer "
            f"{conversion.least_vocab_size}; give the tokenizer that the run had"
        )
    dtype = conversion.dtype or source.dtype
    match conversion.target_format:
        case "hf":
            write_hugging_face(
                source,
                conversion.target,
                dtype=dtype,
                model_type=conversion.model_type,
                max_shard_bytes=conversion.max_shard_bytes,
                generation_config=generation_config,
                other_files=conversion.other_files,
            )
        case "hetero":
            write_native(
                source,
                conversion.target,
                dtype=dtype,
                max_shard_bytes=conversion.max_shard_bytes,
                generation_config=generation_config,
            )
        case "megatron":
            write_torch_dist(source, conversion.target, dtype=dtype)
    return dataclasses.replace(opened, generation_config=generation_config)


def open_source(conversion: Conversion) -> OpenSource:
    """Open the weights to convert.

    Raises:
        HeteroError: something is missing, damaged or unsafe.
    """
    match conversion.source_format:
        case "hf":
            theirs = HuggingFaceSource(conversion.source, divisible_by=conversion.divisible_by or VOCABULARY_DIVISOR)
            return OpenSource(theirs, theirs.generation_config, theirs.notes)
        case "hetero":
            ours = NativeSource(conversion.source, step=conversion.step)
            return OpenSource(ours, ours.generation_config)
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
            saved = TorchDistSource(conversion.source, model=model)
            return OpenSource(saved, load_generation_config(conversion.model), saved.notes)
