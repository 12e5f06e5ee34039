"""Finds the token that ends a document of a Hugging Face tokenizer, as transformers and Megatron-LM know it.

Megatron-LM ends documents with the ``eos_token`` of transformers' tokenizer. Files in the folder of ``tokenizer.json``
name it; that file itself does not say which of its tokens ends a document.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetero.errors import ConfigError
from hetero.spec.hugging_face.generation import GENERATION_CONFIG
from megatron.pretrain.named_tokens import TOKENIZER_CONFIG, read_json_object, read_named_tokens

END_OF_DOCUMENT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek's, with full-width bars
    "<|end\u2581of\u2581sentence|>",
    "<|eos|>",
    "[EOS]",
)
"""Names under which published vocabularies keep the end of a document, the likeliest first."""

_ID_FILES = (GENERATION_CONFIG, "config.json")
"""Files that name special tokens by their id."""

_TOKEN_KEYS = ("eos_token", "sep_token")
"""Keys of the end of a document. Where a tokenizer has none but a separator, Megatron-LM takes that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfDocument:
    """The token that ends a document.

    origin: where that is said.
    is_named: a file in the folder of the tokenizer names it; otherwise it is the likeliest of the vocabulary.
    """

    token: str
    id: int
    origin: str
    is_named: bool = False

    def __str__(self) -> str:
        return f"{self.token!r} (id {self.id}), {self.origin}"


def find_end_of_document(file: Path, vocabulary: Mapping[str, int], special_tokens: Collection[str]) -> EndOfDocument:
    """Find the token that ends a document.

    The files in the folder of ``file`` count first if it has the usual name, ``tokenizer.json``. Without them it is the
    first of :data:`END_OF_DOCUMENT_TOKENS` that is a special token, and else the first that is in the vocabulary.

    Args:
        file: of the tokenizer, or of its vocabulary.
        special_tokens: those of the vocabulary that text cannot hold.

    Raises:
        ConfigError: none is found, or a file names one that the vocabulary does not have.
    """
    if _has_folder(file) and (found := _named_by_files(file, vocabulary)) is not None:
        return found
    for known, what in ((special_tokens, "special token"), (vocabulary, "token")):
        for token in END_OF_DOCUMENT_TOKENS:
            if token in known and token in vocabulary:
                origin = f"as {file.name} has this {what} and no file in its folder names an eos_token"
                return EndOfDocument(token=token, id=vocabulary[token], origin=origin)
    fix = f"name it as eos_token in a {TOKENIZER_CONFIG} in its folder" if _has_folder(file) else "add one of them"
    raise ConfigError(
        f"{file}: the vocabulary has no end of document, looked for {', '.join(END_OF_DOCUMENT_TOKENS)}; {fix}"
    )


def _has_folder(file: Path) -> bool:
    """Whether the files in its folder are of the same tokenizer, by the name that Hugging Face's libraries look for."""
    return file.name == "tokenizer.json"


def _named_by_files(file: Path, vocabulary: Mapping[str, int]) -> EndOfDocument | None:
    named = read_named_tokens(file.parent)
    for key in _TOKEN_KEYS:
        if (found := named.get(key)) is None:
            continue
        if found.token not in vocabulary:
            raise ConfigError(
                f"{found.file}: {key} {found.token!r} is not in the vocabulary of {file.name}; take both files from "
                "one model, or correct it"
            )
        origin = f"the {key} of {found.file.name}"
        return EndOfDocument(token=found.token, id=vocabulary[found.token], origin=origin, is_named=True)
    tokens: dict[int, str] = {}
    for name in _ID_FILES:
        given = read_json_object(file.with_name(name)).get("eos_token_id")
        ids = given if isinstance(given, list) else [given]
        if not ids or type(ids[0]) is not int:
            continue
        tokens = tokens or {value: token for token, value in vocabulary.items()}
        if ids[0] not in tokens:
            raise ConfigError(
                f"{file.with_name(name)}: eos_token_id {ids[0]} is not in the vocabulary of {file.name}; take both "
                "files from one model, or correct it"
            )
        first = "the first " if len(ids) > 1 else "the "
        origin = f"{first}eos_token_id of {name}"
        return EndOfDocument(token=tokens[ids[0]], id=ids[0], origin=origin, is_named=True)
    return None
