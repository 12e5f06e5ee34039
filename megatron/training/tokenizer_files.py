"""Gathers the files of a run's tokenizer, under the names that Hugging Face's libraries look for."""

import json
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.serialization import read_bytes
from hetero.spec.hugging_face.folder import hugging_face_folder
from megatron.training.cli.value_types import TOKENIZER_FILES
from megatron.training.tokenizer import HuggingFaceTokenizer, build_tokenizer

_CONFIG = "tokenizer_config.json"

_NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""Of tokenizers themselves."""

_BESIDE = (_CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json")
"""What says how a tokenizer is used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """The files by name, and how many ids the tokenizer has."""

    contents: dict[str, bytes]
    vocab_size: int


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
        paths = {"vocab.json": vocab_file, "merges.txt": merge_file}
    else:
        usual = "tokenizer.json" if isinstance(tokenizer, HuggingFaceTokenizer) else "tokenizer.model"
        paths = _files(Path(str(tokenizer_model)), usual)
    contents = {name: read_bytes(path) for name, path in paths.items()}
    if _CONFIG not in contents and isinstance(tokenizer, HuggingFaceTokenizer):
        end = tokenizer.model.id_to_token(tokenizer.eod)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        if vocab_file is not None:
            config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": end, "bos_token": end, "unk_token": end}
        contents[_CONFIG] = f"{json.dumps(config, indent=2, ensure_ascii=False)}\n".encode()
    return TokenizerFiles(contents=contents, vocab_size=tokenizer.vocab_size)


def _files(given: Path, usual: str) -> dict[str, Path]:
    folder = hugging_face_folder(given)
    if folder is None and given.name != usual:
        return {usual: given}
    folder = folder or given.parent
    return {name: folder / name for name in (*_NAMES, *_BESIDE) if (folder / name).is_file()}
