"""Gathers the files of a run's tokenizer, under the names that Hugging Face's libraries look for."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.serialization import read_bytes
from hetero.spec.hugging_face.folder import hugging_face_folder
from hetero.spec.hugging_face.generation import read_generation_config
from megatron.pretrain.cli.value_types import TOKENIZER_FILES
from megatron.pretrain.generation_config import generation_config_of
from megatron.pretrain.named_tokens import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG, read_named_tokens
from megatron.pretrain.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, build_tokenizer

_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Of tokenizers themselves."""

_BESIDE = (
    TOKENIZER_CONFIG,
    SPECIAL_TOKENS_MAP,
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What says how a tokenizer is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The files by name, how many ids the tokenizer has, and what it says of generation.

    generation_config: the tokens that files in its folder name, and a ``generation_config.json`` in there.
    generation_defaults: the end of document in training, and the tokens that a SentencePiece model itself names.
    """

    contents: dict[str, bytes]
    vocab_size: int
    generation_config: dict[str, Any]
    generation_defaults: dict[str, Any]


def tokenizer_files(
    *, tokenizer_type: str, tokenizer_model: str | None, vocab_file: Path | None, merge_file: Path | None
) -> TokenizerFiles:
    """Read the files of the tokenizer that these flags of a run mean.

    A folder gives all files of its tokenizer, and so does a file under its usual name (``tokenizer.json``), which has
    them beside it. Where nobody says how a tokenizer.json or GPT-2's files are to be used, a ``tokenizer_config.json``
    is made that has ``transformers`` use them as the run did; of a SentencePiece model the family decides.

    Raises:
        ConfigError: the tokenizer has no files, or it cannot be read.
    """
    if tokenizer_type not in TOKENIZER_FILES:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} has no files that an export could have; leave it out")
    tokenizer = build_tokenizer(
        tokenizer_type=tokenizer_type,
        tokenizer_model=tokenizer_model,
        vocab_size=None,
        vocab_file=vocab_file,
        merge_file=merge_file,
    )
    if vocab_file is not None and merge_file is not None:
        folder, paths = None, {"vocab.json": vocab_file, "merges.txt": merge_file}
    else:
        usual = "tokenizer.json" if isinstance(tokenizer, HuggingFaceTokenizer) else "tokenizer.model"
        folder = _folder(Path(str(tokenizer_model)), usual)
        paths = {usual: Path(str(tokenizer_model))} if folder is None else _files(folder)
    contents = {name: read_bytes(path) for name, path in paths.items()}
    if TOKENIZER_CONFIG not in contents and isinstance(tokenizer, HuggingFaceTokenizer):
        end = tokenizer.model.id_to_token(tokenizer.eod)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        if vocab_file is not None:
            config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": end, "bos_token": end, "unk_token": end}
        contents[TOKENIZER_CONFIG] = f"{json.dumps(config, indent=2, ensure_ascii=False)}\n".encode()
    return TokenizerFiles(
        contents=contents,
        vocab_size=tokenizer.vocab_size,
        generation_config={} if folder is None else _generation_config(tokenizer, folder),
        generation_defaults=generation_config_of(tokenizer),
    )


def _generation_config(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Read what the folder of a tokenizer says of generation; the end of document is among the ends that it names."""
    named = read_named_tokens(folder)
    ids: dict[str, Any] = {}
    for kind in ("bos", "eos", "pad"):
        token = named.get(f"{kind}_token")
        if token is not None and (found := _token_id(tokenizer, token.token)) is not None:
            ids[f"{kind}_token_id"] = found
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.end_of_document.is_named:
        ids["eos_token_id"] = tokenizer.eod
    config = read_generation_config(folder, ids)
    given = config.get("eos_token_id")
    ends = given if isinstance(given, list) else [given]
    if given is not None and tokenizer.eod not in ends:
        config["eos_token_id"] = [*ends, tokenizer.eod]
    return config


def _token_id(tokenizer: Tokenizer, token: str) -> int | None:
    match tokenizer:
        case HuggingFaceTokenizer(model=model):
            return model.token_to_id(token)
        case SentencePieceTokenizer(model=pieces):
            # For a token that it does not have, it gives the id of the unknown one.
            index: int = pieces.piece_to_id(token)
            return index if pieces.id_to_piece(index) == token else None
    return None


def _folder(given: Path, usual: str) -> Path | None:
    """Find the folder whose files are of the tokenizer; ``None`` for a file under another name."""
    folder = hugging_face_folder(given)
    return given.parent if folder is None and given.name == usual else folder


def _files(folder: Path) -> dict[str, Path]:
    return {name: folder / name for name in (*_NAMES, *_BESIDE) if (folder / name).is_file()}
